"""The checkpoints under way: how they begin, and the two ways they end."""

from __future__ import annotations

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.coordinator.decisions import Answer, Decision, DiscardParts, NotifyAborted, Trigger
from ftlayer.checkpoint.coordinator.failures import AbortReason, FailureCounter
from ftlayer.checkpoint.coordinator.pending import CheckpointStage, JobFacts, PendingCheckpoint
from ftlayer.checkpoint.coordinator.statistics import CheckpointCounts, CheckpointStats, Statistics
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot
from ftlayer.clock import Now
from ftlayer.errors import CheckpointError

_REMEMBERED = 1_000
# Of so many checkpoints that were given up, parts that come late are removed.


class PendingCheckpoints:
    """Holds them by their ids, in order. Decisions are added to ``out``.

    Attributes:
        failure: why the job has to be restarted; its owner resets it to None.
        final_failed_ms: when the final checkpoint, or a savepoint to stop with, was given up last; None: never.
    """

    def __init__(self, config: CheckpointConfig, facts: JobFacts, out: list[Decision]) -> None:
        self._config = config
        self._facts = facts
        self._out = out
        self._pending: dict[int, PendingCheckpoint] = {}
        self._aborted: dict[int, Barrier] = {}
        self._failures = FailureCounter(config.tolerable_failures)
        self._statistics = Statistics()
        self.failure: str | None = None
        self.final_failed_ms: int | None = None

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def all(self) -> tuple[PendingCheckpoint, ...]:
        """The earliest first."""
        return tuple(self._pending.values())

    @property
    def expires_ms(self) -> int | None:
        """When the next one expires."""
        times = [
            pending.triggered_ms + self._config.timeout_ms
            for pending in self.all
            if pending.stage is CheckpointStage.WRITING
        ]
        return min(times, default=None)

    def get(self, checkpoint: int) -> PendingCheckpoint | None:
        """Return it if it is under way."""
        return self._pending.get(checkpoint)

    def begin(self, barrier: Barrier, now: Now, requests: list[int], *, stops: bool = False) -> None:
        """Trigger one."""
        subtasks = set(self._facts.subtasks)
        self._pending[barrier.checkpoint] = PendingCheckpoint(
            barrier, now.mono_ms, subtasks, stops=stops, requests=requests
        )
        self._statistics.triggered += 1
        self._out.append(Trigger(barrier))

    def acked(self, checkpoint: int, part: SubtaskSnapshot) -> None:
        """Take a part. One of a checkpoint that was given up is to be removed."""
        pending = self._pending.get(checkpoint)
        if pending is not None:
            pending.acked(part)
        elif checkpoint in self._aborted:
            self._out.append(DiscardParts(checkpoint, (part,), self._aborted[checkpoint].location))

    def published(self, checkpoint: int) -> None:
        """It stands: failures before it do not count any more."""
        self._failures.succeeded(checkpoint)

    def complete(
        self,
        pending: PendingCheckpoint,
        checkpoint: Checkpoint,
        now: Now,
        error: CheckpointError | None = None,
    ) -> None:
        """It is complete, and its sinks are committed, or could not be (``error``)."""
        del self._pending[pending.number]
        self._statistics.complete(pending, checkpoint, now.wall_ms)
        answer = checkpoint if error is None else None
        self._out.extend(Answer(request, answer, error) for request in pending.requests)

    def abort(self, pending: PendingCheckpoint, reason: AbortReason, now: Now, detail: str = "") -> None:
        """Give it up."""
        number, text = pending.number, f"{reason.text}: {detail}" if detail else reason.text
        location = pending.barrier.location
        del self._pending[number]
        self._remember(pending.barrier)
        self._statistics.fail(pending, text, now.wall_ms)
        self._out.append(NotifyAborted(number, text))
        if pending.parts:
            self._out.append(DiscardParts(number, tuple(pending.parts.values()), location))
        error = CheckpointError(f"{pending.barrier.kind} {number} was given up: {text}")
        self._out.extend(Answer(request, error=error) for request in pending.requests)
        if pending.barrier.final:
            self.final_failed_ms = now.mono_ms
        if pending.stops:
            self.failure = f"the job could not be stopped with savepoint {number}: {text}"
        elif not pending.is_savepoint and self._failures.failed(number, reason):
            tolerable = self._config.tolerable_failures
            self.failure = (
                f"more than {tolerable} checkpoints in a row failed; the last one, {number}: {text}"
            )

    def expire(self, now: Now) -> None:
        """Give up what takes too long."""
        for pending in self.all:
            late = now.mono_ms - pending.triggered_ms >= self._config.timeout_ms
            if late and pending.stage is CheckpointStage.WRITING:
                self.abort(pending, AbortReason.EXPIRED, now)

    def restored(self) -> None:
        """Tasks were restored."""
        self._statistics.restored += 1

    @property
    def counts(self) -> CheckpointCounts:
        """Totals."""
        return self._statistics.counts(len(self._pending), self._failures.in_a_row)

    def history(self, now: Now) -> tuple[CheckpointStats, ...]:
        """See `Statistics.history`."""
        return self._statistics.history(self.all, now.wall_ms)

    def _remember(self, barrier: Barrier) -> None:
        self._aborted[barrier.checkpoint] = barrier
        if len(self._aborted) > _REMEMBERED:
            del self._aborted[next(iter(self._aborted))]
