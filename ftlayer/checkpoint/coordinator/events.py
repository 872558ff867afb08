"""What happens to checkpoints: the events of `CheckpointCoordinator`. Frozen values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot
from ftlayer.errors import CheckpointError, FTLayerError

Subtask = tuple[str, int]
"""Uid of a chain, and the number of one of its subtasks."""


class JobEnd(StrEnum):
    """How a job came to its end: FINISHED with all its records done or with a savepoint, or not so well.

    INTERRUPTED is a cancellation that says nothing of what is to become of its state: Ctrl-C.
    """

    FINISHED = "finished"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Trigger:
    """Have all subtasks of all sources send this barrier."""

    barrier: Barrier


@dataclass(frozen=True, slots=True)
class Publish:
    """Write the metadata; answered by `Published` or `PublishFailed`. One at a time.

    ``checkpoint.sources`` is empty: the owner fills it in. ``location`` is a savepoint's directory, "" otherwise.
    """

    checkpoint: Checkpoint
    location: str


@dataclass(frozen=True, slots=True)
class CommitSinks:
    """Commit what its sinks have written and is not committed yet; answered by `SinksCommitted` or `CommitFailed`."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class NotifyCompleted:
    """Tell all slots that the checkpoint is published and its sinks are committed."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class NotifyAborted:
    """Tell all slots that the checkpoint is given up."""

    checkpoint: int
    reason: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove a completed checkpoint. What those that are `CheckpointCoordinator.completed` refer to stays."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class DiscardParts:
    """Remove what was written for a checkpoint that was given up. ``location``: of a savepoint, else ""."""

    checkpoint: int
    parts: tuple[SubtaskSnapshot, ...]
    location: str = ""


@dataclass(frozen=True, slots=True)
class FailJob:
    """Restore all tasks from the last checkpoint. Nothing is triggered until `TasksRunning`.

    ``final``: no restart mends the failure, and the job is to end with this instead.
    """

    reason: str
    final: FTLayerError | None = None


@dataclass(frozen=True, slots=True)
class RestoreFrom:
    """Answer to `TasksRestarting`: the checkpoint to restore, which stands whatever happens; None: there is none."""

    number: int
    checkpoint: Checkpoint | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a user's request: a completed checkpoint, or why there is none."""

    request: int
    checkpoint: Checkpoint | None = None
    error: CheckpointError | None = None


@dataclass(frozen=True, slots=True)
class FinishTasks:
    """Everything is committed, and the job ends.

    ``drain``: all sources have ended, their streams may end. Otherwise it was stopped with a savepoint (or lost a
    slot since): tasks are to end where they are, for an end of their streams would fire timers and windows.
    """

    drain: bool


CheckpointInstruction = (
    Trigger
    | Publish
    | CommitSinks
    | NotifyCompleted
    | NotifyAborted
    | Discard
    | DiscardParts
    | FailJob
    | RestoreFrom
    | Answer
    | FinishTasks
)


@dataclass(frozen=True, slots=True)
class TasksRestarting:
    """Tasks are to be restored (at the start too): `RestoreFrom` with this number answers, now or later.

    `FinishTasks` answers where there is nothing left to do, and nothing does once the job is cancelled or over.
    Everything under way is given up, and nothing begins before `TasksRunning`. ``sources``: the subtasks of sources
    that begin again, None for all: what they said of their end and backlog is forgotten.
    """

    number: int
    sources: Collection[Subtask] | None = None


@dataclass(frozen=True, slots=True)
class TasksRestored:
    """This one was restored (the one of `RestoreFrom`, an earlier one, or None), and its sinks are committed.

    Those behind it do not stand any more, and are discarded.
    """

    checkpoint: Checkpoint | None


@dataclass(frozen=True, slots=True)
class TasksRunning:
    """All tasks run. The first periodic checkpoint is due after an interval."""


@dataclass(frozen=True, slots=True)
class JobStopping:
    """The job is being cancelled, or has failed for good: everything under way is given up, nothing begins."""


@dataclass(frozen=True, slots=True)
class JobOver:
    """The job is over: what is not to be retained is discarded."""

    end: JobEnd


@dataclass(frozen=True, slots=True)
class CheckpointTick:
    """It may be time for something; coming early does no harm."""


@dataclass(frozen=True, slots=True)
class PartWritten:
    checkpoint: int
    part: SubtaskSnapshot


@dataclass(frozen=True, slots=True)
class PartDeclined:
    """A subtask cannot take its part: see `ftlayer.runtime.protocol.messages.SubtaskDeclined`.

    ``final``: the error, where no restart mends it.
    """

    checkpoint: int
    subtask: Subtask
    reason: str
    counts: bool = True
    final: FTLayerError | None = None


@dataclass(frozen=True, slots=True)
class SubtaskFinished:
    """A source's subtask has emitted its last record (in its present life)."""

    subtask: Subtask


@dataclass(frozen=True, slots=True)
class InputHeld:
    """These chains, by their uids, take nothing from their inputs now, and no others."""

    chains: frozenset[str]


@dataclass(frozen=True, slots=True)
class BacklogChanged:
    """A source's subtask begins, or ceases, to work off a backlog."""

    subtask: Subtask
    working_off: bool


@dataclass(frozen=True, slots=True)
class Published:
    """`Publish` is done; ``checkpoint`` is what was written, with its location."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class PublishFailed:
    """`Publish` has failed; ``final``: the error, where no restart mends it."""

    checkpoint: int
    reason: str
    final: FTLayerError | None = None


@dataclass(frozen=True, slots=True)
class SinksCommitted:
    checkpoint: int


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """`CommitSinks` has failed, wholly or in part: the job is restored from this checkpoint, and commits again.

    ``final``: the error, where no restart mends it.
    """

    checkpoint: int
    reason: str
    final: FTLayerError | None = None


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """Take a checkpoint beside the periodic ones: no pause holds it back, but ``max_concurrent`` does."""

    request: int


@dataclass(frozen=True, slots=True)
class SavepointRequested:
    """Take a savepoint at once, in the new directory ``location``."""

    request: int
    location: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Take a savepoint in ``location``, commit it, and end the job. Where that fails, the job is restarted."""

    request: int
    location: str


CheckpointEvent = (
    TasksRestarting
    | TasksRestored
    | TasksRunning
    | JobStopping
    | JobOver
    | CheckpointTick
    | PartWritten
    | PartDeclined
    | SubtaskFinished
    | InputHeld
    | BacklogChanged
    | Published
    | PublishFailed
    | SinksCommitted
    | CommitFailed
    | CheckpointRequested
    | SavepointRequested
    | StopRequested
)
