"""The reader sources of a job with checkpoints: what a checkpoint holds of them, and where a restore leads them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot
from ftlayer.runtime.barrier_mode.driver.log_keeper import LogEvent, LogKeeper
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.operators import Source


class ReaderCheckpoints:
    """The `LogKeeper` of each reader source whose planner has asked for it. Methods return at once, from any thread.

    Nothing is planned before `restore`.
    """

    def __init__(self, graph: JobGraph, key: bytes) -> None:
        """``key`` is `CheckpointPlan.key`, which slots open splits with."""
        self._graph = graph
        self._key = key
        self._keepers: dict[str, LogKeeper] = {}

    def open(self, source: Source, post: Callable[[LogEvent], None]) -> LogKeeper:
        """Return the source's keeper: this is an `OpenKeeper`. To be called before the job starts."""
        keeper = self._keepers[source.uid] = LogKeeper(source.uid, self._key, post)
        return keeper

    def restore(self, checkpoint: Checkpoint | None, slots: Collection[int]) -> None:
        """Go back to a checkpoint (None: to the begin) with the sources of a region of ``slots``.

        To be called behind `Planners.slot_down` of all of them, and before the event that leads to their deployment is
        in the coordinator's queue: what was sent before may lie there still, and must find them down.

        Raises as `LogKeeper.restore`.
        """
        for uid, keeper in self._keepers.items():
            if not slots or min(slots) >= self._graph.vertex(uid).parallelism:
                continue
            if checkpoint is None:
                keeper.restore({}, None)
            else:
                keeper.restore(_positions_in(checkpoint.subtasks, uid), checkpoint.sources.get(uid))

    def under_way(self, checkpoints: Collection[int]) -> None:
        """These checkpoints are under way: to be told before the barrier of a new one is sent, that one included.

        What none of them needs of the ranges that were read is forgotten.
        """
        for keeper in self._keepers.values():
            keeper.under_way(checkpoints)

    def capture(self, subtasks: Iterable[SubtaskSnapshot]) -> dict[str, bytes]:
        """Return `Checkpoint.sources` for a checkpoint that is under way, and has these parts."""
        parts = tuple(subtasks)
        return {uid: keeper.capture(_positions_in(parts, uid)) for uid, keeper in self._keepers.items()}

    def completed(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is complete, and what the job would be restored from: readers may forget what it has read."""
        for uid, keeper in self._keepers.items():
            keeper.completed(checkpoint.sources.get(uid))


def _positions_in(parts: Iterable[SubtaskSnapshot], uid: str) -> dict[str, bytes]:
    return {
        partition: position
        for part in parts
        if part.uid == uid
        for partition, position in part.positions.items()
    }
