"""Reader sources as they run: the planner's thread, slots' readers, a model of the vertex; no Spark."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition, SimpleDataSourceStreamReader
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow

from ftlayer.errors import ConfigError, FTLayerError, SourceError
from ftlayer.runtime.connectors.offset_reader import digest_of, offset_reader
from ftlayer.runtime.connectors.positions import progress_of
from ftlayer.runtime.driver.position_keeper import PositionKeeper
from ftlayer.runtime.driver.range_keeper import KeptRanges
from ftlayer.runtime.driver.reader_planner import ReaderPlanner
from ftlayer.runtime.protocol.messages import AssignSplits
from ftlayer.topology.operators import ReaderSource, Source

ID = pa.schema([("id", pa.int64())])
LINES = pa.schema([("line", pa.string())])


class Broker:
    """What is behind a reader: shared by all copies of it, as a real broker is."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.commits: list[Any] = []
        self.stops = 0
        self.fail: dict[str, BaseException] = {}
        self.nonce: Callable[[], Any] = lambda: 0
        self.calls: list[str] = []
        self.go = threading.Event()

    def __reduce__(self) -> Any:
        setattr(BROKERS, f"broker{id(self)}", self)
        return getattr, (BROKERS, f"broker{id(self)}")

    def call(self, name: str) -> None:
        self.calls.append(name)
        if (error := self.fail.pop(name, None)) is not None:
            raise error


BROKERS = sys.modules.setdefault("ftlayer_test_brokers", ModuleType("ftlayer_test_brokers"))
"""By its name, a module means the same to a copy of what refers to it; this one is not imported by name."""


class Slice(InputPartition):
    def __init__(self, start: int, end: int, step: int, nonce: Any) -> None:
        self.start, self.end, self.step, self.nonce = start, end, step, nonce


class ListReader(DataSourceStreamReader):
    """Reads a broker's rows in ``splits`` interleaved partitions."""

    def __init__(self, broker: Broker, splits: int = 3, arrow: bool = False, limit: int = 0) -> None:
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


class Job:
    """A planner, and slots that the test can kill."""

    def __init__(
        self,
        driver: Any,
        vertex: Any,
        key: bytes,
        reader: Any,
        parallelism: int = 2,
        schema: pa.Schema = ID,
        *,
        bounded: bool = False,
    ) -> None:
        self.driver, self.vertex, self.key, self.parallelism = driver, vertex, key, parallelism
        self.source = Source("numbers", ReaderSource(reader), schema)
        self.slots: dict[int, Any] = {}
        self.errors: list[FTLayerError] = []
        self.sent: list[AssignSplits] = []
        self._inbox: list[AssignSplits] = []
        self._lock = threading.Lock()
        self.positions: Callable[[], dict[str, bytes]] = vertex.snapshot
        self.planner = ReaderPlanner(
            self.source,
            parallelism,
            keeper=lambda source, happened: KeptRanges(
                PositionKeeper(), lambda: progress_of(source.uid, self.positions())
            ),
            key=key,
            send=self._send,
            failed=lambda uid, error: self.errors.append(error),
            stop_at_latest=bounded,
        )

    def start(self) -> Job:
        self.planner.start()
        for subtask in range(self.parallelism):
            self.up(subtask)
        return self

    def _send(self, message: AssignSplits) -> None:
        with self._lock:
            self.sent.append(message)
            self._inbox.append(message)
        self.driver.woken.set()

    def up(self, subtask: int) -> None:
        reader = self.driver.open(
            self.source, subtask, self.parallelism, positions=self.vertex.snapshot(), rows=7
        )
        reader.start()
        self.slots[subtask] = reader
        self.planner.slot_up(subtask)

    def kill(self, subtask: int) -> None:
        self.slots.pop(subtask).stop()
        with self._lock:
            self._inbox = [message for message in self._inbox if message.subtask != subtask]
        self.planner.slot_down(subtask)

    def step(self) -> None:
        """Deliver messages; let every slot persist a batch."""
        with self._lock:
            inbox, self._inbox = self._inbox, []
        for message in inbox:
            if message.subtask in self.slots:
                self.slots[message.subtask].assign(message)
        for reader in self.slots.values():
            rows = reader.take(10**15)
            if rows is not None:
                self.vertex.persist(rows)
                done = reader.accepted(rows)
                if done is not None:
                    self.planner.split_done(done)

    def run_until(self, condition: Callable[[], Any]) -> None:
        def check() -> Any:
            assert not self.errors, self.errors
            self.step()
            return condition()

        self.driver.until(check)

    @property
    def ended(self) -> bool:
        return all(reader.ended for reader in self.slots.values())

    def close(self) -> None:
        self.planner.close()
        for reader in self.slots.values():
            reader.stop()


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
def start(driver: Any, vertex: Any, key: bytes) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(reader: Any, parallelism: int = 2, *, bounded: bool = False, schema: pa.Schema = ID) -> Job:
        job = Job(driver, vertex, key, reader, parallelism, schema, bounded=bounded)
        jobs.append(job)
        return job.start()

    yield make
    for job in jobs:
        job.close()


@pytest.mark.parametrize("kind", [ListReader, OldReader])
@pytest.mark.parametrize("arrow", [False, True])
def test_ranges_follow_each_other_and_are_committed(
    start: Any, broker: Broker, vertex: Any, kind: Any, arrow: bool
) -> None:
    job = start(kind(broker, arrow=arrow))
    for upto in (1, 50, 51, 200):
        broker.rows = list(range(upto))
        job.run_until(lambda upto=upto: broker.commits and broker.commits[-1] == upto)
        assert sorted(vertex.rows) == list(range(upto))
    assert broker.commits == sorted(set(broker.commits))


def test_root_names_are_distinct(start: Any, broker: Broker, vertex: Any) -> None:
    job = start(ListReader(broker))
    for upto in (40, 80):
        broker.rows = list(range(upto))
        job.run_until(lambda upto=upto: upto in broker.commits)
    assert len(set(vertex.names)) == len(vertex.names) == 80


def test_a_reader_may_limit_a_range(start: Any, broker: Broker, vertex: Any) -> None:
    broker.rows = list(range(25))
    job = start(ListReader(broker, limit=10))
    job.run_until(lambda: 25 in broker.commits)
    assert broker.commits == [10, 20, 25]
    assert sorted(vertex.rows) == list(range(25))


@pytest.mark.parametrize("kind", [ListReader, OldReader])
def test_stop_at_latest(start: Any, broker: Broker, vertex: Any, kind: Any) -> None:
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


def test_stop_at_latest_of_an_empty_source(start: Any, broker: Broker, vertex: Any) -> None:
    job = start(ListReader(broker), bounded=True)
    job.run_until(lambda: job.ended)
    assert vertex.rows == []
    assert broker.commits == []


def test_a_reader_that_knows_how_to_stop(start: Any, broker: Broker, vertex: Any) -> None:
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


def test_a_new_run_goes_on_where_the_last_one_was(start: Any, broker: Broker, vertex: Any) -> None:
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


def test_a_complete_range_is_committed_again_at_the_start(start: Any, broker: Broker, vertex: Any) -> None:
    broker.rows = list(range(10))
    job = start(ListReader(broker))
    job.run_until(lambda: broker.commits)
    job.close()
    broker.commits.clear()
    job = start(ListReader(broker))
    job.run_until(lambda: broker.commits)
    assert broker.commits == [10]


def test_a_range_that_is_planned_otherwise_is_read_again(
    start: Any, broker: Broker, vertex: Any, caplog: pytest.LogCaptureFixture
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
def test_slots_that_get_lost_lose_nothing(start: Any, broker: Broker, vertex: Any, seed: int) -> None:
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


def test_a_planner_that_has_not_heard_of_a_split_is_told_again(
    start: Any, broker: Broker, vertex: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old instance's last rows were accepted after the planner had asked for the positions."""
    broker.rows = list(range(10))
    job = start(ListReader(broker, splits=2))
    job.run_until(lambda: job.sent)
    before = vertex.snapshot()
    monkeypatch.setattr(job.planner, "split_done", lambda message: None)
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


def test_splits_are_sealed(start: Any, broker: Broker, driver: Any) -> None:
    broker.rows = [1]
    job = start(ListReader(broker), parallelism=1)
    driver.until(lambda: job.sent)
    (split,) = job.sent[0].mine
    forged = dataclasses.replace(split, payload=b"x" * 32 + split.payload[32:])
    job.slots[0].assign(dataclasses.replace(job.sent[0], mine=(forged,)))
    with pytest.raises(SourceError, match="UnauthorizedError"):
        driver.next(job.slots[0])


def test_drain_opens_no_further_range(start: Any, broker: Broker, vertex: Any) -> None:
    broker.rows = list(range(30))
    job = start(ListReader(broker))
    job.run_until(lambda: job.sent)
    job.planner.drain()
    broker.rows = list(range(60))
    job.run_until(lambda: broker.commits)
    assert broker.commits == [30]
    assert {message.range for message in job.sent} == {1}


def test_close_stops_the_reader(start: Any, broker: Broker) -> None:
    job = start(ListReader(broker))
    job.run_until(lambda: "latestOffset" in broker.calls)
    job.close()
    assert broker.stops == 1


@pytest.mark.parametrize("method", ["initialOffset", "latestOffset", "partitions", "commit"])
def test_an_error_of_the_reader_is_told_and_can_be_gone_on_from(
    start: Any, broker: Broker, vertex: Any, method: str
) -> None:
    broker.rows = list(range(30))
    broker.fail[method] = OSError("no route")
    job = start(ListReader(broker))

    def failed() -> Any:
        job.step()
        return job.errors

    job.driver.until(failed)
    (error,) = job.errors
    assert isinstance(error, SourceError)
    assert "source 'numbers': its reader failed in the driver: OSError: no route" in str(error)
    job.errors.clear()
    job.kill(0)
    job.up(0)
    job.planner.start()
    job.run_until(lambda: 30 in broker.commits)
    assert sorted(vertex.rows) == list(range(30))


def test_the_reader_is_stopped_after_a_failure_too(start: Any, broker: Broker) -> None:
    broker.fail["latestOffset"] = OSError("no route")
    job = start(ListReader(broker))
    job.driver.until(lambda: job.errors)
    job.close()
    assert broker.stops == 1


def test_an_error_of_the_vertex_is_told_as_it_is(
    driver: Any, vertex: Any, key: bytes, broker: Broker
) -> None:
    job = Job(driver, vertex, key, ListReader(broker))
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


def test_a_reader_that_blocks_blocks_no_other(start: Any, broker: Broker) -> None:
    class Blocking(ListReader):
        def latestOffset(self, begin: dict[str, Any], limit: Any) -> dict[str, Any]:
            self.broker.go.wait()
            return super().latestOffset(begin, limit)

    broker.rows = [1]
    job = start(Blocking(broker))
    job.kill(1)
    job.up(1)
    job.planner.drain()
    broker.go.set()


def test_what_is_no_reader(start: Any) -> None:
    job = start(object())
    job.driver.until(lambda: job.errors)
    assert "expected a DataSourceStreamReader or a SimpleDataSourceStreamReader" in str(job.errors[0])


def test_offsets_have_to_be_json(broker: Broker) -> None:
    class Odd(ListReader):
        def initialOffset(self) -> Any:
            return {"index": object()}

    with pytest.raises(ConfigError, match="cannot be written as JSON"):
        offset_reader("numbers", Odd(broker)).initial()


def test_an_error_of_read_fails_the_slot(start: Any, broker: Broker) -> None:
    class Broken(ListReader):
        def read(self, partition: InputPartition) -> Iterator[Any]:
            raise OSError("no route")

    broker.rows = [1]
    job = start(Broken(broker), parallelism=1)

    with pytest.raises(SourceError, match=r"source 'numbers' cannot be read on: OSError: no route"):
        job.run_until(lambda: False)


# ---------------------------------------------------------------- simple readers


class SimpleReader(SimpleDataSourceStreamReader):
    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    def initialOffset(self) -> dict[str, Any]:
        return {"index": 0}

    def read(self, start: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.broker.call("read")
        rows = self.broker.rows
        return ([(row,) for row in rows[start["index"] :]], {"index": len(rows)})  # a list, as some do

    def readBetweenOffsets(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[Any]:
        self.broker.call("readBetweenOffsets")
        return ((row,) for row in self.broker.rows[start["index"] : end["index"]])

    def commit(self, end: dict[str, Any]) -> None:
        self.broker.commits.append(end["index"])


def test_a_simple_reader(start: Any, broker: Broker, vertex: Any) -> None:
    job = start(SimpleReader(broker))
    for upto in (30, 31, 100):
        broker.rows = list(range(upto))
        job.run_until(lambda upto=upto: upto in broker.commits)
    assert sorted(vertex.rows) == list(range(100))
    assert "readBetweenOffsets" not in broker.calls


def test_a_simple_reader_over_a_restart(start: Any, broker: Broker, vertex: Any) -> None:
    broker.rows = list(range(60))
    job = start(SimpleReader(broker))
    job.run_until(lambda: len(vertex.rows) >= 20)
    job.kill(0)
    job.up(0)
    job.run_until(lambda: len(vertex.rows) >= 40)
    assert "readBetweenOffsets" not in broker.calls
    assert 60 not in broker.commits
    job.close()
    job = start(SimpleReader(broker), bounded=True)
    job.run_until(lambda: job.ended)
    assert sorted(vertex.rows) == list(range(60))
    assert "readBetweenOffsets" in broker.calls


def test_a_simple_reader_that_does_not_advance(start: Any, broker: Broker) -> None:
    class Stuck(SimpleReader):
        def read(self, begin: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return iter([(1,)]), begin

    job = start(Stuck(broker))
    job.driver.until(lambda: job.errors)
    assert "would be read without end" in str(job.errors[0])


# ---------------------------------------------------------------- other people's, files


def test_a_third_partys_reader(start: Any, vertex: Any) -> None:
    """``fake`` of pyspark-data-sources: rows that are never the same again, an offset that grows by asking."""
    fake = pytest.importorskip("pyspark_datasources").FakeDataSource
    from pyspark.sql.types import StringType, StructField, StructType

    schema = StructType([StructField("name", StringType()), StructField("zipcode", StringType())])
    reader = fake({"numRows": "5"}).streamReader(schema)
    job = start(reader, schema=pa.schema([("name", pa.string()), ("zipcode", pa.string())]))
    job.run_until(lambda: len(vertex.rows) >= 20)
    job.kill(0)
    job.up(0)
    job.run_until(lambda: len(vertex.rows) >= 40)
    assert len(vertex.rows) % 5 == 0 or len(vertex.rows) > 40
    assert all(isinstance(name, str) and zipcode for name, zipcode in vertex.rows)


class Tail(DataSourceStreamReader):
    """The lines of a file that grows; offsets are bytes."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def initialOffset(self) -> dict[str, Any]:
        return {"bytes": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        data = Path(self.path).read_bytes()
        return {"bytes": data.rfind(b"\n") + 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition((start["bytes"], end["bytes"]))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        begin, end = partition.value
        for line in Path(self.path).read_bytes()[begin:end].splitlines():
            yield (line.decode(),)


def test_a_file_that_grows(start: Any, vertex: Any, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    job = start(Tail(path), parallelism=1, schema=LINES)
    lines = [f"line {number}" for number in range(300)]
    with path.open("a") as file:
        for number, line in enumerate(lines):
            file.write(line + "\n")
            if number % 30 == 7:
                file.flush()
                job.run_until(lambda number=number: len(vertex.rows) > number)
            if number % 100 == 50:
                job.kill(0)
                job.up(0)
    job.run_until(lambda: len(vertex.rows) == 300)
    assert vertex.rows == lines


# ---------------------------------------------------------------- digests


def test_digests_tell_splits_apart_and_know_equal_ones() -> None:
    text = json.loads('"a long text that is not interned"')
    same = json.loads('"a long text that is not interned"')
    assert text is not same
    assert digest_of([InputPartition([text, text])]) == digest_of([InputPartition([text, same])])
    digests = [
        digest_of(splits)
        for splits in (
            [],
            [Slice(0, 1, 1, 0)],
            [Slice(0, 2, 1, 0)],
            [Slice(0, 1, 1, 0)] * 2,
            [InputPartition(0)],
        )
    ]
    assert len(set(digests)) == len(digests)


def test_digests_do_not_change_with_a_main_programs_classes() -> None:
    """A class of ``__main__`` is pickled by value, with a number that is new in each process."""

    def make() -> Any:
        class Mine(InputPartition):
            pass

        Mine.__module__, Mine.__qualname__ = "__main__", "Mine"
        return Mine(7)

    assert digest_of([make()]) == digest_of([make()])


def test_digests_of_what_refers_to_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert len(digest_of([InputPartition(loop)])) == 32
