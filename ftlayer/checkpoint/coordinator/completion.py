"""From the last subtask's part to a completed checkpoint: one at a time is published, and its sinks are committed."""

from __future__ import annotations

from ftlayer.checkpoint.coordinator.completed import CompletedStore
from ftlayer.checkpoint.coordinator.failures import AbortReason
from ftlayer.checkpoint.coordinator.in_flight import PendingCheckpoints
from ftlayer.checkpoint.coordinator.instructions import (
    CheckpointInstruction,
    CommitSinks,
    Discard,
    JobEnd,
    NotifyCompleted,
    Publish,
)
from ftlayer.checkpoint.coordinator.pending import CheckpointStage, JobFacts, PendingCheckpoint
from ftlayer.checkpoint.coordinator.schedule import Schedule
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.clock import Now
from ftlayer.errors import CheckpointError, CommitFailedError, FTLayerError


class Completion:
    """Answers that were not asked for are a `ValueError`: the owner has lost count."""

    def __init__(
        self,
        facts: JobFacts,
        flight: PendingCheckpoints,
        store: CompletedStore,
        schedule: Schedule,
    ) -> None:
        self._facts = facts
        self._flight = flight
        self._store = store
        self._schedule = schedule
        self._current: PendingCheckpoint | None = None
        self._committed = 0
        self._completed_ms = max((known.completed_ms for known in store.checkpoints), default=0)
        self._end: JobEnd | None = None
        # A commit has failed: it has to be done again, with the same id, before another one holds its messages.
        self._commits_again = False
        self.last_done = False

    @property
    def busy(self) -> bool:
        """Whether an answer is waited for, which says which checkpoint the job is restored from."""
        return self._current is not None

    def advance(self, now: Now) -> list[CheckpointInstruction]:
        """Publish the earliest that is written; none behind a failed commit, before the job is restored."""
        instructions: list[CheckpointInstruction] = []
        if self._commits_again:
            return instructions
        for pending in self._flight.all:
            if self._current is not None or pending.stage is not CheckpointStage.WRITTEN:
                continue
            if self._store.lacks_base(pending.parts.values()):
                instructions += self._flight.abort(pending, AbortReason.BASE_GONE, now)
                continue
            self._current, pending.stage = pending, CheckpointStage.PUBLISHING
            # "The latest" goes by this time, whatever the clock of this driver says, or that of the one before.
            self._completed_ms = max(now.wall_ms, self._completed_ms + 1)
            whole = pending.assembled(self._facts, self._completed_ms)
            instructions.append(Publish(whole, pending.barrier.location))
        return instructions

    def published(self, checkpoint: Checkpoint, now: Now) -> list[CheckpointInstruction]:
        """The metadata is written."""
        pending = self._answered(checkpoint.checkpoint, CheckpointStage.PUBLISHING)
        self._flight.published(pending.number)
        if not pending.commits:
            return self._complete(pending, checkpoint, now)
        subsumed = self._subsume_earlier(pending, now)
        self._store.add(checkpoint, full=pending.barrier.full)
        pending.stage, pending.checkpoint = CheckpointStage.COMMITTING, checkpoint
        if self._end is not None:
            # Nothing is committed for a job that is over: the job that restores the checkpoint does that.
            answers = self._complete(pending, checkpoint, now)
            return subsumed + answers + _discard(self._store.subsume() + self._store.over(self._end))
        if self._has_to_commit(checkpoint):
            return [*subsumed, CommitSinks(checkpoint)]
        return subsumed + self._sinks_committed(pending, checkpoint, now)

    def publish_failed(
        self, checkpoint: int, reason: str, final: FTLayerError | None, now: Now
    ) -> list[CheckpointInstruction]:
        """The metadata could not be written."""
        pending = self._answered(checkpoint, CheckpointStage.PUBLISHING)
        self._current = None
        return self._flight.abort(pending, AbortReason.STORAGE, now, reason, final)

    def committed(self, checkpoint: int, now: Now) -> list[CheckpointInstruction]:
        pending = self._answered(checkpoint, CheckpointStage.COMMITTING)
        assert pending.checkpoint is not None
        return self._sinks_committed(pending, pending.checkpoint, now)

    def commit_failed(
        self, checkpoint: int, reason: str, final: FTLayerError | None, now: Now
    ) -> list[CheckpointInstruction]:
        """The sinks are not committed, or not all of them. It is complete all the same, and restored from."""
        pending = self._answered(checkpoint, CheckpointStage.COMMITTING)
        assert pending.checkpoint is not None
        text = f"checkpoint {checkpoint} is complete, but its sinks could not be committed: {reason}"
        if pending.is_savepoint:
            # "latest" does not find it, and what it holds of sinks may be committed.
            text += (
                f". The job goes on from savepoint {pending.checkpoint.location}; if its driver dies before the next "
                "checkpoint is complete, restore it from there"
            )
        self._commits_again = True
        self._flight.fail_job(text, final)
        return self._complete(pending, pending.checkpoint, now, CommitFailedError(text))

    def restored(self, checkpoint: Checkpoint | None) -> list[CheckpointInstruction]:
        """Tasks begin with this one, whose sinks are committed."""
        self._commits_again = False
        if checkpoint is not None:
            self._committed = max(self._committed, checkpoint.checkpoint)
        return _discard(self._store.restored(checkpoint))

    def over(self, end: JobEnd) -> list[CheckpointInstruction]:
        self._end = end
        return _discard(self._store.over(end))

    def validate(self) -> None:
        """Raise `AssertionError` if what is known does not fit together; for tests."""
        answering = (CheckpointStage.PUBLISHING, CheckpointStage.COMMITTING)
        under_way = [pending.number for pending in self._flight.all if pending.stage in answering]
        current = [] if self._current is None else [self._current.number]
        assert under_way == current, f"{under_way} are published or committed, {current} waits for an answer"

    def _has_to_commit(self, checkpoint: Checkpoint) -> bool:
        return any(
            committable.checkpoint > self._committed
            for part in checkpoint.subtasks
            for committable in part.committables
        )

    def _subsume_earlier(self, pending: PendingCheckpoint, now: Now) -> list[CheckpointInstruction]:
        instructions: list[CheckpointInstruction] = []
        for earlier in self._flight.all:
            if earlier.number < pending.number and earlier.can_be_aborted and not earlier.is_savepoint:
                # Who asked for a checkpoint has got one.
                pending.requests += earlier.requests
                earlier.requests = []
                instructions += self._flight.abort(earlier, AbortReason.SUBSUMED, now)
        return instructions

    def _sinks_committed(
        self, pending: PendingCheckpoint, checkpoint: Checkpoint, now: Now
    ) -> list[CheckpointInstruction]:
        self._committed = max(self._committed, pending.number)
        self.last_done = self.last_done or pending.barrier.final
        return [
            NotifyCompleted(pending.number),
            *_discard(self._store.subsume()),
            *self._complete(pending, checkpoint, now),
        ]

    def _complete(
        self,
        pending: PendingCheckpoint,
        checkpoint: Checkpoint,
        now: Now,
        error: CheckpointError | None = None,
    ) -> list[CheckpointInstruction]:
        self._current = None
        self._schedule.completed(now.mono_ms)
        return self._flight.complete(pending, checkpoint, now, error)

    def _answered(self, checkpoint: int, stage: CheckpointStage) -> PendingCheckpoint:
        pending = self._current
        if pending is None or pending.number != checkpoint or pending.stage is not stage:
            raise ValueError(f"checkpoint {checkpoint} is not one that waits for this answer")
        return pending


def _discard(checkpoints: list[Checkpoint]) -> list[CheckpointInstruction]:
    return [Discard(checkpoint) for checkpoint in checkpoints]
