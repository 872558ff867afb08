"""Reader sources with checkpoints as they run: the planner's thread and slots' readers; no Spark, no vertex."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition, SimpleDataSourceStreamReader

from ftlayer.errors import ConfigError, FTLayerError, IncompatibleCheckpointError
from ftlayer.functions.data_sources import ReadMaxRows, SupportsTriggerAvailableNow
from ftlayer.runtime.barrier_mode.driver.rules.reader_checkpoints import (
    Captured,
    RangeLog,
    SourceCheckpoints,
    unpack_captured,
    unpack_restored,
)
from ftlayer.runtime.connectors.offset_reader import SplitPosition, pack_rows, partition_key
from ftlayer.runtime.driver.planners import ReaderPlanner
from ftlayer.runtime.driver.rules.planner_rules import (
    DrainSource,
    KeptRanges,
    PlannedRange,
    SubtaskDown,
    SubtaskUp,
)
from ftlayer.runtime.protocol.messages import AssignSplits, ReaderRange
from ftlayer.topology.operators import ReaderSource, Source

ID = pa.schema([("id", pa.int64())])
BROKERS = sys.modules.setdefault("ftlayer_test_logs", ModuleType("ftlayer_test_logs"))


class Log:
    """A broker's log, shared by all copies of its reader."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.first = 0
        self.commits: list[int] = []
        self.calls: list[str] = []
        self.fail: dict[str, Exception] = {}
        self.random = random.Random(1)
        self.silent: set[int] = set()
        self.blocks = ""
        self.blocked = threading.Event()
        self.go_on = threading.Event()

    def __reduce__(self) -> Any:
        setattr(BROKERS, f"log{id(self)}", self)
        return getattr, (BROKERS, f"log{id(self)}")

    def call(self, name: str) -> None:
        self.calls.append(name)
        if self.blocks == name:
            self.blocks = ""
            self.blocked.set()
            assert self.go_on.wait(600)
        if (error := self.fail.pop(name, None)) is not None:
            raise error


class Slice(InputPartition):
    def __init__(self, rows: list[int]) -> None:
        self.rows = rows


class LogReader(DataSourceStreamReader):
    """Spreads a range over one to four partitions, at random."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def initialOffset(self) -> Any:
        self.log.call("initialOffset")
        return self.log.first

    def latestOffset(self, start: Any, limit: Any) -> Any:
        self.log.call("latestOffset")
        return len(self.log.rows)

    def getDefaultReadLimit(self) -> Any:
        return None

    def partitions(self, start: Any, end: Any) -> list[Slice]:
        self.log.call("partitions")
        if start in self.log.silent:
            return []
        count = self.log.random.randint(1, 4)
        return [Slice(list(range(start + split, end, count))) for split in range(count)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Slice)
        return ((self.log.rows[row],) for row in partition.rows)

    def commit(self, end: Any) -> None:
        self.log.call("commit")
        self.log.commits.append(end)


class SimpleReader(SimpleDataSourceStreamReader):
    def __init__(self, log: Log) -> None:
        self.log = log

    def initialOffset(self) -> Any:
        return {"at": 0}

    def read(self, start: Any) -> Any:
        end = len(self.log.rows)
        return iter([(row,) for row in self.log.rows[start["at"] : end]]), {"at": end}

    def readBetweenOffsets(self, start: Any, end: Any) -> Any:
        self.log.calls.append("readBetweenOffsets")
        return iter([(row,) for row in self.log.rows[start["at"] : end["at"]]])

    def commit(self, end: Any) -> None:
        self.log.commits.append(end["at"])


class Job:
    """A planner and its slots. A checkpoint is (positions, what the planner gave, rows emitted before)."""

    lag: int | None = None
    is_away = False

    def __init__(self, driver: Any, key: bytes, reader: Any, parallelism: int, **more: Any) -> None:
        self.driver, self.parallelism = driver, parallelism
        self.source = Source("numbers", ReaderSource(reader), ID)
        self.slots: dict[int, Any] = {}
        self.errors: list[FTLayerError] = []
        self.inbox: list[AssignSplits] = []
        self.lock = threading.Lock()
        self.positions: dict[str, bytes] = {}
        self.emitted: list[int] = []
        self.origin: list[int] = []
        self.planner = ReaderPlanner(
            self.source,
            parallelism,
            keeper=self._opened,
            key=key,
            send=self._send,
            failed=self._failed,
            **more,
        )

    def _opened(self, source: Source, happened: Callable[[Any], None]) -> KeptRanges:
        self.ranges = SourceCheckpoints(source.uid, happened)
        return KeptRanges(self.ranges.keeper)

    def start(self, checkpoint: Any = None) -> Job:
        self.restore(checkpoint)
        self.planner.start()
        return self

    def _send(self, message: AssignSplits) -> None:
        with self.lock:
            self.inbox.append(message)
        self.driver.woken.set()

    def _failed(self, uid: str, error: FTLayerError) -> None:
        self.errors.append(error)

    def checkpoint(self) -> Any:
        self.ranges.under_way([1])
        found = dict(self.positions), self.ranges.capture(self.positions), list(self.emitted)
        self.ranges.under_way([])
        return found

    @property
    def at(self) -> str | None:
        """The offset that a checkpoint would begin at."""
        captured = self.ranges.capture(self.positions)
        return unpack_captured(captured).at if captured else None

    @property
    def remembered(self) -> list[str]:
        """The ends of all ranges that are not forgotten: what a checkpoint would hold that has begun all of them."""
        far = SplitPosition(ReaderRange(10**6, "", "", 1, b""), 0, done=False).pack()
        captured = self.ranges.capture({partition_key(99): far})
        return [planned.end for planned in unpack_captured(captured).ranges]

    @property
    def rests(self) -> bool:
        """Whether the planner's thread has nothing to do."""
        return self.planner.wait_ms is None

    def complete(self, checkpoint: Any) -> None:
        self.ranges.completed(checkpoint[1])

    def restore(self, checkpoint: Any) -> None:
        for subtask in list(self.slots):
            self.slots.pop(subtask).stop()
            self.planner.handle(SubtaskDown(subtask))
        positions, captured, emitted = checkpoint or ({}, None, self.origin)
        self.ranges.restore(positions, captured)
        with self.lock:
            self.inbox = []
        self.positions, self.emitted = dict(positions), list(emitted)
        for subtask in range(self.parallelism):
            reader = self.driver.open(self.source, subtask, self.parallelism, positions=positions, rows=7)
            reader.start()
            self.slots[subtask] = reader
            self.planner.handle(SubtaskUp(subtask))

    def step(self) -> None:
        with self.lock:
            inbox, self.inbox = self.inbox, []
        for message in inbox:
            self.slots[message.subtask].assign(message)
        for reader in self.slots.values():
            rows = reader.take(10**15)
            if rows is not None:
                self.positions[rows.position.partition] = rows.position.end
                self.emitted += rows.payload.column(0).to_pylist()
                done = reader.accepted(rows)
                if done is not None:
                    self.planner.handle(done)

    def run_until(self, condition: Callable[[], Any]) -> None:
        def check() -> Any:
            assert not self.errors, self.errors
            self.step()
            return condition()

        self.driver.until(check)

    def run_to(self, rows: int) -> None:
        self.run_until(lambda: len(self.emitted) >= rows)
        assert sorted(self.emitted) == list(range(rows))

    @property
    def ended(self) -> bool:
        return all(reader.ended for reader in self.slots.values())

    def close(self) -> None:
        self.planner.close()
        for reader in self.slots.values():
            reader.stop()


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def make(driver: Any, key: bytes) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(reader: Any, parallelism: int = 2, **more: Any) -> Job:
        jobs.append(Job(driver, key, reader, parallelism, **more))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.mark.parametrize("reader", [LogReader, SimpleReader])
@pytest.mark.parametrize("seed", range(4))
def test_each_row_is_read_once_whatever_is_restored(make: Any, log: Log, reader: Any, seed: int) -> None:
    rng = random.Random(seed)
    job = make(reader(log), rng.randint(1, 3)).start()
    checkpoint: Any = None
    for _ in range(25):
        log.rows += range(len(log.rows), len(log.rows) + rng.randint(0, 20))
        aim = rng.randint(0, len(log.rows))
        job.run_until(lambda job=job, aim=aim: len(job.emitted) >= aim)
        assert len(set(job.emitted)) == len(job.emitted)
        kind = rng.random()
        if kind < 0.4:
            checkpoint = job.checkpoint()
            job.complete(checkpoint)
        elif kind < 0.7:
            job.restore(checkpoint)
        elif checkpoint is not None:
            # Another driver, at another parallelism.
            job.close()
            job = make(reader(log), rng.randint(1, 3)).start(checkpoint)
    job.run_to(len(log.rows))


def test_nothing_is_planned_before_it_is_known_from_where(make: Any, log: Log) -> None:
    log.rows = list(range(10))
    job = make(LogReader(log))
    job.planner.handle(SubtaskUp(0))
    job.planner.start()
    job.planner.handle(SubtaskDown(0))
    assert job.rests
    assert log.calls == []
    job.restore(None)
    job.run_to(10)


def test_commit_follows_completed_checkpoints(make: Any, log: Log) -> None:
    log.rows = list(range(20))
    job = make(LogReader(log)).start()
    nothing = job.checkpoint()
    job.run_until(lambda: len(job.emitted) >= 7)
    within = job.checkpoint()
    job.run_to(20)
    whole = job.checkpoint()
    log.rows = list(range(30))
    job.run_to(30)
    assert log.commits == []
    for checkpoint in (nothing, within):
        job.complete(checkpoint)
    job.complete(whole)
    job.run_until(lambda: 20 in log.commits)
    job.complete(whole)
    job.complete(job.checkpoint())
    job.run_until(lambda: 30 in log.commits)
    # Where a range is not read to its end, its start is what was read.
    assert log.commits in ([20, 30], [0, 20, 30])


def test_a_restored_checkpoint_is_committed_again(make: Any, log: Log) -> None:
    log.rows = list(range(20))
    job = make(LogReader(log)).start()
    job.run_to(20)
    whole = job.checkpoint()
    make(LogReader(log)).start(whole).run_until(lambda: log.commits)
    assert log.commits == [20]


def test_a_commit_that_failed_is_called_again(make: Any, log: Log) -> None:
    log.rows = list(range(5))
    job = make(LogReader(log)).start()
    job.run_to(5)
    log.fail["commit"] = OSError("down")
    job.complete(job.checkpoint())
    job.driver.until(lambda: job.errors)
    assert "OSError: down" in str(job.errors.pop())
    job.planner.start()
    job.run_until(lambda: log.commits == [5])


def test_without_a_checkpoint_the_source_begins_where_it_began(make: Any, log: Log) -> None:
    """Also if the reader begins at the end of what there is."""
    log.rows, log.first = list(range(10)), 10
    job = make(LogReader(log))
    job.origin = list(range(10))
    job.start()
    job.run_until(lambda: "initialOffset" in log.calls)
    before = job.checkpoint()
    log.rows = list(range(20))
    job.run_until(lambda: len(job.emitted) >= 15)
    log.first = 20
    job.restore(None)
    job.run_to(20)
    assert log.calls.count("initialOffset") == 1
    # A checkpoint from before the first row knows it, too.
    if before[1]:
        job = make(LogReader(log)).start(before)
        job.emitted = list(range(10))
        job.run_to(20)


def test_a_range_without_splits_counts(make: Any, log: Log) -> None:
    log.silent = {0, 10}
    log.rows = list(range(10))
    job = make(LogReader(log)).start()
    job.run_until(lambda: job.at == "10")
    assert unpack_captured(job.checkpoint()[1]) == Captured("10", 0, ())
    log.silent = {20}
    log.rows = list(range(20))
    job.emitted = list(range(10))
    job.run_to(20)
    log.rows = list(range(30))
    job.run_until(lambda: job.at == "30")
    checkpoint = job.checkpoint()
    assert unpack_captured(checkpoint[1]).at == "30"
    job = make(LogReader(log)).start(checkpoint)
    log.rows = list(range(35))
    job.run_until(lambda: len(job.emitted) >= 25)
    assert sorted(job.emitted) == [*range(20), *range(30, 35)]


def test_rows_read_ahead_are_in_no_checkpoint(make: Any, log: Log) -> None:
    log.rows = list(range(1_000))
    job = make(SimpleReader(log), 1).start()
    job.run_until(lambda: job.emitted)
    checkpoint = job.checkpoint()
    assert len(checkpoint[1]) < 500
    job.restore(checkpoint)
    job.run_to(1_000)
    assert "readBetweenOffsets" in log.calls


# ---------------------------------------------------------------- the end


class Stopping(LogReader, SupportsTriggerAvailableNow):
    def prepareForTriggerAvailableNow(self) -> None:
        self.log.call("prepare")
        self.last = len(self.log.rows)

    def latestOffset(self, start: Any, limit: Any) -> Any:
        return min(self.last, start + 10)


@pytest.mark.parametrize("reader", [LogReader, Stopping])
def test_stop_at_latest_stays_where_it_was(make: Any, log: Log, reader: Any) -> None:
    log.rows = list(range(25))
    job = make(reader(log), stop_at_latest=True).start()
    job.run_until(lambda: len(job.emitted) >= 12)
    checkpoint = job.checkpoint()
    log.rows = list(range(60))
    job.run_until(lambda: job.ended)
    assert sorted(job.emitted) == list(range(25))
    at_end = job.checkpoint()
    for restored in (checkpoint, None, at_end):
        job.restore(restored)
        assert not job.ended
        job.run_until(lambda: job.ended)
        assert sorted(job.emitted) == list(range(25))
    assert log.calls.count("prepare") <= 1


def test_draining_outlives_a_restore(make: Any, log: Log) -> None:
    log.rows = list(range(20))
    job = make(LogReader(log)).start()
    job.run_to(20)
    checkpoint = job.checkpoint()
    job.planner.handle(DrainSource())
    job.restore(checkpoint)
    job.driver.until(lambda: job.rests)
    log.calls.clear()
    log.rows = list(range(30))
    job.complete(checkpoint)
    job.run_until(lambda: job.rests)
    assert "partitions" not in log.calls


# ---------------------------------------------------------------- meanwhile


@pytest.mark.parametrize("where", ["initialOffset", "latestOffset", "partitions"])
def test_what_a_reader_gives_behind_a_restore_is_of_no_use(make: Any, log: Log, where: str) -> None:
    """The reader is in one of its methods while the job is restored, and a checkpoint taken."""
    log.rows = list(range(10))
    job = make(LogReader(log))
    checkpoint = None
    if where == "initialOffset":
        log.blocks = where
        job.start()
    else:
        job.start().run_to(10)
        checkpoint = job.checkpoint()
        log.rows = list(range(20))
        job.run_to(20)
        log.blocks = where
        log.rows = list(range(30))
    assert log.blocked.wait(600)
    job.restore(checkpoint)
    meanwhile = job.checkpoint()
    if checkpoint is not None:
        assert meanwhile == checkpoint
    log.go_on.set()
    log.rows = list(range(40))
    job.run_to(40)
    job.restore(meanwhile)
    job.run_to(40)


def test_ranges_are_forgotten_when_no_checkpoint_needs_them(make: Any, log: Log) -> None:
    job = make(LogReader(log), 1).start()

    def read(rows: int) -> None:
        log.rows = list(range(rows))
        job.run_to(rows)

    for rows in (10, 20, 30, 40):
        read(rows)
    assert job.remembered == ["40"]
    job.ranges.under_way([7])
    for rows in (50, 60, 70):
        read(rows)
    assert job.remembered[-3:] == ["50", "60", "70"]
    job.ranges.under_way([8])
    read(80)
    assert job.remembered == ["80"]


# ---------------------------------------------------------------- the log of ranges


def planned(number: int, splits: int) -> PlannedRange:
    return PlannedRange(number, json.dumps(number), json.dumps(number + 1), b"d", (b"x",) * splits)


def at(number: int, rows: int, *, done: bool = False) -> bytes:
    return SplitPosition(ReaderRange(number, "", "", 0, b""), rows, done).pack()


def test_a_checkpoint_may_be_in_the_middle_of_several_ranges() -> None:
    log = RangeLog("s")
    log.begin("1")
    for number, splits in ((1, 3), (2, 2), (3, 1), (4, 2)):
        log.opened(planned(number, splits))
    positions = {"p0": at(3, 5), "p1": at(1, 2), "p2": at(1, 9, done=True)}
    captured = log.capture(positions)
    assert captured is not None
    assert [one.number for one in captured.ranges] == [1, 2, 3]
    assert (captured.at, captured.last, captured.end) == ("4", 3, "1")
    assert unpack_captured(captured.pack()) == captured
    log.restore(unpack_restored("s", positions, captured.pack()))
    progress = [log.progress(one) for one in captured.ranges]
    assert [one.done for one in progress] == [(True, False, True), (True, False), (False,)]
    assert [one.rows for one in progress] == [(0, 2, 9), (0, 0), (5,)]


def test_a_split_that_never_was_begun() -> None:
    log = RangeLog("s")
    log.begin("1")
    log.opened(planned(1, 2))
    captured = log.capture({"p0": at(1, 3, done=True)})
    assert captured == Captured("2", 1, (planned(1, 2),))
    assert log.capture({"p0": at(1, 3, done=True), "p1": at(1, 0, done=True)}) == Captured("2", 1, ())
    assert log.capture({}) == Captured("1", 0, ())
    assert RangeLog("s").capture({}) is None


def test_a_checkpoint_of_another_kind_of_source(make: Any, log: Log) -> None:
    ranges = make(LogReader(log)).ranges
    with pytest.raises(ConfigError, match="another kind of source"):
        ranges.restore({partition_key(0): pack_rows(3)}, Captured("1", 0, ()).pack())
    with pytest.raises(IncompatibleCheckpointError, match=r"'numbers'.*without a reader"):
        ranges.restore({partition_key(0): pack_rows(3)}, None)


class LimitedReader(LogReader):
    """Gives ten rows at a time, or all there are."""

    def latestOffset(self, start: Any, limit: Any) -> Any:
        super().latestOffset(start, limit)
        rows = len(self.log.rows)
        return min(rows, start + limit.max_rows) if isinstance(limit, ReadMaxRows) else rows

    def getDefaultReadLimit(self) -> Any:
        return ReadMaxRows(10)


def test_a_source_whose_limit_cuts_what_there_is_works_off_a_backlog(make: Any, log: Log) -> None:
    told: list[tuple[str, bool]] = []
    log.rows = list(range(35))
    job = make(LimitedReader(log), backlog=lambda uid, behind: told.append((uid, behind))).start()
    job.run_to(35)
    assert told == [("numbers", True), ("numbers", False)]
    log.rows = list(range(40))
    job.run_to(40)
    assert len(told) == 2
    # What the coordinator was told before a restore it has forgotten.
    job.restore(None)
    job.run_to(40)
    assert told[2:] == [("numbers", True), ("numbers", False)]


def test_a_reader_without_a_limit_has_no_backlog(make: Any, log: Log) -> None:
    told: list[bool] = []
    log.rows = list(range(35))
    job = make(SimpleReader(log), backlog=lambda uid, behind: told.append(behind)).start()
    job.run_to(35)
    assert told == [False]
