"""A source's subtask in a graph with checkpoints: it sends rows at once, and its positions are its snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.snapshots import SubtaskSnapshot
from ftlayer.checkpoint.storage.contract import PieceWriter
from ftlayer.clock import Now
from ftlayer.errors import SourceError
from ftlayer.handler.handler import Handler
from ftlayer.records.ids import NO_ROOTS, U64Array
from ftlayer.runtime.connectors.positions import partition_index
from ftlayer.runtime.protocol.elements import MAX_TIME_MS, EndOfStream, Watermark
from ftlayer.runtime.protocol.messages import EndTasks
from ftlayer.runtime.task.actions import Action, TaskEnded
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.runtime.task.event_time import SplitMarks
from ftlayer.runtime.task.events import SourceOver, SourceRows, TaskEvent, TaskStart, TimeCame, refused
from ftlayer.runtime.task.latency import SourceMarkers
from ftlayer.topology.job_graph import JobGraph


class CheckpointedSourceTask:
    """A source as a task, and its part in checkpoints: `Task` and `Checkpointed`.

    It sends rows at once, and their position is its own from then on.
    A partition's position is in the snapshot of the subtask that reads it, whether it has read of it since the
    restore or not: partition i is subtask i modulo parallelism's.
    """

    def __init__(
        self, graph: JobGraph, uid: str, subtask: int, handler: Handler, positions: Mapping[str, bytes]
    ) -> None:
        """``positions`` are those of all partitions of the source, as they were restored."""
        self.uid = uid
        self.subtask = subtask
        self._emitter = Emitter(graph, uid, subtask, handler)
        self._markers = SourceMarkers(self._emitter, uid)
        self._splits = SplitMarks(self._emitter)
        parallelism = graph.vertex(uid).parallelism
        self._positions = {
            partition: position
            for partition, position in positions.items()
            if partition_index(partition) % parallelism == subtask
        }

    def handle(self, event: TaskEvent, now: Now) -> list[Action]:
        """See `Task.handle`. Behind `SourceOver` the task goes on: barriers come until `EndTasks`."""
        match event:
            case SourceRows():
                return self._read(event, now)
            case SourceOver():
                return [*self._emitter.mark(Watermark(MAX_TIME_MS))]
            case EndTasks():
                return [*self._emitter.mark(EndOfStream()), TaskEnded()]
            case TaskStart() | TimeCame():
                return []
            case _:
                raise refused(self.uid, event)

    def _read(self, rows: SourceRows, now: Now) -> list[Action]:
        """Send rows, and take their position over. One without rows counts, too."""
        if rows.position is None:
            raise SourceError(f"source {self.uid!r} cannot rewind: it gives no positions to restore it from")
        self._positions[rows.position.partition] = rows.position.end
        sends = self._emitter.roots(rows.payload, None, split=rows.in_time).sends
        return [*self._splits.around(rows, sends), *self._markers.behind(rows.payload.num_rows, now)]

    def held_roots(self) -> U64Array:
        return NO_ROOTS

    # ------------------------------------------------------------ checkpoints

    def snapshot(self, barrier: Barrier, now: Now) -> tuple[list[Action], SourceSnapshot]:
        return [], SourceSnapshot(self.uid, self.subtask, dict(self._positions))

    def completed(self, checkpoint: int) -> None:
        """The driver tells the reader."""

    def aborted(self, checkpoint: int) -> None:
        """The next one has the positions of its own time."""

    def discard(self, stands: int, acked: int) -> None:
        """Nothing to close: the reader is the slot's."""


class SourceSnapshot:
    """`ftlayer.runtime.barrier_mode.task.contract.PendingSnapshot` of a source: all of it is metadata."""

    def __init__(self, uid: str, subtask: int, positions: dict[str, bytes]) -> None:
        self._snapshot = SubtaskSnapshot(uid, subtask, positions=positions)

    def write(self, writer: PieceWriter, cancelled: Callable[[], bool]) -> SubtaskSnapshot:
        return self._snapshot

    def release(self) -> None:
        """Nothing is kept."""
