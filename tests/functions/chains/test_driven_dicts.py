"""The loop in C over records that are dicts, held against the one in Python: the same results and failures."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ftlayer.functions.chains.fused import PreparedStep
from ftlayer.functions.chains.record_segment import RecordSegment
from ftlayer.functions.conversion import DICTS
from ftlayer.functions.retry_rules import RetryRules
from ftlayer.functions.steps import Filter, FlatMap, Map

IN = pa.schema(
    [
        ("n", pa.int64()),
        ("x", pa.float64()),
        ("t", pa.string()),
        ("b", pa.bool_()),
        ("z", pa.binary()),
        ("i", pa.int32()),
    ]
)
OUT = pa.schema([*IN, pa.field("must", pa.int64(), nullable=False)])
ONE = pa.schema([("n", pa.int64())])

RECORDS = st.lists(
    st.fixed_dictionaries(
        {
            "n": st.none() | st.integers(-(2**63), 2**63 - 1),
            "x": st.none() | st.floats(width=64),
            "t": st.none() | st.text(max_size=5),
            "b": st.none() | st.booleans(),
            "z": st.none() | st.binary(max_size=5),
            "i": st.none() | st.integers(-(2**31), 2**31 - 1),
        }
    ),
    max_size=12,
)


class OddError(Exception):
    """What functions raise."""


def results_of(record: dict[str, Any]) -> list[Callable[[], Any]]:
    """Return what a function may make of a record: what fits, what fits after another conversion, and what does not."""
    whole = {**record, "must": 7}
    return [
        lambda: whole,
        lambda: record,
        lambda: {"must": 1},
        lambda: {**whole, "more": object()},
        lambda: {**whole, "must": None},
        lambda: {**whole, "x": 3},
        lambda: {**whole, "i": 2**40},
        lambda: {**whole, "n": 1.5},
        lambda: {**whole, "t": "\ud800"},
        lambda: {**whole, "t": 7},
        lambda: OrderedDict(whole),
        lambda: MappingProxyType(whole),
        lambda: defaultdict(lambda: 3, {"t": "of a kind that makes what it lacks"}),
        lambda: (1, 2),
        lambda: None,
        lambda: 1 / 0,
    ]


def turns(draws: list[int]) -> Callable[[dict[str, Any]], Any]:
    left = iter(draws)

    def made(record: dict[str, Any]) -> Any:
        choices = results_of(record)
        return choices[next(left, 0) % len(choices)]()

    return made


def changing(made: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that also changes the dict that it gets."""

    def function(record: dict[str, Any]) -> Any:
        result = made(dict(record))
        record.clear()
        return result

    return function


def yielding(draws: list[int]) -> Callable[[Any], Any]:
    """A flat_map whose results come as a list, a tuple, or an iterator that changes one dict; or as none of these."""
    left, made = iter(draws), turns(draws[1:])

    def one_dict(record: dict[str, Any]) -> Iterator[Any]:
        result = {**record, "must": 0}
        for number in range(3):
            result["must"] = number
            yield result
        if next(left, 0) % 2:
            raise OddError("behind three")

    def function(record: dict[str, Any]) -> Any:
        match next(left, 0) % 6:
            case 0:
                return [made(record), made(record)]
            case 1:
                return (made(record),)
            case 2:
                return one_dict(record)
            case 3:
                return []
            case 4:
                return {"not": "many"}
            case _:
                return 7

    return function


STEP = st.tuples(st.sampled_from(("map", "filter", "flat_map")), st.lists(st.integers(0, 40), max_size=24))


def segment_of(program: list[tuple[str, list[int]]], *, driven: bool) -> RecordSegment:
    steps: list[PreparedStep] = []
    for number, (kind, draws) in enumerate(program):
        uid = f"s{number}"
        match kind:
            case "map":
                steps.append(Map(uid, changing(turns(draws)), OUT))
            case "filter":
                answers = turns(draws)
                steps.append(Filter(uid, lambda record, of=answers: bool(of(dict(record))), OUT))
            case _:
                steps.append(FlatMap(uid, yielding(draws), OUT))
    segment = RecordSegment(steps, OUT, DICTS, "made")
    assert segment._driver is not None
    if not driven:
        segment._driver = None
    return segment


def outcome_of(segment: RecordSegment, records: list[dict[str, Any]]) -> Any:
    batch = pa.RecordBatch.from_pylist(records, schema=IN)
    outcome = segment.run(batch, np.arange(batch.num_rows) * 2)
    outcome.batch.validate(full=True)
    failures = [(each.row, each.operator, each.reason) for each in outcome.failures]
    # Not-a-number is among them.
    return repr((outcome.batch.to_pylist(), outcome.parents.tolist(), failures, segment.progress))


@given(st.lists(STEP, min_size=1, max_size=3), st.lists(RECORDS, min_size=1, max_size=2))
@example([("flat_map", [0, 2, 12])], [[dict.fromkeys(IN.names)]])
def test_both_loops_do_the_same(program: list[Any], batches: list[list[Any]]) -> None:
    driven, reference = segment_of(program, driven=True), segment_of(program, driven=False)
    for records in batches:
        assert outcome_of(driven, records) == outcome_of(reference, records)


def test_a_record_is_a_dict_of_its_own() -> None:
    seen: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> dict[str, Any]:
        seen.append(record)
        record["more"] = 1
        return record

    segment = RecordSegment([Map("m", keep, ONE, rules=RetryRules(lax=True))], ONE, DICTS)
    batch = pa.RecordBatch.from_pydict({"n": range(5), "t": list("abcde")})
    assert segment.run(batch.slice(1, 3), np.arange(3)).batch.to_pylist() == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert [list(record.items()) for record in seen] == [
        [("n", n), ("t", t), ("more", 1)] for n, t in ((1, "b"), (2, "c"), (3, "d"))
    ]


def test_text_that_is_none_fails_its_record_alone() -> None:
    column = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(np.array([0, 1, 3, 4], np.int32)), pa.py_buffer(b"a\xff\xfeb")]
    )
    batch = pa.RecordBatch.from_arrays([column], names=["t"])
    segment = RecordSegment([Map("m", lambda record: {"n": len(record["t"])}, ONE)], ONE, DICTS)
    assert segment._driver is not None
    outcome = segment.run(batch, np.arange(3))
    assert outcome.batch.to_pylist() == [{"n": 1}, {"n": 1}]
    assert [
        (each.row, "column 't' of the record cannot be read" in each.reason) for each in outcome.failures
    ] == [(1, True)]


class Incomparable(str):
    """A key that cannot be compared with the name of a column, though it has the same hash."""

    def __hash__(self) -> int:
        return hash("n")

    def __eq__(self, other: object) -> bool:
        raise OddError("never equal")


def test_a_key_that_cannot_be_compared_fails_its_record_alone() -> None:
    def function(record: dict[str, Any]) -> dict[Any, Any]:
        return {Incomparable("n"): 1} if record["n"] == 1 else record

    segment = RecordSegment([Map("m", function, ONE)], ONE, DICTS)
    assert segment._driver is not None
    outcome = segment.run(pa.RecordBatch.from_pydict({"n": [0, 1, 2]}, schema=ONE), np.arange(3))
    assert outcome.batch.to_pylist() == [{"n": 0}, {"n": 2}]
    assert [(each.row, each.operator) for each in outcome.failures] == [(1, "m")]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_what_is_no_exception_fails_its_record(error: type[BaseException]) -> None:
    def function(record: dict[str, Any]) -> dict[str, Any]:
        raise error

    segment = RecordSegment([Map("m", function, ONE)], ONE, DICTS)
    outcome = segment.run(pa.RecordBatch.from_pydict({"n": [0]}, schema=ONE), np.arange(1))
    assert [(each.row, each.operator) for each in outcome.failures] == [(0, "m")]


def test_what_it_cannot_run_is_left_to_python() -> None:
    twice = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["n", "n"])
    stamped = pa.RecordBatch.from_arrays(
        [pa.array([1]), pa.array([0], pa.timestamp("us"))], names=["n", "at"]
    )
    segment = RecordSegment([Map("m", lambda record: {"n": record["n"]}, ONE)], ONE, DICTS)
    schema, array = twice.__arrow_c_array__()
    assert segment._driver is not None
    assert segment._driver.run(schema, array, None, lambda *failure: None) is None
    assert segment.run(stamped, np.arange(1)).batch.to_pylist() == [{"n": 1}]


def test_columns_of_other_types_are_made_by_arrow() -> None:
    nested = pa.schema([("n", pa.int64()), ("at", pa.timestamp("us")), ("in", pa.list_(pa.int64()))])
    segment = RecordSegment(
        [Map("m", lambda record: record | {"in": [record["n"]] * 2}, nested)], nested, DICTS
    )
    assert segment._driver is not None
    batch = pa.RecordBatch.from_pydict(
        {"n": [1, 2, None], "at": [0, None, 5], "in": [[], None, [7]]}, schema=nested
    )
    outcome = segment.run(batch, np.arange(3))
    assert outcome.batch.column(1).equals(batch.column(1))
    assert outcome.batch.column(2).to_pylist() == [[1, 1], [2, 2], [None, None]]
