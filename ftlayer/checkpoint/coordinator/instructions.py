"""What `CheckpointCoordinator` wants done: its instructions. Frozen values, to be carried out in their order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot
from ftlayer.errors import CheckpointError, FTLayerError


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
    """Commit what the checkpoint's sinks have written; answered by `SinksCommitted` or `CommitFailed`.

    Some of it may be committed already, and is to be left out.
    """

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
