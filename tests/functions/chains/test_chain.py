"""Chains of functions against a model that runs them record by record in plain Python."""

from __future__ import annotations

import asyncio
import datetime as dt
import math
from collections.abc import Iterator
from decimal import Decimal
from itertools import groupby
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.errors import QueryError
from ftlayer.failures import FailException
from ftlayer.functions.chains import chain
from ftlayer.functions.chains.chain import (
    MAX_REASON,
    MAX_TRACEBACK,
    ROW_TAG,
    Chain,
    failure_of,
)
from ftlayer.functions.steps import Filter, FlatMap, Map, MapAsync, MapBatches

V = pa.schema([("v", pa.int64())])
BOTH = pa.schema([("a", pa.int64()), ("b", pa.string())])


def run_chain(batch, functions):
    return Chain(functions).run(batch)


def run_functions(batch, functions):
    return Chain(functions).run_untracked(batch)


def ints(values: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"v": value} for value in values], schema=V)


def rows_out(result: chain.ChainResult) -> list[tuple[int, Any]]:
    """(input row, output row) in order; values alone where there is one column."""
    found = []
    for batch, parents in result.batches:
        assert batch.num_rows == len(parents)
        for parent, row in zip(parents.tolist(), batch.to_pylist(), strict=True):
            found.append((parent, row["v"] if list(row) == ["v"] else row))
    return found


def first_failures(result: chain.ChainResult) -> dict[int, str]:
    first: dict[int, str] = {}
    for failure in result.failures:
        first.setdefault(failure.row, failure.operator)
    return first


# ---------------------------------------------------------------- random chains against a model


class Op:
    """One random operator: its step, and what it does to one value (a list of values, or it raises)."""

    def __init__(self, uid: str, kind: str, factor: int, raises: int) -> None:
        self.uid, self.kind, self.factor, self.raises = uid, kind, factor, raises

    def model(self, value: int) -> list[int]:
        if value % 7 == self.raises:
            raise ValueError(value)
        if self.kind == "filter":
            return [value] if value % 3 else []
        if self.kind in ("flat_map", "tagged arrow", "tagged pandas"):
            return [(value + i) % 1_000 for i in range(value % 3)]
        return [(value * self.factor + 1) % 1_000]

    def step(self) -> Any:
        if self.kind == "map":
            return Map(self.uid, lambda r: {"v": self.model(r["v"])[0]}, V)
        if self.kind == "filter":
            return Filter(self.uid, lambda r: self.model(r["v"]), V)
        if self.kind == "flat_map":
            return FlatMap(self.uid, self._generate, V)
        if self.kind == "async":
            return MapAsync(self.uid, self._later, V, in_flight=3, timeout_ms=60_000)
        tagged, kind = self.kind.split()
        return MapBatches(self.uid, getattr(self, f"_{kind}"), V, kind, tagged == "tagged")  # type: ignore[arg-type]

    @property
    def per_record(self) -> bool:
        return self.kind in ("map", "filter", "flat_map")

    def stream(self, value: int) -> Iterator[int]:
        """What comes out, one after the other; a flat_map raises half-way: after its first record is out."""
        if self.kind == "flat_map" and value % 7 == self.raises:
            yield 0
        yield from self.model(value)

    def _generate(self, record: dict[str, int]) -> Any:
        for value in self.stream(record["v"]):
            record["v"] = value  # one dict, changed again and again
            yield record

    async def _later(self, record: dict[str, int]) -> dict[str, int]:
        for _ in range(record["v"] % 3):  # others overtake it
            await asyncio.sleep(0)
        return {"v": self.model(record["v"])[0]}

    def _results(self, values: list[int]) -> tuple[list[int], list[int]]:
        found = [(place, out) for place, value in enumerate(values) for out in self.model(value)]
        return [out for _, out in found], [place for place, _ in found]

    def _arrow(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        values, places = self._results(batch.column("v").to_pylist())
        if not self.kind.startswith("tagged"):
            return pa.record_batch({"v": pa.array(values, pa.int32()), "more": values})
        tags = batch.column(ROW_TAG).take(pa.array(places, pa.int64()))
        return pa.record_batch({ROW_TAG: tags, "v": pa.array(values, pa.int64())})

    def _pandas(self, frame: pd.DataFrame) -> pd.DataFrame:
        values, places = self._results(frame["v"].tolist())
        if not self.kind.startswith("tagged"):
            return frame.assign(v=values)
        return pd.DataFrame({"v": values, ROW_TAG: frame[ROW_TAG].to_numpy()[places]})


KINDS = ("map", "filter", "flat_map", "plain arrow", "plain pandas", "tagged arrow", "tagged pandas", "async")
ops = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(1, 5), st.integers(0, 40)), min_size=1, max_size=5
).map(lambda drawn: [Op(f"op{i}", *one) for i, one in enumerate(drawn)])


class Failed(Exception):  # noqa: N818 - what the model says
    """The operator of this name raised."""


def flow(value: int, operators: list[Op]) -> Iterator[int]:
    """Depth first: a record goes through all operators before the next one is asked for."""
    if not operators:
        yield value
        return
    out = operators[0].stream(value)
    while True:
        try:
            result = next(out, None)
        except ValueError as error:
            raise Failed(operators[0].uid) from error
        if result is None:
            return
        yield from flow(result, operators[1:])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 999), max_size=25), ops, st.integers(1, 9))
def test_a_chain_does_what_the_model_does_and_fails_rows_alone(
    values: list[int], operators: list[Op], chunk_rows: int
) -> None:
    expected: list[tuple[int, int]] = []
    failed: dict[int, str] = {}
    for row, value in enumerate(values):
        records = [value]
        try:
            # A function of a batch sees all that has come out of the operators before it.
            for _, group in groupby(operators, key=lambda op: op.uid if not op.per_record else ""):
                neighbours = list(group)
                records = [out for record in records for out in flow(record, neighbours)]
        except Failed as error:
            failed[row] = str(error)
        else:
            expected += [(row, record) for record in records]
    with patch.object(chain, "CHUNK_ROWS", chunk_rows):
        result = run_chain(ints(values), [op.step() for op in operators])
    assert rows_out(result) == expected
    assert first_failures(result) == failed
    assert all(batch.schema == V for batch, _ in result.batches)


# ---------------------------------------------------------------- what functions return


def test_a_result_that_does_not_fit_fails_its_record_and_names_who_returned_it() -> None:
    results: list[Any] = [
        {"a": 1, "b": "x"},
        None,
        "a string",
        ["a"],
        7,
        ("a", "b"),
        {"a": "no number", "b": "x"},
        {"a": 1.5, "b": "cut off?"},
        {"a": Decimal("1.5")},
        {"a": float("nan")},
        {"a": 2**63},
        {"b": b"\xff"},
        {"b": "\udc80"},
        {"a": 2.0, "b": None},
    ]
    misfits = range(1, 13)
    steps = [
        Map("maker", lambda r: results[r["v"]], BOTH),
        Filter("after", lambda r: True, BOTH),
    ]
    result = run_chain(ints(list(range(len(results)))), steps)
    assert rows_out(result) == [(0, {"a": 1, "b": "x"}), (13, {"a": 2, "b": None})]
    assert first_failures(result) == dict.fromkeys(misfits, "maker")
    for failure in result.failures:
        assert failure.reason.startswith("TypeError: what 'maker' returned does not fit its schema (a int64")
        failure.reason.encode()


def test_columns_that_are_missing_are_null_and_those_too_many_are_left_out() -> None:
    step = Map("m", lambda r: {"b": "x", "c": object()}, BOTH)
    assert rows_out(run_chain(ints([1]), [step])) == [(0, {"a": None, "b": "x"})]


def test_null_in_a_column_that_may_not_be_null_fails_the_record() -> None:
    schema = pa.schema([pa.field("v", pa.int64(), nullable=False)])

    def void_odd(record: Any) -> Any:
        return {"v": None} if record["v"] % 2 else record

    result = run_chain(ints([0, 1, 2]), [Map("m", void_odd, schema)])
    assert rows_out(result) == [(0, 0), (2, 2)]
    assert "'v' is null" in result.failures[0].reason

    def void_odd_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([void_odd(row) for row in batch.to_pylist()])

    result = run_chain(ints([0, 1, 2]), [MapBatches("b", void_odd_batch, schema, "arrow", False)])
    assert rows_out(result) == [(0, 0), (2, 2)]


def test_any_mapping_will_do_as_a_record() -> None:
    from collections import OrderedDict, defaultdict
    from types import MappingProxyType

    made = [OrderedDict(v=1), defaultdict(int, v=2), MappingProxyType({"v": 3})]
    result = run_chain(ints([0, 1, 2]), [Map("m", lambda r: made[r["v"]], V)])
    assert rows_out(result) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("returned", [None, 5, {"v": 1}, "v", [None], [{"v": "x"}, {"v": 1}]])
def test_flat_map_takes_iterables_of_dicts_only(returned: Any) -> None:
    result = run_chain(ints([0]), [FlatMap("f", lambda r: returned, V)])
    assert (rows_out(result), first_failures(result)) == ([], {0: "f"})


def test_a_row_with_one_bad_result_among_several_yields_none() -> None:
    def split(record: Any) -> Any:
        return [{"v": 1}, {"v": "bad" if record["v"] == 1 else 2}]

    result = run_chain(ints([0, 1, 2]), [FlatMap("f", split, V)])
    assert rows_out(result) == [(0, 1), (0, 2), (2, 1), (2, 2)]


def test_stop_iteration_and_recursion_of_a_function_fail_its_record() -> None:
    def deep(record: Any) -> Any:
        if record["v"] == 1:
            return deep(record)
        if record["v"] == 2:
            return next(iter(()))
        return record

    for step in (Map("m", deep, V), Filter("m", deep, V), FlatMap("m", lambda r: [deep(r)], V)):
        result = run_chain(ints([0, 1, 2, 3]), [step])
        assert first_failures(result) == {1: "m", 2: "m"}
        assert [parent for parent, _ in rows_out(result)] == [0, 3]


def test_a_value_without_end_fails_its_record() -> None:
    endless: list[Any] = []
    endless.append(endless)
    schema = pa.schema([("v", pa.list_(pa.list_(pa.int64())))])
    result = run_chain(ints([0, 1]), [Map("m", lambda r: {"v": endless if r["v"] else [[1]]}, schema)])
    assert rows_out(result) == [(0, [[1]])]


# ---------------------------------------------------------------- what goes in


def test_records_that_python_cannot_hold_fail_alone_in_the_first_operator() -> None:
    text = pa.array([b"ok", b"\xff\xfe", b"fine"], pa.binary()).view(pa.string())
    when = pa.array([0, 0, 0], pa.int64()).view(pa.timestamp("us", "UTC"))
    batch = pa.record_batch({"text": text, "when": when})
    schema = pa.schema([("text", pa.string())])

    def second(record: Any) -> Any:
        if record["text"] == "ok":
            raise ValueError
        return record

    result = run_chain(batch, [Map("first", dict, schema), Map("second", second, schema)])
    assert first_failures(result) == {0: "second", 1: "first"}
    assert rows_out(result) == [(2, {"text": "fine"})]
    assert "column 'text'" in next(f.reason for f in result.failures if f.row == 1)

    far = pa.record_batch({"when": pa.array([0, 2**62], pa.int64()).view(pa.timestamp("us", "UTC"))})
    result = run_chain(far, [Filter("keep", lambda r: True, far.schema)])
    assert first_failures(result) == {1: "keep"}

    strings = pa.record_batch({"text": text})
    result = run_chain(strings, [MapBatches("p", lambda frame: frame, strings.schema, "pandas", False)])
    assert first_failures(result) == {1: "p"}


RICH = pa.schema(
    [
        ("s", pa.struct([("x", pa.int32()), ("t", pa.list_(pa.string()))])),
        ("m", pa.map_(pa.string(), pa.int64())),
        ("d", pa.decimal128(10, 2)),
        ("ts", pa.timestamp("us", "UTC")),
        ("ntz", pa.timestamp("us")),
        ("day", pa.date32()),
        ("bin", pa.binary()),
        ("f", pa.float64()),
        ("ok", pa.bool_()),
        ("dur", pa.duration("us")),
    ]
)
rich_rows = st.lists(
    st.fixed_dictionaries(
        {
            "s": st.none()
            | st.fixed_dictionaries(
                {"x": st.none() | st.integers(-5, 5), "t": st.none() | st.lists(st.text(max_size=3))}
            ),
            "m": st.none() | st.dictionaries(st.text(max_size=2), st.none() | st.integers(-5, 5)).map(
                lambda found: list(found.items())
            ),
            "d": st.none() | st.decimals(-99_999, 99_999, places=2),
            "ts": st.none() | st.datetimes(timezones=st.just(dt.UTC)),
            "ntz": st.none() | st.datetimes(dt.datetime(1700, 1, 1), dt.datetime(2200, 1, 1)),
            "day": st.none() | st.dates(),
            "bin": st.none() | st.binary(max_size=4),
            "f": st.none() | st.floats(allow_nan=False),
            "ok": st.none() | st.booleans(),
            "dur": st.none() | st.timedeltas(dt.timedelta(-999), dt.timedelta(999)),
        }
    ),
    max_size=6,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(rich_rows)
def test_every_type_passes_through_every_kind_of_operator_unchanged(rows: list[dict[str, Any]]) -> None:
    batch = pa.RecordBatch.from_pylist(rows, schema=RICH)
    for step in (
        Map("m", dict, RICH),
        FlatMap("f", lambda r: iter([r]), RICH),
        Filter("k", lambda r: True, RICH),
        MapBatches("a", lambda b: b, RICH, "arrow", False),
        MapBatches("t", lambda b: b, RICH, "arrow", True),
    ):
        result = run_chain(batch, [step])
        assert not result.failures
        assert [row for part, _ in result.batches for row in part.to_pylist()] == batch.to_pylist()


def test_types_that_pandas_has_pass_through_pandas() -> None:
    # (pandas takes None and NaN for one, and times from 1677 to 2262 only.)
    row = {
        "s": {"x": 1, "t": ["a", None]},
        "m": [("k", 1)],
        "d": Decimal("1.20"),
        "ts": dt.datetime(2020, 1, 1, 2, 3, 4, 5, dt.UTC),
        "ntz": dt.datetime(2020, 1, 1),
        "day": dt.date(2020, 1, 1),
        "bin": b"\x00\xff",
        "f": 1.5,
        "ok": True,
        "dur": dt.timedelta(seconds=5),
    }
    batch = pa.RecordBatch.from_pylist([row, dict.fromkeys(row)], schema=RICH)
    result = run_chain(batch, [MapBatches("p", lambda frame: frame, RICH, "pandas", True)])
    assert not result.failures
    assert result.batches[0][0].to_pylist() == batch.to_pylist()


def test_mutating_the_input_record_does_no_harm() -> None:
    def mutate(record: Any) -> Any:
        record["v"] += 100
        if record["v"] == 101:
            raise ValueError
        return record

    batch = ints([0, 1, 2])
    result = run_chain(batch, [Map("m", mutate, V), Map("n", mutate, V)])
    assert rows_out(result) == [(0, 200), (2, 202)]
    assert batch.to_pylist() == [{"v": 0}, {"v": 1}, {"v": 2}]


@pytest.mark.parametrize("kind", ["map", "filter", "flat_map", "plain arrow"])
def test_a_long_chain(kind: str) -> None:
    if kind == "flat_map":
        steps: list[Any] = [FlatMap(f"o{i}", lambda r: iter([r]), V) for i in range(150)]
    else:
        steps = [Op(f"o{i}", kind, 1, 9).step() for i in range(150)]
    result = run_chain(ints([1]), steps)
    assert not result.failures
    assert len(rows_out(result)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_in_nothing_out(kind: str) -> None:
    result = run_chain(ints([]), [Op("o", kind, 1, 1).step()])
    assert rows_out(result) == []
    assert not result.failures


# ---------------------------------------------------------------- batch functions


@pytest.mark.parametrize("kind", ["arrow", "pandas"])
@pytest.mark.parametrize(
    ("tagged", "function", "said"),
    [
        (False, lambda b: b[:1], "got 1 rows and returned"),
        (False, lambda b: None, "returned a NoneType, not a"),
        (False, lambda b: {"v": [1]}, "returned a dict, not a"),
        (True, lambda b: drop(b, ROW_TAG), f"returned no column '{ROW_TAG}'"),
        (False, lambda b: drop(b, "v"), "returned no column 'v'"),
        (True, lambda b: retag(b, 1_000), "values that were not among its input's"),
        (True, lambda b: retag(b, -1), "values that were not among its input's"),
        (True, lambda b: retag(b, None), "is null"),
        (True, lambda b: retag(b, 0.5), "0.5"),
    ],
)
def test_a_batch_function_that_breaks_its_contract_fails_every_row_with_the_reason(
    kind: Any, tagged: bool, function: Any, said: str
) -> None:
    if said.startswith("got 1"):
        function = lambda b: pa.concat_batches([b, b]) if kind == "arrow" else pd.concat([b, b])  # noqa: E731
    result = run_chain(ints([1, 2, 3]), [MapBatches("b", function, V, kind, tagged)])
    assert first_failures(result) == {0: "b", 1: "b", 2: "b"}
    assert all(said in failure.reason for failure in result.failures), result.failures


def drop(batch: Any, name: str) -> Any:
    if isinstance(batch, pd.DataFrame):
        return batch.drop(columns=name)
    return batch.drop_columns([name])


def retag(batch: Any, tag: Any) -> Any:
    if isinstance(batch, pd.DataFrame):
        return batch.assign(**{ROW_TAG: pd.Series([tag] * len(batch), dtype=object)})
    return batch.drop_columns([ROW_TAG]).append_column(ROW_TAG, pa.array([tag] * batch.num_rows))


def test_fractions_in_an_integer_column_of_pandas_fail_their_row() -> None:
    for dtype in (object, float):
        function = lambda f: pd.DataFrame({"v": pd.Series([v + 0.5 * (v == 1) for v in f["v"]], dtype=dtype)})  # noqa: B023, E731
        result = run_chain(ints([0, 1, 2]), [MapBatches("b", function, V, "pandas", False)])
        assert rows_out(result) == [(0, 0), (2, 2)]


def test_culprits_of_a_batch_are_found_in_few_calls() -> None:
    calls = 0

    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        nonlocal calls
        calls += 1
        if 700 in batch.column("v").to_pylist():
            raise ValueError("700")
        return batch

    result = run_chain(ints(list(range(1_000))), [MapBatches("b", function, V, "arrow", False)])
    assert first_failures(result) == {700: "b"}
    assert [value for _, value in rows_out(result)] == [v for v in range(1_000) if v != 700]
    assert calls <= 2 * math.ceil(math.log2(1_000)) + 1


# ---------------------------------------------------------------- what cannot be pinned on a record


@pytest.mark.parametrize("error", [MemoryError, SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("kind", ["map", "flat_map", "filter", "arrow"])
def test_errors_that_are_no_records_fault_go_up(error: type[BaseException], kind: str) -> None:
    def function(record: Any) -> Any:
        raise error

    step: Any = {
        "map": Map("o", function, V),
        "flat_map": FlatMap("o", function, V),
        "filter": Filter("o", function, V),
        "arrow": MapBatches("o", function, V, "arrow", False),
    }[kind]
    with pytest.raises(error):
        run_chain(ints([1, 2]), [step])


# ---------------------------------------------------------------- reasons and tracebacks


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


class NumberError(Exception):
    def __str__(self) -> Any:
        return 5


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FailException("no good"), "no good"),
        (FailException(), "FailException"),
        (ValueError("no good"), "ValueError: no good"),
        (MuteError(), "MuteError: (its text cannot be had: RuntimeError)"),
        (NumberError(), "NumberError: (its text cannot be had: TypeError)"),
        (ValueError("\udc80 name"), "ValueError: \\udc80 name"),
    ],
)
def test_reasons(error: Exception, reason: str) -> None:
    def function(record: Any) -> Any:
        raise error

    (failure,) = run_chain(ints([1]), [Map("m", function, V)]).failures
    assert failure.reason == reason
    assert "in function" in failure.traceback
    assert "__call__" not in failure.traceback
    (failure.reason + failure.traceback).encode()


def test_reason_and_traceback_are_bounded_and_keep_both_ends() -> None:
    def nest(depth: int) -> None:
        try:
            if depth:
                nest(depth - 1)
            raise ValueError(f"level {depth} " + "x" * 1_000)
        except ValueError as error:
            raise KeyError("y" * 5_000) from error

    try:
        nest(50)
    except KeyError as error:
        failure = failure_of(3, "op", error)
    assert len(failure.reason) == MAX_REASON
    assert len(failure.traceback) < MAX_TRACEBACK + 100
    assert failure.traceback.startswith("Traceback")
    assert "characters left out" in failure.traceback


def test_the_traceback_of_a_misfit_says_what_was_returned() -> None:
    (failure,) = run_chain(ints([1]), [Map("m", lambda r: {"v": "text"}, V)]).failures
    assert "text" in failure.reason
    assert failure.traceback


# ---------------------------------------------------------------- without tracking


def test_without_tracking_the_first_failure_is_raised() -> None:
    step = Map("half", lambda r: {"v": 4 // r["v"]}, V)
    assert [b.to_pylist() for b in run_functions(ints([1, 2]), [step])] == [[{"v": 4}, {"v": 2}]]
    assert list(run_functions(ints([]), [step])) == []
    with pytest.raises(QueryError, match="'half' failed: ZeroDivisionError"):
        list(run_functions(ints([1, 0]), [step]))


def test_parents_are_int64_and_count_over_chunks() -> None:
    values = list(range(2_500))
    result = run_chain(ints(values), [Filter("f", lambda r: r["v"] % 2, V)])
    parents = np.concatenate([parents for _, parents in result.batches])
    assert parents.dtype == np.int64
    assert parents.tolist() == values[1::2]
