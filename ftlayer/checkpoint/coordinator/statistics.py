"""How long checkpoints took and how large they were: a history for people and metrics, values that never change."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import Enum, StrEnum, auto

from ftlayer.checkpoint.barrier import Alignment, Barrier, SnapshotKind
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint, EdgeInfo, OperatorInfo, SubtaskSnapshot
from ftlayer.common.printable import shown_url
from ftlayer.vertex.calls.jobs import CheckpointDetails, CheckpointTotals, SubtaskCheckpointDetails

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
            # In this order: another thread that looks on finds it in one of the two.
            self.parts[subtask] = part
            self.waiting.discard(subtask)
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


class Statistics:
    def __init__(self, config: CheckpointConfig) -> None:
        self.totals = CheckpointTotals(
            tolerable_failures=config.tolerable_failures,
            interval_ms=config.interval_ms or 0,
            directory=shown_url(config.directory or ""),
            savepoint_directory=shown_url(config.savepoint_directory or ""),
        )
        self._ended: tuple[CheckpointDetails, ...] = ()

    def trigger(self) -> None:
        self.totals = replace(self.totals, triggered=self.totals.triggered + 1)

    def restore(self) -> None:
        self.totals = replace(self.totals, restored=self.totals.restored + 1)

    def complete(self, pending: PendingCheckpoint, checkpoint: Checkpoint, wall_ms: int) -> None:
        completed, latest_ms = self.totals.completed + 1, max(self.totals.last_completed_ms, wall_ms)
        self.totals = replace(self.totals, completed=completed, last_completed_ms=latest_ms)
        self._end(details_of(pending, CheckpointState.COMPLETED, wall_ms, location=checkpoint.location))

    def fail(self, pending: PendingCheckpoint, failure: str, wall_ms: int) -> None:
        self.totals = replace(self.totals, failed=self.totals.failed + 1)
        self._end(details_of(pending, CheckpointState.FAILED, wall_ms, failure=failure))

    def _end(self, ended: CheckpointDetails) -> None:
        self._ended = (*self._ended, ended)[-HISTORY:]

    def history(
        self, in_progress: Iterable[PendingCheckpoint], wall_ms: int
    ) -> tuple[CheckpointDetails, ...]:
        """Return those under way and the last `HISTORY` that are not, the latest id first; any thread.

        One that ends meanwhile is in both, and has ended.
        """
        current = [details_of(pending, CheckpointState.IN_PROGRESS, wall_ms) for pending in in_progress]
        found = {each.number: each for each in (*current, *self._ended)}
        return tuple(found[number] for number in sorted(found, reverse=True))


def details_of(
    pending: PendingCheckpoint,
    state: CheckpointState,
    now_ms: int,
    location: str = "",
    failure: str = "",
) -> CheckpointDetails:
    """Return what is known of one. ``now_ms``: wall clock."""
    started_ms = pending.barrier.started_ms
    return CheckpointDetails(
        number=pending.number,
        kind=str(pending.barrier.kind),
        state=str(state),
        final=pending.barrier.final,
        triggered_ms=started_ms,
        ended_ms=0 if state is CheckpointState.IN_PROGRESS else now_ms,
        duration_ms=max(0, now_ms - started_ms),
        expected=len(pending.waiting.union(pending.parts)),
        subtasks=tuple(_part(snapshot) for _, snapshot in sorted(pending.parts.items())),
        location=location,
        failure=failure,
    )


def _part(snapshot: SubtaskSnapshot) -> SubtaskCheckpointDetails:
    return SubtaskCheckpointDetails(
        uid=snapshot.uid,
        subtask=snapshot.subtask,
        written_bytes=snapshot.written_bytes,
        state_bytes=snapshot.state_bytes,
        **asdict(snapshot.times),
    )
