"""Sources of a slot that fail: each is opened again by itself, by its own strategy, from where it was taken to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.common.clock import Now
from ftlayer.common.rules.restart import FixedDelay, NoRestart, RestartStrategy
from ftlayer.errors import ConfigError, SourceError, SourceGivenUpError, SourceRowError
from ftlayer.records import beside
from ftlayer.runtime.connectors.lane import BatchLimits
from ftlayer.runtime.protocol.messages import AssignSplits, ReaderRange, SourceFailed, Split, SplitDone
from ftlayer.runtime.slot.rules.events import RowsRead, SourceEnded
from ftlayer.runtime.slot.sources import EARLY_ROWS, Reopening, Signal, Sources
from ftlayer.runtime.task.actions import SourceRows
from ftlayer.vertex.calls import SourcePosition

ROWS = 12
FLAKY, STEADY = ("flaky", 0), ("steady", 0)


class Core:
    """What `Sources` asks of a slot: rows are accepted when the test says."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], list[int]] = {FLAKY: [], STEADY: []}
        self.over: list[tuple[str, int]] = []
        self.early = False

    def reads_early(self, key: tuple[str, int]) -> bool:
        return self.early

    def may_read(self, key: tuple[str, int]) -> bool:
        return True

    def rows_wanted(self, key: tuple[str, int]) -> int:
        return 100

    def tell(self, event: RowsRead | SourceEnded, now: Now) -> None:
        match event:
            case RowsRead(key, _, rows):
                self.seen[key] += rows.payload.column(0).to_pylist()
            case SourceEnded(key):
                self.over.append(key)


class Counting:
    """A reader of the numbers below `ROWS`, from its position on, that raises where the test says."""

    lag: int | None = None
    is_away = False

    def __init__(self, positions: Mapping[str, bytes], fails_at: Iterable[int], log: list[str]) -> None:
        self.at = int(positions.get("0", b"0"))
        self.fails_at = fails_at
        self.log = log
        self.finished = self.failed = False
        self.assigned: list[AssignSplits] = []
        self.told: list[int] = []

    def start(self) -> None:
        self.log.append(f"start at {self.at}")

    def assign(self, splits: AssignSplits) -> None:
        self.assigned.append(splits)

    def take(self, mono_ms: int) -> SourceRows | None:
        if self.finished or self.at == ROWS:
            return None
        for error in self.fails_at:
            raise SourceError(f"fails at {error}") from OSError()
        start, self.at = self.at, self.at + 1
        payload = pa.record_batch({"id": [start]})
        position = SourcePosition("0", str(start).encode() if start else None, str(self.at).encode())
        return SourceRows("0", 0, start, payload, position)

    @property
    def due_ms(self) -> int | None:
        return None

    def accepted(self, rows: SourceRows) -> SplitDone | None:
        self.told.append(rows.first_ordinal)
        return None

    @property
    def ended(self) -> bool:
        return self.finished or self.at == ROWS

    def finish(self) -> None:
        self.finished = True

    def stop(self) -> None:
        self.finished = True

    def abandon(self) -> None:
        self.finished = True
        self.log.append("abandoned")


class Idle(Counting):
    """Has nothing to give."""

    ended = False

    def take(self, mono_ms: int) -> SourceRows | None:
        return None


class Bench:
    """Two sources of one slot; the first fails as its ``failures`` say, one entry a reading."""

    def __init__(self, failures: list[bool], strategy: RestartStrategy) -> None:
        self.core = Core()
        self.failures = failures
        self.log: list[str] = []
        self.readers: list[Counting] = []
        self.reports: list[Any] = []
        self.sources = Sources(self.core, self.reports.append)  # type: ignore[arg-type]
        self.now = 0
        limits = BatchLimits(10, 1)
        self.sources.add(
            FLAKY, self.open({}), Signal(lambda: None), limits, Reopening(self.open, {}, strategy)
        )
        steady = Counting({}, (), [])
        self.sources.add(STEADY, steady, Signal(lambda: None), limits)
        self.sources.start()

    def open(self, positions: Mapping[str, bytes]) -> Counting:
        self.readers.append(Counting(positions, self, self.log))
        return self.readers[-1]

    def __iter__(self) -> Any:
        """Whether the next reading fails: iterated once for each."""
        return iter(["it"] if self.failures and self.failures.pop(0) else [])

    def turn(self) -> bool:
        return self.sources.read(Now(self.now, 0), self.core.tell)

    def to_the_end(self) -> None:
        for _ in range(1_000):
            if not self.turn():
                due = self.sources.due_ms
                if due is None:
                    return
                self.now = max(self.now + 1, due)
        raise AssertionError("it does not end")


@given(st.lists(st.booleans(), max_size=40))
def test_all_rows_come_once_and_in_order_whatever_fails(failures: list[bool]) -> None:
    bench = Bench(list(failures), FixedDelay(attempts=100, delay="10ms"))
    bench.to_the_end()
    assert bench.core.seen == {FLAKY: list(range(ROWS)), STEADY: list(range(ROWS))}
    assert sorted(bench.core.over) == [FLAKY, STEADY]


def test_the_sources_beside_it_are_read_on_during_the_pause(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench([False, True], FixedDelay(attempts=1, delay="1h"))
    for _ in range(30):
        bench.turn()
    assert bench.core.seen == {FLAKY: [0], STEADY: list(range(ROWS))}
    assert bench.log == ["start at 0", "abandoned"]
    assert bench.reports == [SourceFailed("flaky", 0, "fails at it", 3_600_000)]
    assert not caplog.records  # the driver says it, once
    assert bench.sources.due_ms == 3_600_000
    bench.now = 3_600_000
    bench.to_the_end()
    assert bench.log[2:] == ["start at 1"]
    assert bench.core.seen[FLAKY] == list(range(ROWS))


def test_rows_of_the_reader_before_are_accepted_by_it() -> None:
    bench = Bench([False, True], FixedDelay(delay="1ms"))
    bench.to_the_end()
    bench.sources.done(FLAKY, 1)
    assert [reader.told for reader in bench.readers] == [[0], []]


def test_what_is_given_up_ends_the_slot_by_the_sources_error() -> None:
    bench = Bench([True, True, True], FixedDelay(attempts=2, delay="1ms"))
    with pytest.raises(
        SourceGivenUpError, match=r"^fails at it \(it was started again 2 times, .*gives up\)"
    ):
        bench.to_the_end()
    assert bench.sources.asked == "flaky"
    with pytest.raises(SourceGivenUpError, match=r"^fails at it \(.*NoRestart\(\) gives up\)"):
        Bench([True], NoRestart()).to_the_end()


@pytest.mark.parametrize(
    "error", [SourceRowError("a row that does not fit"), SourceError("positions of another kind")]
)
def test_what_reading_again_cannot_mend_is_not_tried(error: SourceError) -> None:
    if type(error) is SourceError:
        error.__cause__ = ConfigError("of another kind")
    bench = Bench([], FixedDelay())

    def take(mono_ms: int) -> None:
        raise error

    bench.readers[0].take = take  # type: ignore[method-assign, assignment]
    with pytest.raises(type(error), match=str(error)):
        bench.turn()


def test_splits_that_are_not_done_are_assigned_again() -> None:
    """Of all ranges: with ``replay="source"`` several are read."""
    bench = Bench([False, True], FixedDelay(delay="1ms"))
    splits = Split(0, b"", 0), Split(2, b"", 0)
    ranges = [ReaderRange(number, "0", "1", 3, b"") for number in (1, 2)]
    before, after = (AssignSplits("flaky", 0, each, splits) for each in ranges)
    end = AssignSplits("flaky", 0, ReaderRange(2, "1", "1", 0, b""), ())
    done = iter([SplitDone("flaky", 1, 0), None, None, None, None])
    bench.readers[0].accepted = lambda rows: next(done)  # type: ignore[method-assign]
    for message in (before, after):
        bench.sources.assign(message)
    bench.turn()
    bench.sources.done(FLAKY, 1)
    bench.sources.assign(end)
    bench.to_the_end()
    left = AssignSplits("flaky", 0, ranges[0], splits[1:])
    assert bench.readers[1].assigned == [left, after, end]


def test_a_source_that_is_told_to_end_does_not_begin_again() -> None:
    bench = Bench([True], FixedDelay(delay="1h"))
    bench.turn()
    bench.sources.finish()
    bench.to_the_end()
    assert FLAKY in bench.core.over
    assert len(bench.readers) == 1
    failing = Bench([False, True], FixedDelay(delay="1h"))
    failing.turn()
    failing.readers[0].finish = lambda: None  # type: ignore[method-assign]
    failing.sources.finish()
    failing.to_the_end()
    assert FLAKY in failing.core.over
    assert len(failing.readers) == 1


def test_a_source_is_away_from_its_first_failure_until_it_gives_rows_again() -> None:
    bench = Bench([False, True, True, False], FixedDelay(delay="40s"))
    readings = []
    for at_ms in (0, 1_000, 41_000, 41_001, 81_000, 82_000):
        bench.now = at_ms
        bench.turn()
        readings.append(bench.sources.counters(at_ms))
    away_ms = [counters["away/flaky"] for counters in readings]
    assert away_ms == [0, 0, 40_000, 40_001, 0, 0]
    assert not any(counters.get("away/steady") for counters in readings)


def test_a_source_that_was_opened_again_and_has_nothing_is_away_no_more_after_a_while() -> None:
    bench = Bench([True], FixedDelay(delay="10ms"))
    bench.turn()
    assert bench.sources.counters(0)["away/flaky"] == 0
    bench.now = 10
    bench.sources._running[FLAKY].reopening.open = lambda positions: Idle(positions, (), bench.log)
    bench.turn()
    away_ms = [bench.sources.counters(at_ms)["away/flaky"] for at_ms in (20, 29_999, 30_000, 60_000)]
    assert away_ms == [20, 29_999, 0, 0]


def test_what_does_not_fit_is_counted_from_the_begin_of_a_slot() -> None:
    beside.note("a queue", "a time is none", 2, "x")
    bench = Bench([], FixedDelay())
    assert "misfits" not in bench.sources.counters(1)
    beside.note("a queue", "a time is none", 3, "x")
    assert bench.sources.counters(2)["misfits"] == 3


def test_a_source_whose_system_is_away_tells_no_lag_and_one_that_ends_tells_nothing() -> None:
    bench = Bench([], FixedDelay())
    reader = bench.readers[0]
    reader.lag, reader.is_away = None, True
    assert bench.sources.counters(5) == {"away/flaky": 0, "away/steady": 0}
    assert bench.sources.counters(9) == {"away/flaky": 4, "away/steady": 0}
    reader.lag, reader.is_away = 7, False
    assert bench.sources.counters(10) == {"away/flaky": 0, "away/steady": 0, "lag/flaky": 7}
    bench.sources.finish()
    assert bench.sources.counters(11) == {}


class Young:
    """A reader of an endless source whose rows are never old; ``rows`` of them come at once."""

    lag: int | None = None
    is_away = False
    ended = False
    due_ms: int | None = 1_000

    def __init__(self, limits: BatchLimits, rows: int) -> None:
        self.limits = limits
        self.rows = rows

    def start(self) -> None:
        """Nothing to do."""

    def take(self, mono_ms: int) -> SourceRows | None:
        if self.limits.waits:
            return None
        return SourceRows("0", 0, 0, pa.record_batch({"id": list(range(self.rows))}), None)


@pytest.mark.parametrize(
    ("idle", "early", "rows", "found"),
    [
        (True, True, 1, [True, True, True]),
        (True, True, EARLY_ROWS - 1, [True, True, True]),
        (True, True, EARLY_ROWS, [True, False, False]),  # they come fast
        (True, False, 1, [False, False, False]),
        (False, True, 1, [False, False, False]),
    ],
)
def test_young_rows_are_taken_where_nothing_else_is_to_be_done(
    idle: bool, early: bool, rows: int, found: list[bool]
) -> None:
    core = Core()
    core.early = early
    sources = Sources(core, [].append)  # type: ignore[arg-type]
    limits = BatchLimits(100, 5)
    sources.add(STEADY, Young(limits, rows), Signal(lambda: None), limits)  # type: ignore[arg-type]
    sources.start()
    assert [sources.read(Now(0, 0), core.tell, idle=idle) for _ in found] == found
