"""The loop in C held against the one in Python: the same results, failures, aggregates and undo log."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.errors import StateSerializationError
from ftlayer.functions.chains.fused import KeyColumns, PreparedStep, Reducing
from ftlayer.functions.chains.record_segment import RecordSegment
from ftlayer.functions.conversion import VALUES
from ftlayer.functions.steps import Filter, FlatMap, Map
from ftlayer.functions.undo import LateFailure, UndoLog, UndoValues

IN = pa.schema(
    [
        ("n", pa.int64()),
        ("x", pa.float64()),
        ("t", pa.string()),
        ("b", pa.bool_()),
        ("z", pa.binary()),
        ("i", pa.int32()),
        ("s", pa.int16()),
        ("c", pa.int8()),
    ]
)
MORE = pa.schema(
    [
        *IN,
        ("d", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("q", pa.decimal128(5, 2)),
        ("l", pa.list_(pa.int64())),
        ("f", pa.float32()),
        ("u", pa.large_string()),
    ]
)
MUST = pa.field("must", pa.int64(), nullable=False)
ONE = pa.schema([("n", pa.int64())])

VALUE = {
    "n": st.none() | st.integers(-(2**63), 2**63 - 1),
    "x": st.none() | st.floats(width=64),
    "t": st.none() | st.text(max_size=5),
    "b": st.none() | st.booleans(),
    "z": st.none() | st.binary(max_size=5),
    "i": st.none() | st.integers(-(2**31), 2**31 - 1),
    "s": st.none() | st.integers(-(2**15), 2**15 - 1),
    "c": st.none() | st.integers(-128, 127),
}
MORE_VALUE = VALUE | {
    "d": st.none() | st.dates(),
    "at": st.none() | st.datetimes(timezones=st.just(UTC)),
    "q": st.none() | st.decimals(-99, 99, places=2),
    "l": st.none() | st.lists(st.integers(0, 9), max_size=2),
    "f": st.none() | st.floats(width=32),
    "u": st.none() | st.text(max_size=5),
}
RECORDS = {
    schema: st.lists(st.tuples(*(MORE_VALUE[name] for name in schema.names)), max_size=12)
    for schema in (IN, MORE)
}


def batch_of(records: list[Any], schema: pa.Schema = IN) -> pa.RecordBatch:
    columns = [[record[place] for record in records] for place in range(len(schema))]
    return pa.RecordBatch.from_pydict(dict(zip(schema.names, columns, strict=True)), schema=schema)


class OddError(Exception):
    """What functions raise."""


def turns(draws: list[int]) -> Callable[[], int]:
    """What a function does at each of its calls."""
    left: Iterator[int] = iter(draws)
    return lambda: next(left, 0)


def a_map(turn: Callable[[], int], width: int) -> Callable[[Any], Any]:
    def function(record: Any) -> Any:
        match turn():
            case 1:
                raise OddError("map")
            case 2:
                raise StopIteration
            case 3:
                return record[:-1]
            case 4:
                return (*record[:-1], 1.5)
            case 5:
                return "no record"
            case 6:
                return (*record[:-1], None)
            case 8:
                return (*record[: width - 1], OddError, 7)
            case _:
                return (*record[:width], 7)

    return function


def a_filter(turn: Callable[[], int]) -> Callable[[Any], Any]:
    async def nothing() -> bool:
        return True

    def function(record: Any) -> Any:
        match turn():
            case 1:
                raise OddError("filter")
            case 2:
                return False
            case 3:
                return ""
            case 4:
                return "true"
            case 5:
                return nothing()
            case 6:
                return np.array([1, 2])
            case _:
                return True

    return function


def a_flat_map(turn: Callable[[], int]) -> Callable[[Any], Any]:
    def two_and_an_error(record: Any) -> Iterator[Any]:
        yield record
        yield record
        raise OddError("in the middle")

    def function(record: Any) -> Any:
        match turn():
            case 1:
                raise OddError("flat_map")
            case 2:
                return two_and_an_error(record)
            case 3:
                return []
            case 4:
                return (each for each in (record, record, record))
            case 5:
                return "text"
            case 6:
                return 7
            case _:
                return [record, record]

    return function


def a_reduce(turn: Callable[[], int], width: int) -> Callable[[Any, Any], Any]:
    def function(old: Any, record: Any) -> Any:
        if turn() == 1:
            raise OddError("reduce")
        return (*record[:width], 1 if old is None or len(old) <= width else old[width] + 1)

    return function


KINDS = ("map", "filter", "flat_map", "reduce", "aggregate")
STEP = st.tuples(
    st.sampled_from(KINDS),
    st.lists(st.integers(0, 9), max_size=24),
    st.sets(st.sampled_from(MORE.names), min_size=1, max_size=2),
)
PROGRAM = st.lists(STEP, min_size=1, max_size=4)


class Chain:
    """A segment, its tables and its log."""

    def __init__(self, program: list[Any], schema: pa.Schema, *, driven: bool, logged: bool) -> None:
        self.schema, self.out = schema, pa.schema([*schema, MUST])
        self.log = UndoLog() if logged else None
        self.tables: list[dict[Any, Any]] = []
        steps = [self._step(f"s{number}", *each) for number, each in enumerate(program)]
        self.segment = RecordSegment(steps, self.out, VALUES, "made", self.log)
        if not driven:
            self.segment._driver = None
        assert driven == (self.segment._driver is not None)

    def _step(self, uid: str, kind: str, draws: list[int], keys: set[str]) -> PreparedStep:
        turn = turns(draws)
        if kind == "map":
            return Map(uid, a_map(turn, len(self.schema)), self.out)
        if kind == "filter":
            return Filter(uid, a_filter(turn), self.out)
        if kind == "flat_map":
            return FlatMap(uid, a_flat_map(turn), self.out)
        table: Any = {}
        self.tables.append(table)
        if self.log is not None:
            table = UndoValues(table, self.log)
        create = (lambda: None) if kind == "aggregate" else None
        key = KeyColumns.of(uid, sorted(keys & set(self.schema.names)) or ["n"], self.schema)
        return Reducing(uid, a_reduce(turn, len(self.schema)), self.out, key, table, create)

    def run(self, batch: pa.RecordBatch) -> Any:
        parents = np.arange(batch.num_rows) * 2
        try:
            outcome = self.segment.run(batch, parents)
        except LateFailure as late:
            return "late", late.row, self.state
        failures = [(each.row, each.operator, each.reason) for each in outcome.failures]
        return outcome.batch.to_pylist(), outcome.parents.tolist(), failures, self.state

    @property
    def state(self) -> Any:
        entries = [] if self.log is None else [repr(entry)[:40] for entry in self.log.entries[1::3]]
        return [[(repr(key), repr(table[key])) for key in table] for table in self.tables], entries


def same(left: Any, right: Any) -> bool:
    """Equal, though not-a-number is among them."""
    return repr(left) == repr(right)


@pytest.mark.parametrize("schema", [IN, MORE], ids=["plain", "more"])
@given(PROGRAM, st.data(), st.booleans())
def test_both_loops_do_the_same(
    schema: pa.Schema, program: list[Any], data: st.DataObject, logged: bool
) -> None:
    driven = Chain(program, schema, driven=True, logged=logged)
    reference = Chain(program, schema, driven=False, logged=logged)
    for records in data.draw(st.lists(RECORDS[schema], min_size=1, max_size=3)):
        batch = batch_of(records, schema)
        assert same(driven.run(batch), reference.run(batch))
        assert driven.segment.progress == reference.segment.progress
        assert driven.segment.row is reference.segment.row is None


def segment_of(*steps: PreparedStep, schema: pa.Schema = ONE, log: UndoLog | None = None) -> RecordSegment:
    segment = RecordSegment(list(steps), schema, VALUES, "made", log)
    assert segment._driver is not None
    return segment


def run(segment: RecordSegment, values: list[Any]) -> Any:
    batch = pa.RecordBatch.from_pydict({"n": values}, schema=ONE)
    return segment.run(batch, np.arange(len(values)))


def test_a_part_of_a_larger_batch_is_read() -> None:
    batch = pa.RecordBatch.from_pydict({"n": range(100)}, schema=ONE).slice(40, 30)
    outcome = segment_of(Map("m", lambda n: n + 1, ONE)).run(batch, np.arange(30))
    assert outcome.batch.column(0).to_pylist() == list(range(41, 71))


def test_many_results_of_one_record() -> None:
    words = pa.schema([pa.field("w", pa.string())])
    segment = segment_of(
        FlatMap("f", lambda n: [None if k % 3 else "w" * k for k in range(n)], words), schema=words
    )
    outcome = run(segment, [0, 300, 2])
    expected = [None if k % 3 else "w" * k for n in (0, 300, 2) for k in range(n)]
    assert outcome.batch.column(0).to_pylist() == expected
    assert outcome.parents.tolist() == [1] * 300 + [2] * 2
    outcome.batch.validate(full=True)


def test_results_of_a_record_that_fails_are_taken_back() -> None:
    wide = pa.schema([("b", pa.bool_()), ("t", pa.string()), ("n", pa.int64())])

    def results(n: int) -> Iterator[Any]:
        for k in range(20):
            yield (True, "x" * k, k) if k % 2 else (None, None, None)
        if n % 2:
            raise OddError(n)
        yield False, "", n

    segment = segment_of(FlatMap("f", results, wide), schema=wide)
    outcome = run(segment, [1, 2, 3, 4, 5])
    good = [(True, "x" * k, k) if k % 2 else (None, None, None) for k in range(20)]
    assert [tuple(row.values()) for row in outcome.batch.to_pylist()] == [
        *good,
        (False, "", 2),
        *good,
        (False, "", 4),
    ]
    assert [failure.row for failure in outcome.failures] == [0, 2, 4]
    outcome.batch.validate(full=True)
    assert outcome.batch.column(1).null_count == 20


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_exception_fails_its_record(error: type[BaseException]) -> None:
    def function(n: int) -> int:
        if n == 3:
            raise error
        return n

    segment = segment_of(Map("m", function, ONE))
    outcome = run(segment, [1, 2, 3, 4])
    assert outcome.batch.column(0).to_pylist() == [1, 2, 4]
    assert [(each.row, each.reason) for each in outcome.failures] == [(2, f"{error.__name__}: ")]


@pytest.mark.parametrize(
    ("error", "goes_up"), [(SystemExit, False), (StateSerializationError, True), (MemoryError, False)]
)
def test_with_a_log_an_exit_fails_its_record(error: type[BaseException], goes_up: bool) -> None:
    def function(n: int) -> int:
        raise error("meant")

    segment = segment_of(Map("m", function, ONE), log=UndoLog())
    if goes_up:
        with pytest.raises(error):
            run(segment, [1])
    else:
        assert len(run(segment, [1]).failures) == 1


def test_the_row_that_works_is_known_meanwhile() -> None:
    seen: list[Any] = []
    segment = segment_of(Map("m", lambda n: (seen.append((segment.row, segment.progress)), n)[1], ONE))
    run(segment, [5, 6])
    segment.run(pa.RecordBatch.from_pydict({"n": [7, 8]}, schema=ONE), np.array([30, 31]))
    assert seen == [(0, 0), (1, 1), (30, 2), (31, 3)]


def test_all_that_is_not_equal_to_itself_is_one_key() -> None:
    floats = pa.schema([("x", pa.float64())])
    table: dict[Any, Any] = {}
    step = Reducing("r", lambda old, x: old + 1, ONE, KeyColumns.of("r", ["x"], floats), table, lambda: 0)
    segment = segment_of(step)
    batch = pa.RecordBatch.from_pydict({"x": [math.nan, 1.0, math.nan, None]}, schema=floats)
    assert segment.run(batch, np.arange(4)).batch.column(0).to_pylist() == [1, 1, 2, 1]
    assert len(table) == 3


def test_a_key_that_cannot_be_hashed_is_said() -> None:
    step = Reducing("r", lambda old, n: n, ONE, KeyColumns.of("r", ["n"], ONE), {})
    outcome = run(segment_of(Map("m", lambda n: [n], ONE), step), [1])
    assert "'r' cannot use a list as a key ([1])" in outcome.failures[0].reason


class Held:
    """Something that is seen to be freed."""


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_kept(fails: bool) -> None:
    held: list[weakref.ref[Held]] = []

    def make(n: int) -> Any:
        thing = Held()
        held.append(weakref.ref(thing))
        return n, thing

    def use(pair: Any) -> Any:
        if fails and pair[0] % 2:
            raise OddError("used")
        return [pair[0], pair[0]]

    table: dict[Any, Any] = {}
    key = KeyColumns.of("r", ["n"], ONE)
    steps = (Map("m", make, ONE), FlatMap("f", use, ONE), Reducing("r", lambda old, n: n, ONE, key, table))
    segment = segment_of(*steps)
    outcome = run(segment, list(range(50)))
    assert len(outcome.failures) == (25 if fails else 0)
    del outcome
    gc.collect()
    assert len(held) == 50
    assert not [thing for thing in held if thing() is not None]


def test_a_segment_is_freed_though_its_functions_refer_to_it() -> None:
    def make() -> weakref.ref[RecordSegment]:
        kept: list[Any] = []
        segment = segment_of(Map("m", lambda n: (kept, n)[1], ONE))
        kept.append(segment)
        run(segment, [1])
        return weakref.ref(segment)

    seen = make()
    gc.collect()
    assert seen() is None


STAMPED = pa.schema([("at", pa.timestamp("us")), ("n", pa.int64())])


def test_what_it_cannot_run_is_left_to_python() -> None:
    assert RecordSegment([], ONE, VALUES, "made")._driver is None
    segment = segment_of(Map("m", lambda record: (record[0], record[0].year), STAMPED), schema=STAMPED)
    years = [2, 2020, 20_000, 3, None, 1999]
    times = [None if year is None else (year - 1970) * 31_556_952_000_000 for year in years]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(times, pa.int64()).cast(pa.timestamp("us")), pa.array(range(6))], schema=STAMPED
    )
    outcome = segment.run(batch, np.arange(6))
    assert outcome.parents.tolist() == [0, 1, 3, 5]
    assert [failure.row for failure in outcome.failures] == [2, 4]
    assert "column 'at' of the record cannot be read in Python" in outcome.failures[0].reason
    assert segment.progress == 6


def test_many_chunks_of_objects_and_one_that_cannot_be_read() -> None:
    rows = 5_500
    times = [number * 1_000_000 for number in range(rows)]
    times[2_300] = 2**62
    batch = pa.RecordBatch.from_arrays(
        [pa.array(times, pa.int64()).cast(pa.timestamp("us")), pa.array(range(rows))], schema=STAMPED
    )
    seen: list[int | None] = []

    def function(record: Any) -> Any:
        seen.append(segment.row)
        if record[1] % 1_000 == 7:
            raise OddError(record[1])
        return [record, ("no time", 1)] if record[1] == 4_001 else [record] * (record[1] % 3)

    segment = segment_of(FlatMap("f", function, STAMPED), schema=STAMPED)
    outcome = segment.run(batch, np.arange(rows) * 2)
    expected = [n for n in range(rows) if n % 1_000 != 7 and n not in (2_300, 4_001) for _ in range(n % 3)]
    assert outcome.batch.column(1).to_pylist() == expected
    assert outcome.parents.tolist() == [2 * n for n in expected]
    assert sorted(failure.row for failure in outcome.failures) == [
        2 * n for n in (7, 1_007, 2_007, 2_300, 3_007, 4_001, 4_007, 5_007)
    ]
    assert seen == [2 * n for n in range(rows) if n != 2_300]
    assert segment.progress == rows
    outcome.batch.validate(full=True)


TEXTS = pa.schema([("t", pa.string()), ("z", pa.binary())])


def unchanged(batches: list[list[tuple[str | None, bytes | None]]]) -> None:
    """All that is read is what was there."""
    segment = segment_of(Map("m", lambda record: record, TEXTS), schema=TEXTS)
    for records in batches:
        batch = batch_of(records, TEXTS)
        assert segment.run(batch, np.arange(len(records))).batch.equals(batch)


@given(
    st.lists(
        st.lists(
            st.tuples(st.none() | st.text("aä\0€", max_size=12), st.none() | st.binary(max_size=12)),
            max_size=30,
        ),
        max_size=4,
    )
)
def test_texts_are_read_as_they_are(batches: list[list[tuple[str | None, bytes | None]]]) -> None:
    unchanged(batches)


@pytest.mark.parametrize("kinds", [3_000, 30_000, 10**9])
def test_however_many_texts_there_are(kinds: int) -> None:
    """Few are known soon, many only some of them; and where all are new, they are read without asking for a while."""
    draw = np.random.default_rng(kinds)
    batches = []
    for _ in range(6):
        numbers = draw.integers(0, kinds, 10_000).tolist()
        batches.append([("ä" * (n % 3) + f"{n:0{n % 70}}", f"{n:x}".encode()) for n in numbers])
    unchanged(batches)


def test_a_text_that_comes_again_is_the_same_object() -> None:
    seen: list[str] = []
    words = pa.schema([("w", pa.string())])
    segment = segment_of(Map("m", lambda word: seen.append(word), words), schema=words)
    for _ in range(3):
        segment.run(pa.RecordBatch.from_pydict({"w": ["one", "två", "one"]}, schema=words), np.arange(3))
    assert len(set(map(id, seen))) == 2


def test_records_that_functions_keep_stay_as_they_are() -> None:
    kept: list[tuple[str, bytes]] = []
    lent: list[Iterator[tuple[str, bytes]]] = []

    def keep(record: tuple[str, bytes]) -> tuple[str, bytes]:
        if record[0] == "kept":
            kept.append(record)
        elif record[0] == "lent":
            lent.append(iter([record]))
        return record

    segment = segment_of(Map("m", keep, TEXTS), schema=TEXTS)
    records = [
        (text, bytes([number])) for number, text in enumerate(["kept", "", "lent", "kept", "", ""] * 5)
    ]
    segment.run(batch_of(records, TEXTS), np.arange(len(records)))
    assert kept == [record for record in records if record[0] == "kept"]
    assert [next(each) for each in lent] == [record for record in records if record[0] == "lent"]
