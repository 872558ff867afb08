"""Sources whose threads are the world's, in the slots."""

from __future__ import annotations

from queue import Empty
from typing import Any

import pyarrow as pa
from barrier_faults import kill_others

from ftlayer.runtime.connectors.lane import RowMaker, SparkRowMaker, SplitProgress
from ftlayer.runtime.connectors.offset_reader import pack_rows, partition_key, unpack_rows
from ftlayer.runtime.connectors.readers import SplitReader
from ftlayer.runtime.task.actions import SourceRows
from ftlayer.vertex.calls import SourcePosition


def step_reader(
    world: Any,
    source: Any,
    subtask: int,
    parallelism: int,
    *,
    positions: Any,
    limits: Any,
    key: bytes,
    **_: Any,
) -> Any:
    """Return the reader of a subtask (`ftlayer.runtime.connectors.readers.open_reader`)."""
    if hasattr(source.connector, "partitions"):
        return StepReader(world, source, subtask, parallelism, positions, limits)
    return StepSplitReader(world, source, subtask, parallelism, positions, key, limits)


class StepReader:
    """`SourceReader` of numbered partitions: reads as much at a time as the world draws."""

    lag: int | None = None
    is_away = False

    due_ms: int | None = None

    def __init__(self, world: Any, source: Any, subtask: int, parallelism: int, positions: Any, limits: Any):
        self._world = world
        self._maker = RowMaker(source.uid, source.schema)
        self._most = limits.rows
        self._finished = False
        lists = source.connector.partitions
        self._rows = {index: list(lists[index]()) for index in range(subtask, len(lists), parallelism)}
        self._last = {index: positions.get(partition_key(index)) for index in self._rows}
        self._at = {index: unpack_rows(source.uid, positions, index, 0) for index in self._rows}

    def start(self) -> None:
        pass

    def take(self, mono_ms: int) -> SourceRows | None:
        left = [index for index, rows in self._rows.items() if self._at[index] < len(rows)]
        if not left or self._finished or (self.due_ms is not None and mono_ms < self.due_ms):
            return None
        index = self._world.random.choice(left)
        at = self._at[index]
        rows = self._rows[index][at : at + self._world.random.randint(1, self._most)]
        end = pack_rows(at + len(rows))
        position = SourcePosition(partition_key(index), self._last[index], end)
        self._at[index], self._last[index] = at + len(rows), end
        if self.ended and self._world.outside.strikes("others-die"):
            kill_others(self._world)
        self.due_ms = mono_ms + self._world.random.randrange(self._world.pace_ms)
        return SourceRows(partition_key(index), index, at, self._maker.batch(rows), position)

    def accepted(self, rows: SourceRows) -> None:
        return None

    @property
    def ended(self) -> bool:
        return self._finished or all(self._at[index] >= len(rows) for index, rows in self._rows.items())

    def finish(self) -> None:
        self._finished = True

    def stop(self) -> None:
        self._finished = True


class StepSplitReader(SplitReader):
    """`SplitReader` whose lane reads on when it is asked."""

    def __init__(
        self, world: Any, source: Any, subtask: int, parallelism: int, positions: Any, key: bytes, limits: Any
    ) -> None:
        super().__init__(source, subtask, parallelism, positions, key, limits, lambda: None)
        self._lane = StepLane(world, self, SparkRowMaker(source.uid, source.schema), limits)  # type: ignore[assignment]

    def begin_split(self) -> bool:
        """Begin the splits that were assigned next, `Empty` for none yet; return False behind the last ones."""
        todo = self._todo.get_nowait()
        if todo is not None:
            self._lane.splits = [(list(items), split) for items, split in self._progress(todo)]  # type: ignore[attr-defined]
        return todo is not None

    def start(self) -> None:
        pass


class StepLane:
    """`Lane`: reads as much at a time as the world draws."""

    due_ms: int | None = None

    def __init__(self, world: Any, reader: StepSplitReader, maker: RowMaker, limits: Any) -> None:
        self._world, self._reader, self._maker, self._limits = world, reader, maker, limits
        self.splits: list[tuple[list[Any], SplitProgress]] = []
        self.ended = False

    def take(self, mono_ms: int) -> SourceRows | None:
        if self.ended or (self.due_ms is not None and mono_ms < self.due_ms):
            return None
        if not self.splits:
            self._begin_split()
        if not self.splits:
            return None
        rows, split = self.splits.pop(0)
        taken = self._world.random.randint(1, self._limits.rows)
        # That was all: said with the last rows, or behind them.
        done = len(rows) < taken
        if not done:
            self.splits.append((rows[taken:], split))
        self.due_ms = mono_ms + self._world.random.randrange(self._world.pace_ms)
        batch: pa.RecordBatch = self._maker.batch(rows[:taken]) if rows else self._maker.empty()
        return split.advance(batch, done=done)

    def _begin_split(self) -> None:
        try:
            self.ended = not self._reader.begin_split()
        except Empty:
            return

    def close(self, *, discard: bool) -> None:
        self.splits, self.ended = [], True
