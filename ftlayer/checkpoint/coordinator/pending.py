"""A checkpoint between its trigger and its end."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

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
        """Return which of these chains have parts that are not there."""
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
