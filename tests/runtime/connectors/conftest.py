"""A model of the vertex's positions, a driver for source readers, and small sources."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.runtime.connectors.lane import BatchLimits
from ftlayer.runtime.connectors.readers import SourceReader, open_reader
from ftlayer.runtime.task.events import SourceRows
from ftlayer.topology.operators import IterableSource, Source

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
