"""When checkpoints are triggered, complete and fail: rules after Flink's `CheckpointCoordinator`.

A checkpoint's life:

    `Trigger` → every subtask has `acked` → `Publish` → `published` → `CommitSinks` → `committed` → `NotifyCompleted`

Until it is being published it can be given up (`NotifyAborted`): it expires, a task declines, a later one completes
first, the job restarts. Once its metadata is being written, whether it stands is decided there alone: a restart waits
for that answer, since what is restored must not be overtaken by a checkpoint that turns out to exist.

A savepoint that the job goes on behind is published and answered, and no more: see `PendingCheckpoint.commits`.
No slot hears of it again, unless it is given up.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum, auto

from ftlayer.checkpoint.barrier import Alignment, Barrier, SnapshotKind
from ftlayer.checkpoint.coordinator.completed import CompletedStore
from ftlayer.checkpoint.coordinator.decisions import (
    Answer,
    CommitSinks,
    Decision,
    Discard,
    DiscardParts,
    EndTasks,
    FailJob,
    JobEnd,
    NotifyAborted,
    NotifyCompleted,
    Publish,
    RestoreFrom,
    Trigger,
)
from ftlayer.checkpoint.coordinator.failures import AbortReason, FailureCounter
from ftlayer.checkpoint.coordinator.pending import JobFacts, PendingCheckpoint, Stage, Subtask
from ftlayer.checkpoint.coordinator.schedule import Schedule
from ftlayer.checkpoint.coordinator.statistics import CheckpointCounts, CheckpointStats, Statistics
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot
from ftlayer.errors import CheckpointError
from ftlayer.layer.calls import Now


class CheckpointCoordinator:
    """Methods are events; each returns what is to be done, in order. Whoever owns it serializes the calls."""

    def __init__(
        self,
        config: CheckpointConfig,
        facts: JobFacts,
        *,
        highest: int = 0,
        known: Sequence[Checkpoint] = (),
        claimed: bool = True,
    ) -> None:
        """``highest``: no id up to it is used again. ``known``: see `CompletedStore`."""
        raise NotImplementedError

    # ------------------------------------------------------------ the job

    def restarting(self, number: int, now: Now, sources: Collection[Subtask] | None = None) -> list[Decision]:
        """Tasks are to be restored (at the start too): `RestoreFrom` with this number answers, now or later.

        Everything under way is given up, and nothing begins before `running`. ``sources``: the subtasks of sources
        that begin again, None for all: what they said of their end and backlog is forgotten.
        """
        raise NotImplementedError

    def restored(self, checkpoint: Checkpoint | None, now: Now) -> list[Decision]:
        """This one was restored, and its sinks are committed: the one of `RestoreFrom`, or an earlier one.

        Those behind it do not stand any more, and are discarded.
        """
        raise NotImplementedError

    def running(self, now: Now) -> list[Decision]:
        """All tasks run. The first periodic checkpoint is due after an interval."""
        raise NotImplementedError

    def cancel(self, now: Now) -> list[Decision]:
        """The job is being cancelled, or has failed for good: everything under way is given up, nothing begins."""
        raise NotImplementedError

    def over(self, end: JobEnd, now: Now) -> list[Decision]:
        """The job is over: discard what is not to be retained."""
        raise NotImplementedError

    # ------------------------------------------------------------ time

    def tick(self, now: Now) -> list[Decision]:
        """Time has passed; early calls do no harm."""
        raise NotImplementedError

    @property
    def due_ms(self) -> int | None:
        """Monotone time at which `tick` has something to do; None: not foreseen."""
        raise NotImplementedError

    # ------------------------------------------------------------ tasks

    def acked(self, checkpoint: int, part: SubtaskSnapshot, now: Now) -> list[Decision]:
        """A subtask's part is written."""
        raise NotImplementedError

    def declined(
        self,
        checkpoint: int,
        subtask: Subtask,
        reason: str,
        now: Now,
        *,
        synchronous: bool = False,
        counts: bool = True,
    ) -> list[Decision]:
        """A subtask cannot take its part: see `ftlayer.runtime.messages.SubtaskDeclined`."""
        raise NotImplementedError

    def data_ended(self, subtask: Subtask, now: Now) -> list[Decision]:
        """A source's subtask has emitted its last record (in its present life)."""
        raise NotImplementedError

    def backlog(self, subtask: Subtask, working_off: bool, now: Now) -> list[Decision]:
        """A source's subtask begins, or ceases, to work off a backlog."""
        raise NotImplementedError

    # ------------------------------------------------------------ what was decided is done

    def published(self, checkpoint: Checkpoint, now: Now) -> list[Decision]:
        """`Publish` is done; ``checkpoint`` is what was written, with its location."""
        raise NotImplementedError

    def publish_failed(self, checkpoint: int, reason: str, now: Now) -> list[Decision]:
        """`Publish` has failed."""
        raise NotImplementedError

    def committed(self, checkpoint: int, now: Now) -> list[Decision]:
        """`CommitSinks` is done."""
        raise NotImplementedError

    def commit_failed(self, checkpoint: int, reason: str, now: Now) -> list[Decision]:
        """`CommitSinks` has failed, wholly or in part: the job is restored from this checkpoint, and commits again."""
        raise NotImplementedError

    # ------------------------------------------------------------ users

    def checkpoint_now(self, request: int, now: Now) -> list[Decision]:
        """Take a checkpoint beside the periodic ones: no pause holds it back, but ``max_concurrent`` does."""
        raise NotImplementedError

    def savepoint(self, request: int, now: Now, location: str = "") -> list[Decision]:
        """Take a savepoint at once, in the directory ``location`` ("": in one of its own in ``savepoint_directory``)."""
        raise NotImplementedError

    def stop_with_savepoint(self, request: int, now: Now, location: str = "") -> list[Decision]:
        """Take a savepoint, commit it, and end the job. Where that fails, the job is restarted."""
        raise NotImplementedError

    # ------------------------------------------------------------ views

    @property
    def completed(self) -> tuple[Checkpoint, ...]:
        """What the job may be restored from, the oldest first: what `Discard` has to leave whole."""
        raise NotImplementedError

    @property
    def in_progress(self) -> tuple[int, ...]:
        """Ids of what is under way."""
        raise NotImplementedError

    @property
    def counts(self) -> CheckpointCounts:
        """Totals."""
        raise NotImplementedError

    def history(self, now: Now) -> tuple[CheckpointStats, ...]:
        """What is under way, and the last 100 that are not; the latest first."""
        raise NotImplementedError
