"""The reader sources of a job with checkpoints: what a checkpoint holds of them, and where a restore leads them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot
from ftlayer.runtime.barrier_mode.driver.log_keeper import (
    LogEvent,
    LogKeeper,
    RangesRestored,
    ReadUpTo,
    UnderWay,
)
from ftlayer.runtime.barrier_mode.driver.range_log import unpack_captured, unpack_restored
from ftlayer.runtime.driver.range_keeper import KeptRanges
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.operators import Source


class SourceCheckpoints:
    """One reader source's part in checkpoints. Methods return at once, from any thread."""

    def __init__(self, source: str, happened: Callable[[LogEvent], None]) -> None:
        """``happened`` has an event handled by the source's planner before it returns."""
        self.keeper = LogKeeper(source)
        self._source = source
        self._happened = happened

    def restore(self, positions: Mapping[str, bytes], captured: bytes | None) -> None:
        """Go back to a checkpoint, or begin with it; without positions and None: to where the source has begun.

        All its subtasks are down (`ReaderPlanner.slot_down`), and come up behind this. Nothing that was planned before
        is sent once this has returned.

        Args:
            positions: of all subtasks in the checkpoint.
            captured: what `capture` gave for it.

        Raises:
            IncompatibleCheckpointError, ConfigError: the source was of another kind.
        """
        self._happened(RangesRestored(unpack_restored(self._source, positions, captured)))

    def under_way(self, checkpoints: Collection[int]) -> None:
        """These checkpoints are under way; told before the barrier of a new one is sent.

        What none of them needs is forgotten.
        """
        self._happened(UnderWay(frozenset(checkpoints)))

    def capture(self, positions: Mapping[str, bytes]) -> bytes:
        """Return what a checkpoint under way with these positions holds beside them; b"" before the source begins."""
        return self.keeper.capture(positions)

    def completed(self, captured: bytes | None) -> None:
        """The checkpoint that holds this is complete."""
        end = unpack_captured(captured).end if captured else None
        if end is not None:
            self._happened(ReadUpTo(end))


class ReaderCheckpoints:
    """The `SourceCheckpoints` of each reader source whose planner has asked for it.

    Methods return at once, from any thread. Nothing is planned before `restore`.
    """

    def __init__(self, graph: JobGraph) -> None:
        self._graph = graph
        self._sources: dict[str, SourceCheckpoints] = {}

    def open(self, source: Source, happened: Callable[[LogEvent], None]) -> KeptRanges:
        """Return the source's keeper: this is an `OpenKeeper`. To be called before the job starts."""
        opened = self._sources[source.uid] = SourceCheckpoints(source.uid, happened)
        return KeptRanges(opened.keeper)

    def restore(self, checkpoint: Checkpoint | None, slots: Collection[int]) -> None:
        """Go back to a checkpoint (None: to the begin) with the sources of a region of ``slots``.

        To be called behind `Planners.slot_down` of all of them, and before the event that leads to their deployment is
        in the coordinator's queue: what was sent before may lie there still, and must find them down.

        Raises as `SourceCheckpoints.restore`.
        """
        for uid, source in self._sources.items():
            if not slots or min(slots) >= self._graph.vertex(uid).parallelism:
                continue
            if checkpoint is None:
                source.restore({}, None)
            else:
                source.restore(_positions_in(checkpoint.subtasks, uid), checkpoint.sources.get(uid))

    def under_way(self, checkpoints: Collection[int]) -> None:
        """These checkpoints are under way: to be told before the barrier of a new one is sent, that one included.

        What none of them needs of the ranges that were read is forgotten.
        """
        for source in self._sources.values():
            source.under_way(checkpoints)

    def capture(self, subtasks: Iterable[SubtaskSnapshot]) -> dict[str, bytes]:
        """Return `Checkpoint.sources` for a checkpoint that is under way, and has these parts."""
        parts = tuple(subtasks)
        return {uid: source.capture(_positions_in(parts, uid)) for uid, source in self._sources.items()}

    def completed(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is complete, and what the job would be restored from: readers may forget what it has read."""
        for uid, source in self._sources.items():
            source.completed(checkpoint.sources.get(uid))


def _positions_in(parts: Iterable[SubtaskSnapshot], uid: str) -> dict[str, bytes]:
    return {
        partition: position
        for part in parts
        if part.uid == uid
        for partition, position in part.positions.items()
    }
