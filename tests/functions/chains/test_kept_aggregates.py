"""Aggregates that lie beside their keys, until they are written back, held against those of a dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.functions.chains.fused import KeyColumns, Reducing
from ftlayer.functions.chains.record_segment import MOST_UNWRITTEN, RecordSegment
from ftlayer.functions.conversion import VALUES
from ftlayer.functions.steps import Filter, Map
from ftlayer.state.tables.layers import LayeredTable, Sharing

TYPES = {
    "text": pa.string(),
    "bytes": pa.binary(),
    "long": pa.int64(),
    "byte": pa.int8(),
    "many": pa.large_string(),
}
KEYS = {
    "text": st.none() | st.sampled_from(["", "a", "ä", "word", "w" * 65]),
    "bytes": st.none() | st.sampled_from([b"", b"a", b"z" * 65]),
    "long": st.none() | st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)]),
    "byte": st.none() | st.integers(-3, 3),
    "many": st.none() | st.sampled_from(["", "a", "word"]),
}
OUT = pa.schema([("n", pa.int64())])


class OddError(Exception):
    """What functions raise."""


def aggregated(kind: int) -> Callable[[Any, Any], Any]:
    """Return a function whose aggregates count in item 0: they are kept, or too large for it, or change in place."""

    def function(old: Any, record: Any) -> Any:
        count = (old[0] if isinstance(old, tuple | list) else 0) + 1
        match record[1]:
            case 0:
                raise OddError("reduce")
            case 1:
                return (count, "x" * 100)
            case 2 if isinstance(old, list):
                old[0] = count
                return old
            case 2:
                return [count]
            case 3:
                return (count, *range(9))
            case _:
                return (count, kind)

    return function


def first(aggregate: Any) -> int:
    if aggregate[0] % 5 == 4:
        raise OddError("behind")
    return int(aggregate[0])


class Run:
    """A segment that counts by key, and its table."""

    def __init__(self, schema: pa.Schema, kind: int, *, keeps: bool, layered: bool) -> None:
        self.table: dict[Any, Any] = LayeredTable("here", Sharing()) if layered else {}
        key = KeyColumns.of("r", ["key"], schema)
        steps = [
            Filter("f", lambda record: record[1] != 9, schema),
            Reducing("r", aggregated(kind), OUT, key, self.table, lambda: None if kind else (0,)),
            Map("m", first, OUT),
        ]
        self.segment = RecordSegment(steps, OUT, VALUES, "made", keeps=keeps)
        assert self.segment._driver is not None

    def step(self, op: Any) -> Any:
        if isinstance(op, pa.RecordBatch):
            outcome = self.segment.run(op, np.arange(op.num_rows))
            failures = [(failure.row, failure.operator, failure.reason) for failure in outcome.failures]
            return outcome.batch.to_pylist(), outcome.parents.tolist(), failures
        if isinstance(op, list):
            outcome = self.segment.run(op, np.arange(len(op)))
            return outcome.batch.to_pylist(), outcome.parents.tolist()
        getattr(self.segment, op)()
        if op == "tend":
            return None
        if op == "write_back" and isinstance(self.table, LayeredTable):
            self.table.freeze()
        return sorted((repr(key), repr(value)) for key, value in self.table.items())


@given(st.sampled_from(sorted(TYPES)), st.booleans(), st.integers(0, 1), st.data())
def test_counts_are_those_of_a_dict(type_: str, layered: bool, kind: int, data: st.DataObject) -> None:
    schema = pa.schema([("key", TYPES[type_]), ("n", pa.int64())])
    records = st.lists(st.tuples(KEYS[type_], st.integers(0, 9)), max_size=40)
    batches = records.map(
        lambda rows: pa.RecordBatch.from_arrays(
            [
                pa.array([row[0] for row in rows], TYPES[type_]),
                pa.array([row[1] for row in rows], pa.int64()),
            ],
            schema=schema,
        )
    )
    ops = st.lists(batches | records | st.sampled_from(["write_back", "forget", "tend"]), max_size=6)
    kept = Run(schema, kind, keeps=True, layered=layered)
    reference = Run(schema, kind, keeps=False, layered=layered)
    for op in [*data.draw(ops), "write_back", "forget"]:
        assert kept.step(op) == reference.step(op)


@pytest.mark.parametrize("keys", [20, 30_000, 200_000])
def test_counts_of_more_keys_than_are_kept(keys: int) -> None:
    schema = pa.schema([("key", pa.int64())])
    table: dict[int, int] = {}
    step = Reducing("r", lambda n, _: n + 1, OUT, KeyColumns.of("r", ["key"], schema), table, lambda: 0)
    segment = RecordSegment([step], OUT, VALUES, keeps=True)
    draw = np.random.default_rng(keys)
    expected: dict[int, int] = {}
    for _ in range(12):
        drawn = draw.integers(0, keys, 15_000)
        outcome = segment.run(
            pa.RecordBatch.from_arrays([pa.array(drawn)], schema=schema), np.arange(len(drawn))
        )
        counts = []
        for key in drawn.tolist():
            expected[key] = expected.get(key, 0) + 1
            counts.append(expected[key])
        assert outcome.batch.column(0).to_pylist() == counts
        segment.tend()
        assert segment._driver is not None
        assert segment._driver.unwritten <= MOST_UNWRITTEN
    segment.write_back()
    assert table == expected
    assert segment._driver.unwritten == 0


def test_a_batch_that_runs_is_not_written_back() -> None:
    schema = pa.schema([("key", pa.int64())])
    segments: list[RecordSegment] = []

    def function(n: int, _: int) -> int:
        segments[0].write_back()
        return n + 1

    step = Reducing("r", function, OUT, KeyColumns.of("r", ["key"], schema), {}, lambda: 0)
    segments.append(RecordSegment([step], OUT, VALUES, keeps=True))
    outcome = segments[0].run(pa.RecordBatch.from_pydict({"key": [1]}, schema=schema), np.arange(1))
    assert "this driver runs a batch" in outcome.failures[0].reason
