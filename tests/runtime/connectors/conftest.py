"""A model of the vertex's positions, a driver for source readers, small sources, and a job of one reader source."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.errors import FTLayerError
from ftlayer.runtime.connectors.lane import BatchLimits
from ftlayer.runtime.connectors.offset_reader import progress_of
from ftlayer.runtime.connectors.readers import SourceReader, open_reader
from ftlayer.runtime.driver.planners import ReaderPlanner
from ftlayer.runtime.driver.rules.planner_rules import KeptRanges, PositionKeeper, SubtaskDown, SubtaskUp
from ftlayer.runtime.protocol.messages import AssignSplits
from ftlayer.runtime.task.actions import SourceRows
from ftlayer.topology.operators import IterableSource, ReaderSource, Source

ID = pa.schema([("id", pa.int64())])
KEY = b"k" * 32
DEADLINE_S = 600.0


class ModelVertex:
    """What the vertex does with positions: they advance without gaps, and a call sent again has no effect."""

    def __init__(self) -> None:
        self.positions: dict[str, bytes] = {}
        self._starts: dict[str, bytes | None] = {}
        self.rows: list[Any] = []
        self.names: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def persist(self, rows: SourceRows) -> None:
        position = rows.position
        assert position is not None
        with self._lock:
            reached = self.positions.get(position.partition)
            if position.partition in self._starts and (self._starts[position.partition], reached) == (
                position.start,
                position.end,
            ):
                return
            assert position.start == reached, "a gap, or another reader of this partition"
            self._starts[position.partition] = position.start
            self.positions[position.partition] = position.end
            self.rows.extend(values_of(rows.payload))
            self.names.extend((rows.number, rows.first_ordinal + i) for i in range(rows.payload.num_rows))

    def snapshot(self) -> dict[str, bytes]:
        with self._lock:
            return dict(self.positions)


def values_of(batch: pa.RecordBatch) -> list[Any]:
    columns = [column.to_pylist() for column in batch.columns]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


class Driver:
    """Does with a reader what a slot's loop does."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.wakes = 0
        self._lock = threading.Lock()
        self.readers: list[SourceReader] = []

    def open(
        self,
        source: Source | Callable[[], Any],
        subtask: int = 0,
        parallelism: int = 1,
        *,
        positions: dict[str, bytes] | None = None,
        rows: int = 100,
        age_ms: int = 1,
        schema: pa.Schema = ID,
    ) -> SourceReader:
        if not isinstance(source, Source):
            source = Source("numbers", IterableSource((source,)), schema)
        reader = open_reader(
            source,
            subtask,
            parallelism,
            positions=positions or {},
            limits=BatchLimits(rows, age_ms),
            key=KEY,
            wake=self._wake,
        )
        self.readers.append(reader)
        return reader

    def _wake(self) -> None:
        with self._lock:
            self.wakes += 1
        self.woken.set()

    def next(self, reader: SourceReader) -> SourceRows | None:
        """Wait for rows; None at the end."""
        give_up = time.monotonic() + DEADLINE_S
        while time.monotonic() < give_up:
            self.woken.clear()
            rows = reader.take(time.monotonic_ns() // 1_000_000)
            if rows is not None:
                return rows
            if reader.ended:
                return None
            self.woken.wait(0.001 if reader.due_ms is not None else 0.1)
        raise AssertionError("the reader gave nothing in time")

    def all(self, reader: SourceReader) -> Iterator[SourceRows]:
        while (rows := self.next(reader)) is not None:
            yield rows
            reader.accepted(rows)

    def until(self, condition: Callable[[], Any]) -> None:
        give_up = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < give_up, "it did not happen in time"
            self.woken.wait(0.002)
            self.woken.clear()


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


class ReaderJob:
    """A planner, and slots that the test can kill."""

    lag: int | None = None
    is_away = False

    def __init__(
        self,
        driver: Driver,
        vertex: ModelVertex,
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

    def start(self) -> ReaderJob:
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
        self.planner.handle(SubtaskUp(subtask))

    def kill(self, subtask: int) -> None:
        self.slots.pop(subtask).stop()
        with self._lock:
            self._inbox = [message for message in self._inbox if message.subtask != subtask]
        self.planner.handle(SubtaskDown(subtask))

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
                    self.planner.handle(done)

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
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    for reader in driver.readers:
        reader.stop()


@pytest.fixture
def vertex() -> ModelVertex:
    return ModelVertex()


@pytest.fixture
def make_vertex() -> type[ModelVertex]:
    return ModelVertex


@pytest.fixture
def values() -> Callable[[pa.RecordBatch], list[Any]]:
    return values_of


@pytest.fixture
def key() -> bytes:
    return KEY


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
def start(driver: Driver, vertex: ModelVertex, key: bytes) -> Iterator[Callable[..., ReaderJob]]:
    """Make a job of a reader source, and begin it."""
    jobs: list[ReaderJob] = []

    def make(
        reader: Any,
        parallelism: int = 2,
        *,
        bounded: bool = False,
        schema: pa.Schema = ID,
        begin: bool = True,
    ) -> ReaderJob:
        job = ReaderJob(driver, vertex, key, reader, parallelism, schema, bounded=bounded)
        jobs.append(job)
        return job.start() if begin else job

    yield make
    for job in jobs:
        job.close()
