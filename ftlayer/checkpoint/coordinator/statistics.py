"""How long checkpoints took and how large they were: a history for people and metrics, values that never change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ftlayer.checkpoint.coordinator.pending import PendingCheckpoint
from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot

HISTORY = 100
"""So many checkpoints that have come to their end are remembered."""


class CheckpointState(StrEnum):
    IN_PROGRESS = "in-progress"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True)
class ChainCheckpointStats:
    """One chain's part of a checkpoint: sums of bytes, and the longest time of any of its subtasks.

    Attributes:
        uid: of the chain.
        acked: subtasks whose part is there.
        written_bytes: new bytes in the storage.
        state_bytes: all that the checkpoint refers to.
        start_delay_ms: from the trigger to the first barrier.
        alignment_ms: from the first barrier to the last.
        sync_ms, async_ms: what the two parts of the snapshot took.
        in_flight_bytes: records that the barrier has overtaken.
    """

    uid: str
    acked: int
    written_bytes: int
    state_bytes: int
    start_delay_ms: int
    alignment_ms: int
    sync_ms: float
    async_ms: float
    in_flight_bytes: int


@dataclass(frozen=True, slots=True)
class SubtaskCheckpointStats:
    """One subtask's part of a checkpoint; the words are those of `ChainCheckpointStats`.

    ``unaligned``: it was taken ahead of records, which are in it.
    """

    uid: str
    subtask: int
    written_bytes: int
    state_bytes: int
    start_delay_ms: int
    alignment_ms: int
    sync_ms: float
    async_ms: float
    in_flight_bytes: int
    unaligned: bool


@dataclass(frozen=True)
class CheckpointStats:
    """One checkpoint or savepoint.

    Attributes:
        checkpoint: id.
        kind: ``"checkpoint"`` or ``"savepoint"``.
        state: `CheckpointState`.
        final: whether the job was to end with it.
        triggered_ms: wall clock.
        ended_ms: wall clock: completed, sinks committed, or given up; None while it is under way.
        duration_ms: up to ``ended_ms``, or to now.
        acked, subtasks: how many parts are there, and how many there have to be.
        written_bytes, state_bytes, in_flight_bytes: sums over all chains.
        start_delay_ms, alignment_ms, sync_ms, async_ms: longest of all subtasks.
        unaligned: whether any task took it unaligned.
        chains: by chain, in the order of their uids.
        parts: by subtask, as far as they are there, in the same order.
        location: where a completed one lies; "" in the driver's memory.
        failure: why it failed, else "".
    """

    checkpoint: int
    kind: str
    state: CheckpointState
    final: bool
    triggered_ms: int
    ended_ms: int | None
    duration_ms: int
    acked: int
    subtasks: int
    written_bytes: int
    state_bytes: int
    in_flight_bytes: int
    start_delay_ms: int
    alignment_ms: int
    sync_ms: float
    async_ms: float
    unaligned: bool
    chains: tuple[ChainCheckpointStats, ...]
    location: str = ""
    failure: str = ""
    parts: tuple[SubtaskCheckpointStats, ...] = ()


@dataclass(frozen=True)
class CheckpointCounts:
    """Totals of one execution; savepoints count.

    ``restored`` counts restores of regions of the job from a checkpoint, that at the start included;
    ``failures_in_a_row`` what ``tolerable_failures`` bounds.
    """

    triggered: int = 0
    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    restored: int = 0
    failures_in_a_row: int = 0


@dataclass
class Statistics:
    triggered: int = 0
    completed: int = 0
    failed: int = 0
    restored: int = 0
    _ended: deque[CheckpointStats] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def complete(self, pending: PendingCheckpoint, checkpoint: Checkpoint, wall_ms: int) -> None:
        self.completed += 1
        self._ended.append(
            stats_of(pending, CheckpointState.COMPLETED, wall_ms, wall_ms, location=checkpoint.location)
        )

    def fail(self, pending: PendingCheckpoint, failure: str, wall_ms: int) -> None:
        self.failed += 1
        self._ended.append(stats_of(pending, CheckpointState.FAILED, wall_ms, wall_ms, failure=failure))

    def counts(self, in_progress: int, failures_in_a_row: int) -> CheckpointCounts:
        return CheckpointCounts(
            self.triggered, in_progress, self.completed, self.failed, self.restored, failures_in_a_row
        )

    def history(self, in_progress: Iterable[PendingCheckpoint], wall_ms: int) -> tuple[CheckpointStats, ...]:
        """Return those under way and the last `HISTORY` that are not, the latest id first."""
        current = [stats_of(pending, CheckpointState.IN_PROGRESS, wall_ms, None) for pending in in_progress]
        return tuple(sorted([*self._ended, *current], key=lambda each: -each.checkpoint))


def stats_of(
    pending: PendingCheckpoint,
    state: CheckpointState,
    now_ms: int,
    ended_ms: int | None,
    location: str = "",
    failure: str = "",
) -> CheckpointStats:
    """Return what is known of one. ``now_ms``: wall clock."""
    by_chain: dict[str, list[SubtaskCheckpointStats]] = {}
    for _, snapshot in sorted(pending.parts.items()):
        by_chain.setdefault(snapshot.uid, []).append(_part(snapshot))
    parts = tuple(part for chain in by_chain.values() for part in chain)
    chains = tuple(_chain(uid, parts) for uid, parts in by_chain.items())
    started = pending.barrier.started_ms
    end = now_ms if ended_ms is None else ended_ms
    return CheckpointStats(
        checkpoint=pending.number,
        kind=str(pending.barrier.kind),
        state=state,
        final=pending.barrier.final,
        triggered_ms=started,
        ended_ms=ended_ms,
        duration_ms=max(0, end - started),
        acked=len(pending.parts),
        subtasks=len(pending.parts) + len(pending.waiting),
        written_bytes=sum(chain.written_bytes for chain in chains),
        state_bytes=sum(chain.state_bytes for chain in chains),
        in_flight_bytes=sum(chain.in_flight_bytes for chain in chains),
        start_delay_ms=max((chain.start_delay_ms for chain in chains), default=0),
        alignment_ms=max((chain.alignment_ms for chain in chains), default=0),
        sync_ms=max((chain.sync_ms for chain in chains), default=0.0),
        async_ms=max((chain.async_ms for chain in chains), default=0.0),
        unaligned=any(part.unaligned for part in parts),
        chains=chains,
        location=location,
        failure=failure,
        parts=parts,
    )


def _part(snapshot: SubtaskSnapshot) -> SubtaskCheckpointStats:
    times = snapshot.times
    return SubtaskCheckpointStats(
        uid=snapshot.uid,
        subtask=snapshot.subtask,
        written_bytes=snapshot.written_bytes,
        state_bytes=snapshot.state_bytes,
        start_delay_ms=times.start_delay_ms,
        alignment_ms=times.alignment_ms,
        sync_ms=times.sync_ms,
        async_ms=times.async_ms,
        in_flight_bytes=times.in_flight_bytes,
        unaligned=times.unaligned,
    )


def _chain(uid: str, parts: Sequence[SubtaskCheckpointStats]) -> ChainCheckpointStats:
    return ChainCheckpointStats(
        uid=uid,
        acked=len(parts),
        written_bytes=sum(part.written_bytes for part in parts),
        state_bytes=sum(part.state_bytes for part in parts),
        start_delay_ms=max(each.start_delay_ms for each in parts),
        alignment_ms=max(each.alignment_ms for each in parts),
        sync_ms=max(each.sync_ms for each in parts),
        async_ms=max(each.async_ms for each in parts),
        in_flight_bytes=sum(each.in_flight_bytes for each in parts),
    )
