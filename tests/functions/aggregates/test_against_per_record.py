"""Aggregates of whole batches in C against the same ones a record at a time in Python, of all types."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ftlayer as ft
from ftlayer.functions import aggregates as tables
from ftlayer.functions.aggregates import AggregatePlan, AggregatesPerRecord, AggregateTable
from ftlayer.functions.keyed import NAN
from ftlayer.records.kernels import native

LARGEST = Decimal("9" * 36 + ".99")
VALUES: dict[pa.DataType, list[Any]] = {
    pa.int64(): [0, 1, -5, 2**63 - 1, -(2**63), 2**62],
    pa.int8(): [-128, 127, 3],
    pa.bool_(): [True, False],
    pa.float64(): [0.0, -0.0, 1.5, float("nan"), float("inf"), -3.0],
    pa.float32(): [0.5, -2.25, float("nan")],
    pa.decimal128(38, 2): [LARGEST, Decimal("-1.25"), Decimal("0.00"), LARGEST.copy_negate()],
    pa.decimal128(5, 1): [Decimal("1.5"), Decimal("-9999.9")],
    pa.string(): ["", "a", "b", "é", "key-0001", "x" * 200],
    pa.binary(): [b"", b"\0", b"ab"],
    pa.date32(): [dt.date(1, 1, 1), dt.date(2020, 2, 2)],
    pa.timestamp("us"): [dt.datetime(1960, 1, 1), dt.datetime(2020, 1, 1, 1)],
}
FUNCTIONS = (ft.count, ft.sum, ft.min, ft.max, ft.mean)


def takes(function: Any, column: str, schema: pa.Schema) -> bool:
    try:
        AggregatePlan.of([function(column)], (column,), schema)
    except ft.FTLayerError:
        return False
    return True


@st.composite
def plans(draw: st.DrawFn) -> AggregatePlan:
    kinds = draw(st.lists(st.sampled_from(list(VALUES)), min_size=2, max_size=5))
    schema = pa.schema([(f"c{place}", kind) for place, kind in enumerate(kinds)])
    keys = tuple(schema.names[: draw(st.integers(1, min(3, len(kinds))))])
    known = [ft.count(), *(f(c) for c in schema.names for f in FUNCTIONS if takes(f, c, schema))]
    calls = draw(st.lists(st.sampled_from(known), min_size=1, max_size=8, unique=True))
    return AggregatePlan.of(calls, keys, schema)


def batches(schema: pa.Schema) -> st.SearchStrategy[pa.RecordBatch]:
    rows = st.tuples(*(st.sampled_from([None, *VALUES[kind]]) for kind in schema.types))

    def made(pair: tuple[list[Any], int]) -> pa.RecordBatch:
        records, skipped = pair
        columns = [
            pa.array([record[place] for record in records], kind) for place, kind in enumerate(schema.types)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=schema).slice(skipped)

    return st.tuples(st.lists(rows, max_size=40), st.integers(0, 3)).map(made)


def records_of(columns: list[pa.Array]) -> list[Any]:
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def assert_same(got: Any, expected: Any) -> None:
    """Doubles are compared with a tolerance: Arrow rounds a decimal otherwise than Python does."""
    got, expected = (each if isinstance(each, tuple) else (each,) for each in (got, expected))
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        if isinstance(one, float) and isinstance(other, float):
            both_nan = math.isnan(one) and math.isnan(other)
            assert both_nan or math.isclose(one, other, rel_tol=1e-12, abs_tol=1e-9)
        else:
            assert one == other
            assert type(one) is type(other)


def key_of(record: Any, width: int) -> tuple[Any, ...]:
    return tuple(NAN if isinstance(part, float) and part != part else part for part in record[:width])


class Reference:
    """The same a record at a time."""

    def __init__(self, plan: AggregatePlan) -> None:
        self.plan = plan
        self.model = AggregatesPerRecord(plan)
        self.state: dict[tuple[Any, ...], Any] = {}

    def add(self, batch: pa.RecordBatch) -> list[Any]:
        """Return the results of each record, None for one that is refused."""
        found: list[Any] = []
        for record in records_of(batch.columns):
            key = key_of(record, len(self.plan.keys))
            try:
                self.state[key] = self.model.add(self.state.get(key, self.model.create()), record)
            except OverflowError:
                found.append(None)
            else:
                found.append(self.model.results(self.state[key]))
        return found


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(plan=plans(), data=st.data())
def test_results_and_state_are_those_of_python(plan: AggregatePlan, data: st.DataObject) -> None:
    store: dict[Any, Any] = {}
    table, reference = AggregateTable(plan, store), Reference(plan)
    for batch in data.draw(st.lists(batches(plan.input), max_size=6)):
        undo = data.draw(st.booleans())
        table.compact()
        columns, refused, kept = table.add(batch, undo=undo)
        before = dict(reference.state)
        expected = reference.add(batch)
        assert {row for row, _ in refused} == {row for row, each in enumerate(expected) if each is None}
        for got, each in zip(records_of(columns), expected, strict=True):
            if each is not None:
                assert_same(got, each)
        if kept is not None and data.draw(st.booleans()):
            table.restore(kept, None)
            reference.state = before
        match data.draw(st.sampled_from(["go on", "tend", "write back", "give up"])):
            case "tend":
                table.tend()
            case "write back":
                table.write_back()
            case "give up":
                table.write_back()
                table._begin()
    table.write_back()
    bare = len(plan.keys) == 1
    assert store.keys() == {key[0] if bare else key for key in reference.state}
    for key, state in reference.state.items():
        assert_same(store[key[0] if bare else key], state)


def test_what_is_large_is_written_back_and_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_BYTES", 0)
    schema = pa.schema([("k", pa.int64()), ("v", pa.string())])
    plan = AggregatePlan.of([ft.count(), ft.max("v")], ("k",), schema)
    store: dict[Any, Any] = {}
    table = AggregateTable(plan, store)
    for number in range(3):
        batch = pa.RecordBatch.from_arrays([pa.array([1, 2]), pa.array([str(number), "x"])], schema=schema)
        columns, _, _ = table.add(batch, undo=False)
        table.tend()
    assert records_of(columns) == [(3, "2"), (3, "x")]
    assert store == {1: (3, "2"), 2: (3, "x")}


def test_texts_that_were_replaced_give_their_memory_back() -> None:
    schema = pa.schema([("k", pa.int64()), ("v", pa.string())])
    table = AggregateTable(AggregatePlan.of([ft.max("v")], ("k",), schema), {})
    for number in range(200):
        text = f"{number:09d}" + "x" * 1_000
        batch = pa.RecordBatch.from_arrays([pa.array([1] * 50), pa.array([text] * 50)], schema=schema)
        table.compact()
        columns, _, _ = table.add(batch.slice(0, 1), undo=False)
        for more in range(20):
            longer = pa.RecordBatch.from_arrays(
                [pa.array([1]), pa.array([text + chr(97 + more)])], schema=schema
            )
            table.add(longer, undo=False)
    assert table._values.accumulators.nbytes < 8 << 20
    assert columns[0][0].as_py() == text


@pytest.mark.parametrize("kind", [pa.int64(), pa.float32(), pa.string(), pa.decimal128(30, 3), pa.date32()])
@given(data=st.data())
@settings(max_examples=3, deadline=None)
def test_many_keys_have_numbers_in_the_order_in_which_they_come(
    kind: pa.DataType, data: st.DataObject
) -> None:
    index = native.KeyIndex(data.draw(st.integers(0, 2**64 - 1)))
    known: dict[Any, int] = {}
    for start in range(0, 6_000, data.draw(st.integers(500, 3_000))):
        numbers = pa.array(np.arange(start, start + 2_000) * 7 % 5_000)
        column = numbers.cast(pa.int32()).cast(kind) if kind == pa.date32() else numbers.cast(kind)
        slots = np.empty(len(column), np.int32)
        schema, array = pa.RecordBatch.from_arrays([column], names=["k"]).__arrow_c_array__()
        count = index.find(schema, array, slots)
        expected = [known.setdefault(key, len(known)) for key in column.to_pylist()]
        assert slots.tolist() == expected
        assert count == len(known) == len(index)


def test_c_refuses_what_it_does_not_know() -> None:
    index, slots = native.KeyIndex(1), np.zeros(1, np.int32)
    batch = pa.RecordBatch.from_arrays([pa.array([[1]])], names=["k"])
    with pytest.raises(TypeError, match="key column 0"):
        index.find(*batch.__arrow_c_array__(), slots)
    accumulators = native.Accumulators(b"s", b"l", b"\0")
    numbers = pa.RecordBatch.from_arrays([pa.array([1])], names=["v"])
    with pytest.raises(IndexError, match="there are 0"):
        accumulators.add(slots, *numbers.__arrow_c_array__(), True, False)
    accumulators.reserve(1)
    texts = pa.RecordBatch.from_arrays([pa.array(["1"])], names=["v"])
    with pytest.raises(TypeError, match="'u'"):
        accumulators.add(slots, *texts.__arrow_c_array__(), True, False)
    with pytest.raises(ValueError, match="kept"):
        accumulators.restore(b"123")
    with pytest.raises(ValueError, match="no aggregate"):
        native.Accumulators(b"m", b"z", b"\0")
