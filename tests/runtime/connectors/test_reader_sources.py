"""Reader sources as they run: the planner's thread, slots' readers, a model of the vertex; no Spark."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from ftlayer.connectors.logs import LogReader
from ftlayer.errors import ConfigError, SourceChangedError, SourceError
from ftlayer.functions.data_sources import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow
from ftlayer.runtime.connectors.offset_reader import offset_reader
from ftlayer.runtime.driver.rules.planner_rules import DrainSource
from ftlayer.runtime.protocol.messages import SplitDone

ID = pa.schema([("id", pa.int64())])


class Slice(InputPartition):
    def __init__(self, start: int, end: int, step: int, nonce: Any) -> None:
        self.start, self.end, self.step, self.nonce = start, end, step, nonce


class ListReader(DataSourceStreamReader):
    """Reads a broker's rows in ``splits`` interleaved partitions."""

    def __init__(self, broker: Any, splits: int = 3, arrow: bool = False, limit: int = 0) -> None:
        self.broker, self.count, self.arrow, self.limit = broker, splits, arrow, limit

    def initialOffset(self) -> dict[str, Any]:
        self.broker.call("initialOffset")
        return {"index": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        self.broker.call("latestOffset")
        if isinstance(limit, ReadAllAvailable):
            return {"index": len(self.broker.rows)}
        return {"index": min(len(self.broker.rows), start["index"] + limit.max_rows)}

    def getDefaultReadLimit(self) -> Any:
        return ReadMaxRows(self.limit) if self.limit else ReadAllAvailable()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Slice]:
        self.broker.call("partitions")
        begin, stop, nonce = start["index"], end["index"], self.broker.nonce()
        return [
            Slice(begin + split, stop, self.count, nonce) for split in range(min(self.count, stop - begin))
        ]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Slice)
        rows = self.broker.rows[partition.start : partition.end : partition.step]
        if self.arrow:
            return iter([pa.record_batch({"id": rows}, schema=ID)])
        return ((row,) for row in rows)

    def commit(self, end: dict[str, Any]) -> None:
        self.broker.call("commit")
        self.broker.commits.append(end["index"])

    def stop(self) -> None:
        self.broker.stops += 1


class OldReader(ListReader):
    """As it was written for Spark 4.0."""

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        return {"index": len(self.broker.rows)}


@pytest.mark.parametrize("kind", [ListReader, OldReader])
@pytest.mark.parametrize("arrow", [False, True])
def test_ranges_follow_each_other_and_are_committed(
    start: Any, broker: Any, vertex: Any, kind: Any, arrow: bool
) -> None:
    job = start(kind(broker, arrow=arrow))
    for upto in (1, 50, 51, 200):
        broker.rows = list(range(upto))
        job.run_until(lambda upto=upto: broker.commits and broker.commits[-1] == upto)
        assert sorted(vertex.rows) == list(range(upto))
    assert broker.commits == sorted(set(broker.commits))


@pytest.mark.parametrize("kind", [ListReader, OldReader])
@pytest.mark.parametrize("bounded", [False, True])
def test_a_reader_that_is_shorter_than_its_position_is_an_error(
    start: Any, broker: Any, vertex: Any, kind: Any, bounded: bool
) -> None:
    broker.rows = list(range(300))
    job = start(kind(broker))
    job.run_until(lambda: broker.commits == [300])
    job.close()
    broker.rows = list(range(100))
    job = start(kind(broker), bounded=bounded)
    job.driver.until(lambda: job.errors)
    assert isinstance(job.errors[0], SourceChangedError)
    assert 'it was read up to {"index": 300}, and its reader says that it ends at {"index": 100}' in str(
        job.errors[0]
    )
    assert sorted(vertex.rows) == list(range(300))
    assert set(broker.commits) == {300}


def test_a_split_that_has_lost_rows_that_were_read_is_an_error(start: Any, broker: Any, vertex: Any) -> None:
    broker.rows = list(range(300))
    job = start(ListReader(broker, splits=1))
    job.run_until(lambda: len(vertex.rows) >= 120)
    job.close()
    broker.calls.clear()
    broker.rows = list(range(100))
    job = start(type("Unaware", (ListReader,), {"latestOffset": lambda *_: {"index": 300}})(broker, splits=1))
    with pytest.raises(
        SourceChangedError, match=r"split 0 from .* ends behind 100 records now, and 1\d\d of it"
    ):
        job.run_until(lambda: False)


def test_root_names_are_distinct(start: Any, broker: Any, vertex: Any) -> None:
    job = start(ListReader(broker))
    for upto in (40, 80):
        broker.rows = list(range(upto))
        job.run_until(lambda upto=upto: upto in broker.commits)
    assert len(set(vertex.names)) == len(vertex.names) == 80


def test_a_reader_may_limit_a_range(start: Any, broker: Any, vertex: Any) -> None:
    broker.rows = list(range(25))
    job = start(ListReader(broker, limit=10))
    job.run_until(lambda: 25 in broker.commits)
    assert broker.commits == [10, 20, 25]
    assert sorted(vertex.rows) == list(range(25))


@pytest.mark.parametrize("kind", [ListReader, OldReader])
def test_stop_at_latest(start: Any, broker: Any, vertex: Any, kind: Any) -> None:
    broker.rows = list(range(25))
    job = start(kind(broker), bounded=True)
    job.run_until(lambda: job.sent)
    broker.rows = list(range(100))
    job.run_until(lambda: job.ended)
    assert sorted(vertex.rows) == list(range(25))
    assert broker.commits == [25]
    job.kill(1)
    job.up(1)
    job.run_until(lambda: job.ended)
    assert sorted(vertex.rows) == list(range(25))


def test_stop_at_latest_of_an_empty_source(start: Any, broker: Any, vertex: Any) -> None:
    job = start(ListReader(broker), bounded=True)
    job.run_until(lambda: job.ended)
    assert vertex.rows == []
    assert broker.commits == []


def test_a_reader_that_knows_how_to_stop(start: Any, broker: Any, vertex: Any) -> None:
    class Stopping(ListReader, SupportsTriggerAvailableNow):
        def prepareForTriggerAvailableNow(self) -> None:
            self.last = len(self.broker.rows)

        def latestOffset(self, begin: dict[str, Any], limit: Any) -> dict[str, Any]:
            return {"index": min(self.last, begin["index"] + 10)}

    broker.rows = list(range(25))
    job = start(Stopping(broker), bounded=True)
    job.run_until(lambda: job.sent)
    broker.rows = list(range(100))
    job.run_until(lambda: job.ended)
    assert sorted(vertex.rows) == list(range(25))
    assert broker.commits == [10, 20, 25]


def test_a_new_run_goes_on_where_the_last_one_was(start: Any, broker: Any, vertex: Any) -> None:
    broker.rows = list(range(60))
    for run in range(40):
        job = start(ListReader(broker), parallelism=1 + run % 3)
        before = len(vertex.rows)
        job.run_until(lambda before=before: len(vertex.rows) > before or 60 in broker.commits)
        job.close()
        if 60 in broker.commits:
            break
    assert sorted(vertex.rows) == list(range(60))
    job = start(ListReader(broker))
    broker.rows = list(range(90))
    job.run_until(lambda: 90 in broker.commits)
    assert sorted(vertex.rows) == list(range(90))
    assert broker.calls.count("initialOffset") <= 2, "offsets come from the vertex"


def test_a_complete_range_is_committed_again_at_the_start(start: Any, broker: Any, vertex: Any) -> None:
    broker.rows = list(range(10))
    job = start(ListReader(broker))
    job.run_until(lambda: broker.commits)
    job.close()
    broker.commits.clear()
    job = start(ListReader(broker))
    job.run_until(lambda: broker.commits)
    assert broker.commits == [10]


def test_a_range_that_is_planned_otherwise_is_read_again(
    start: Any, broker: Any, vertex: Any, caplog: pytest.LogCaptureFixture
) -> None:
    broker.rows = list(range(60))
    numbers = iter(range(100))
    broker.nonce = lambda: next(numbers)
    job = start(ListReader(broker))
    job.run_until(lambda: len(vertex.rows) >= 20)
    assert 60 not in broker.commits
    job.close()
    first = list(vertex.rows)
    with caplog.at_level(logging.WARNING):
        job = start(ListReader(broker))
        job.run_until(lambda: 60 in broker.commits)
    assert sorted(vertex.rows) == sorted(first + list(range(60)))
    assert len(set(vertex.names)) == len(vertex.names)
    assert f"{len(first)} rows that were accepted will come again" in caplog.text
    job.close()
    broker.rows = list(range(70))
    job = start(ListReader(broker))
    job.run_until(lambda: 70 in broker.commits)
    assert sorted(vertex.rows) == sorted(first + list(range(70)))


@pytest.mark.parametrize("seed", range(6))
def test_slots_that_get_lost_lose_nothing(start: Any, broker: Any, vertex: Any, seed: int) -> None:
    draw = random.Random(seed)
    job = start(ListReader(broker, splits=5, arrow=bool(seed % 2), limit=40), parallelism=3)
    for upto in range(30, 301, 30):
        broker.rows = list(range(upto))
        for _ in range(draw.randrange(8)):
            job.step()
        subtask = draw.randrange(3)
        if subtask in job.slots:
            job.kill(subtask)
        for _ in range(draw.randrange(8)):
            job.step()
        for subtask in range(3):
            if subtask not in job.slots:
                job.up(subtask)
    job.run_until(lambda: 300 in broker.commits)
    assert sorted(vertex.rows) == list(range(300))
    assert len(set(vertex.names)) == 300


class CompactedLog(LogReader):
    """Reads a broker's rows, numbers with their offsets, of two splits; the broker forgets some of them."""

    schema = pa.schema([("id", pa.int64()), ("offset", pa.int64())])

    def __init__(self, broker: Any, batch_rows: int) -> None:
        super().__init__(40)
        self.broker, self.batch_rows = broker, batch_rows

    def starts(self) -> dict[str, int]:
        return {"a": 0, "b": 0}

    def first_of(self, splits: Any) -> dict[str, int]:
        return dict.fromkeys(splits, 0)

    def ends(self) -> dict[str, int]:
        return dict.fromkeys("ab", max((offset for _, offset in self.broker.rows), default=-1) + 1)

    def read_split(self, split: str, start: int, end: int) -> Iterator[pa.RecordBatch]:
        mine = [row for row in self.broker.rows if row[0] == split and start <= row[1] < end]
        for first in range(0, len(mine), self.batch_rows):
            offsets = [offset for _, offset in mine[first : first + self.batch_rows]]
            ids = [2 * offset + (split == "b") for offset in offsets]
            yield pa.RecordBatch.from_pydict({"id": ids, "offset": offsets}, schema=self.schema)

    def committed(self, offsets: Any) -> None:
        self.broker.commits.append(min(offsets.values()))


@pytest.mark.parametrize("seed", range(20))
def test_records_that_a_log_compacts_away_take_none_of_the_others_with_them(
    start: Any, broker: Any, vertex: Any, seed: int
) -> None:
    draw = random.Random(seed)
    upto = 200
    broker.rows = [(split, offset) for split in "ab" for offset in range(upto) if offset % 7]
    job = start(CompactedLog(broker, draw.randrange(1, 20)), schema=CompactedLog.schema)
    gone: set[int] = set()
    for read_before in range(20, 260, 20):
        job.run_until(lambda read_before=read_before: len(vertex.rows) >= read_before)
        job.kill(0)
        # Some of those that were read lately are gone. The last record of a split is never compacted away.
        lately = [("ab"[number % 2], offset) for number, offset in vertex.rows[-20:] if offset < upto - 1]
        compacted = set(draw.sample(lately, 5))
        broker.rows = [row for row in broker.rows if row not in compacted]
        gone |= {2 * offset + (split == "b") for split, offset in compacted}
        job.up(0)
    job.run_until(lambda: upto in broker.commits)
    read = [number for number, _ in vertex.rows]
    assert len(set(read)) == len(read), "a record was read twice"
    kept = {2 * offset + (split == "b") for split, offset in broker.rows}
    assert kept <= set(read) <= kept | gone
    assert len(set(vertex.names)) == len(vertex.names)


def test_a_planner_that_has_not_heard_of_a_split_is_told_again(
    start: Any, broker: Any, vertex: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old instance's last rows were accepted after the planner had asked for the positions."""
    broker.rows = list(range(10))
    job = start(ListReader(broker, splits=2))
    job.run_until(lambda: job.sent)
    before = vertex.snapshot()
    handle = job.planner.handle
    monkeypatch.setattr(
        job.planner, "handle", lambda event: None if isinstance(event, SplitDone) else handle(event)
    )
    job.run_until(lambda: len(vertex.rows) == 10)
    for _ in range(3):
        job.step()
    monkeypatch.undo()
    monkeypatch.setattr(job, "positions", lambda: before)
    for subtask in range(2):
        job.kill(subtask)
        job.up(subtask)
    job.run_until(lambda: broker.commits)
    assert sorted(vertex.rows) == list(range(10))


def test_splits_are_sealed(start: Any, broker: Any, driver: Any) -> None:
    broker.rows = [1]
    job = start(ListReader(broker), parallelism=1)
    driver.until(lambda: job.sent)
    (split,) = job.sent[0].mine
    forged = dataclasses.replace(split, payload=b"x" * 32 + split.payload[32:])
    job.slots[0].assign(dataclasses.replace(job.sent[0], mine=(forged,)))
    with pytest.raises(SourceError, match="UnauthorizedError"):
        driver.next(job.slots[0])


def test_drain_opens_no_further_range(start: Any, broker: Any, vertex: Any) -> None:
    broker.rows = list(range(30))
    job = start(ListReader(broker))
    job.run_until(lambda: job.sent)
    job.planner.handle(DrainSource())
    broker.rows = list(range(60))
    job.run_until(lambda: broker.commits)
    assert broker.commits == [30]
    assert {message.range.number for message in job.sent} == {1}


def test_close_stops_the_reader(start: Any, broker: Any) -> None:
    job = start(ListReader(broker))
    job.run_until(lambda: "latestOffset" in broker.calls)
    job.close()
    assert broker.stops == 1


@pytest.mark.parametrize(
    ("method", "raised"),
    [
        *((name, OSError) for name in ("initialOffset", "latestOffset", "partitions", "commit")),
        ("latestOffset", SystemExit),
    ],
)
def test_an_error_of_the_reader_is_told_and_can_be_gone_on_from(
    start: Any, broker: Any, vertex: Any, method: str, raised: type[BaseException]
) -> None:
    broker.rows = list(range(30))
    broker.fail[method] = raised("no route")
    job = start(ListReader(broker))

    def failed() -> Any:
        job.step()
        return job.errors

    job.driver.until(failed)
    (error,) = job.errors
    assert isinstance(error, SourceError)
    assert f"source 'numbers': its reader failed in the driver: {raised.__name__}: no route" in str(error)
    job.driver.until(lambda: job.planner.unanswered_ms > 0)
    job.errors.clear()
    job.kill(0)
    job.up(0)
    job.planner.start()
    job.run_until(lambda: 30 in broker.commits)
    assert sorted(vertex.rows) == list(range(30))
    job.driver.until(lambda: job.planner.unanswered_ms == 0)


def test_the_reader_is_stopped_after_a_failure_too(start: Any, broker: Any) -> None:
    broker.fail["latestOffset"] = OSError("no route")
    job = start(ListReader(broker))
    job.driver.until(lambda: job.errors)
    job.close()
    assert broker.stops == 1


def test_an_error_of_the_vertex_is_told_as_it_is(start: Any, driver: Any, vertex: Any, broker: Any) -> None:
    job = start(ListReader(broker), begin=False)
    error = ConfigError("gone")

    def gone() -> Any:
        raise error

    job.positions = gone
    job.start()
    driver.until(lambda: job.errors)
    assert job.errors == [error]
    job.positions = vertex.snapshot
    job.errors.clear()
    broker.rows = [1, 2, 3]
    job.planner.start()
    job.run_until(lambda: 3 in broker.commits)
    assert sorted(vertex.rows) == [1, 2, 3]
    job.close()


def test_a_reader_that_blocks_blocks_no_other(start: Any, broker: Any) -> None:
    class Blocking(ListReader):
        def latestOffset(self, begin: dict[str, Any], limit: Any) -> dict[str, Any]:
            self.broker.go.wait()
            return super().latestOffset(begin, limit)

    broker.rows = [1]
    job = start(Blocking(broker))
    job.kill(1)
    job.up(1)
    job.planner.handle(DrainSource())
    broker.go.set()


def test_what_is_no_reader(start: Any) -> None:
    job = start(object())
    job.driver.until(lambda: job.errors)
    assert "expected a DataSourceStreamReader or a SimpleDataSourceStreamReader" in str(job.errors[0])


def test_offsets_have_to_be_json(broker: Any) -> None:
    class Odd(ListReader):
        def initialOffset(self) -> Any:
            return {"index": object()}

    with pytest.raises(ConfigError, match="cannot be written as JSON"):
        offset_reader("numbers", Odd(broker)).initial()


def test_an_error_of_read_fails_the_slot(start: Any, broker: Any) -> None:
    class Broken(ListReader):
        def read(self, partition: InputPartition) -> Iterator[Any]:
            raise OSError("no route")

    broker.rows = [1]
    job = start(Broken(broker), parallelism=1)

    with pytest.raises(SourceError, match=r"source 'numbers' cannot be read on: OSError: no route"):
        job.run_until(lambda: False)
