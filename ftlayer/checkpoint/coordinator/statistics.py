"""How long checkpoints took and how large they were: a history for people and metrics, values that never change."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from ftlayer.checkpoint.barrier import Alignment, Barrier, SnapshotKind
from ftlayer.checkpoint.snapshots import Checkpoint, EdgeInfo, OperatorInfo, SubtaskSnapshot

Subtask = tuple[str, int]
"""Uid of a chain, and the number of one of its subtasks."""


class CheckpointStage(Enum):
    """How far a checkpoint is: subtasks write, all have, the metadata is written, sinks are committed."""

    WRITING = auto()
    WRITTEN = auto()
    PUBLISHING = auto()
    COMMITTING = auto()


@dataclass(frozen=True, slots=True)
class JobFacts:
    """Facts that all checkpoints of an execution have in common.

    Attributes:
        job: name of the topology.
        run: unique name of the execution.
        max_parallelism: number of key groups.
        operators: of the graph.
        subtasks: of all chains: each has a part in every checkpoint.
        sources: those of them that say when their data has ended: a source's, and heads of iterations.
        edges: of the graph.
        may_overtake: barriers may overtake records where a chain holds its input.
    """

    job: str
    run: str
    max_parallelism: int
    operators: tuple[OperatorInfo, ...]
    subtasks: frozenset[Subtask]
    sources: frozenset[Subtask]
    edges: tuple[EdgeInfo, ...] = ()
    may_overtake: bool = False


@dataclass(eq=False)
class PendingCheckpoint:
    """A checkpoint under way.

    Attributes:
        barrier: what was triggered.
        triggered_ms: by the monotone clock.
        waiting: subtasks whose parts are not there yet.
        stops: whether the job stops with it (a savepoint).
        requests: of users, to be answered with it.
        held_up_by: chains that held their input before their parts came: what is behind them had less than the timeout.
        parts: of the subtasks that have theirs written.
        checkpoint: as it was published.
    """

    barrier: Barrier
    triggered_ms: int
    waiting: set[Subtask]
    stops: bool = False
    requests: list[int] = field(default_factory=list)
    held_up_by: set[str] = field(default_factory=set)
    parts: dict[Subtask, SubtaskSnapshot] = field(default_factory=dict)
    stage: CheckpointStage = CheckpointStage.WRITING
    checkpoint: Checkpoint | None = None

    @property
    def number(self) -> int:
        return self.barrier.checkpoint

    @property
    def is_savepoint(self) -> bool:
        return self.barrier.kind is SnapshotKind.SAVEPOINT

    @property
    def commits(self) -> bool:
        """Whether its completion commits sinks, and makes it what the job is restored from.

        A savepoint that the job goes on behind does neither (as in Flink since 1.15): it is its user's to move or
        delete, so the job cannot count on it, and what it would have committed would come a second time if the job
        were restored from the checkpoint before.
        """
        return not self.is_savepoint or self.stops

    @property
    def may_be_overtaken(self) -> bool:
        """Whether it is aligned for good, and another one would do as well in its place."""
        barrier = self.barrier
        aligned = barrier.alignment is Alignment.ALIGNED and barrier.timeout_ms is None
        replaceable = not self.is_savepoint and not barrier.final
        return self.stage is CheckpointStage.WRITING and aligned and replaceable

    def waits_for(self, chains: Collection[str]) -> list[str]:
        return sorted({uid for uid, _ in self.waiting} & set(chains))

    @property
    def can_be_aborted(self) -> bool:
        """Whether its metadata is not written yet, nor being written."""
        return self.stage in (CheckpointStage.WRITING, CheckpointStage.WRITTEN)

    def acked(self, part: SubtaskSnapshot) -> None:
        """Take a part; one that is there already, or was not asked for, is ignored."""
        subtask = (part.uid, part.subtask)
        if subtask in self.waiting:
            self.waiting.discard(subtask)
            self.parts[subtask] = part
            if not self.waiting:
                self.stage = CheckpointStage.WRITTEN

    def validate(self, facts: JobFacts) -> None:
        """Raise `AssertionError` if what is known does not fit together; for tests."""
        have = self.parts.keys()
        assert self.waiting.isdisjoint(have), f"checkpoint {self.number} waits for parts that it has"
        assert self.waiting | have == facts.subtasks, f"checkpoint {self.number} has lost a subtask"
        writing = self.stage is CheckpointStage.WRITING
        assert writing == bool(self.waiting), f"checkpoint {self.number} is {self.stage}: {self.waiting}"
        committing = self.stage is CheckpointStage.COMMITTING
        assert committing == (self.checkpoint is not None), f"checkpoint {self.number} is {self.stage}"

    def assembled(self, facts: JobFacts, completed_ms: int) -> Checkpoint:
        """Return the whole. ``completed_ms``: wall clock."""
        parts = tuple(self.parts[subtask] for subtask in sorted(self.parts))
        return Checkpoint(
            checkpoint=self.number,
            job=facts.job,
            run=facts.run,
            kind=str(self.barrier.kind),
            started_ms=self.barrier.started_ms,
            completed_ms=completed_ms,
            max_parallelism=facts.max_parallelism,
            operators=facts.operators,
            subtasks=parts,
            unaligned=any(part.channels for part in parts),
            edges=facts.edges,
        )


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
