"""The planners of a job's reader sources, each started again by its source's strategy when a reader fails."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable

from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot
from ftlayer.errors import FTLayerError
from ftlayer.recovery import lasting
from ftlayer.restart import RestartStrategy
from ftlayer.runtime.acker_mode.driver.job_vertex import JobVertexCalls
from ftlayer.runtime.barrier_mode.driver.checkpointed_planner import CheckpointedReaderPlanner
from ftlayer.runtime.driver.reader_planner import ReaderPlanner
from ftlayer.runtime.protocol.messages import AssignSplits, SplitDone
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.operators import ReaderSource

logger = logging.getLogger(__name__)


class Planners:
    """One `ReaderPlanner` for each reader source of a graph. Methods return at once, save `close`.

    In a graph with checkpoints nothing is planned before `restore`.
    """

    def __init__(
        self,
        graph: JobGraph,
        vertex: JobVertexCalls | None,
        key: bytes,
        *,
        send: Callable[[AssignSplits], None],
        failed: Callable[[FTLayerError], None],
        stop_at_latest: bool = False,
        backlog: Callable[[str, bool], None] | None = None,
    ) -> None:
        """``failed`` is told of the error of a reader that the strategy has given up, ``backlog`` as
        `CheckpointedReaderPlanner` says.

        ``key`` is the job's; in a graph with checkpoints `CheckpointPlan.key`, which slots have to open splits with.
        """
        self._failed = failed
        self._closed = threading.Event()
        self._parallelism: dict[str, int] = {}
        self._planners: dict[str, ReaderPlanner] = {}
        self._restarts: dict[str, RestartStrategy] = {}
        self._checkpointed: dict[str, CheckpointedReaderPlanner] = {}
        for source in graph.sources():
            if not isinstance(source.connector, ReaderSource):
                continue
            uid = source.uid
            parallelism = self._parallelism[uid] = graph.vertex(uid).parallelism
            self._restarts[uid] = copy.deepcopy(source.restart)
            if graph.checkpointed:
                self._planners[uid] = self._checkpointed[uid] = CheckpointedReaderPlanner(
                    source,
                    parallelism,
                    key=key,
                    send=send,
                    failed=self._reader_failed,
                    stop_at_latest=stop_at_latest,
                    backlog=backlog,
                )
            else:
                self._planners[uid] = ReaderPlanner(
                    source,
                    parallelism,
                    key=key,
                    positions=_positions(vertex, graph.stream_of(uid)),
                    send=send,
                    failed=self._reader_failed,
                    stop_at_latest=stop_at_latest,
                )

    def start(self) -> None:
        """Begin to plan."""
        for planner in self._planners.values():
            planner.start()

    def slot_up(self, slot: int) -> None:
        """The slot's sources take splits."""
        for uid, planner in self._planners.items():
            if slot < self._parallelism[uid]:
                planner.slot_up(slot)

    def slot_down(self, slot: int) -> None:
        """Splits that the slot was reading wait for its next instance."""
        for uid, planner in self._planners.items():
            if slot < self._parallelism[uid]:
                planner.slot_down(slot)

    def split_done(self, done: SplitDone) -> None:
        """A slot has reported a split."""
        planner = self._planners.get(done.source)
        if planner is not None:
            planner.split_done(done)

    def drain(self) -> None:
        """Open no further ranges."""
        for planner in self._planners.values():
            planner.drain()

    def close(self) -> None:
        """Stop the readers."""
        self._closed.set()
        for planner in self._planners.values():
            planner.close()

    # ------------------------------------------------------------ checkpoints

    def restore(self, checkpoint: Checkpoint | None, slots: Collection[int]) -> None:
        """Go back to a checkpoint (None: to the begin) with the sources of a region of ``slots``.

        To be called behind `slot_down` of all of them, and before the event that leads to their deployment is in the
        coordinator's queue: what was sent before may lie there still, and must find them down.
        """
        for uid, planner in self._checkpointed.items():
            if not slots or min(slots) >= self._parallelism[uid]:
                continue
            if checkpoint is None:
                planner.restore({}, None)
            else:
                planner.restore(_positions_in(checkpoint.subtasks, uid), checkpoint.sources.get(uid))

    def under_way(self, checkpoints: Collection[int]) -> None:
        """These checkpoints are under way: to be told before the barrier of a new one is sent, that one included.

        What none of them needs of the ranges that were read is forgotten.
        """
        for planner in self._checkpointed.values():
            planner.under_way(checkpoints)

    def capture(self, subtasks: Iterable[SubtaskSnapshot]) -> dict[str, bytes]:
        """Return `Checkpoint.sources` for a checkpoint that is under way, and has these parts."""
        parts = tuple(subtasks)
        return {
            uid: planner.capture(_positions_in(parts, uid)) for uid, planner in self._checkpointed.items()
        }

    def completed(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is complete, and what the job would be restored from: readers may forget what it has read."""
        for uid, planner in self._checkpointed.items():
            planner.completed(checkpoint.sources.get(uid))

    def _reader_failed(self, uid: str, error: FTLayerError) -> None:
        """Called by the planner's thread, its last deed."""
        final = lasting(error)
        pause_ms = None if final else self._restarts[uid].on_failure(time.monotonic_ns() // 1_000_000)
        if pause_ms is None:
            self._failed(final or error)
            return
        logger.warning("%s; it is started again in %d ms", error, pause_ms)
        if not self._closed.wait(pause_ms / 1_000):
            self._planners[uid].start()


def _positions_in(parts: Iterable[SubtaskSnapshot], uid: str) -> dict[str, bytes]:
    return {
        partition: position
        for part in parts
        if part.uid == uid
        for partition, position in part.positions.items()
    }


def _positions(vertex: JobVertexCalls | None, stream: str) -> Callable[[], dict[str, bytes]]:
    return dict if vertex is None else lambda: vertex.positions(stream)
