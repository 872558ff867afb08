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

from ftlayer.checkpoint.coordinator.barriers import BarrierFactory
from ftlayer.checkpoint.coordinator.completed import CompletedStore
from ftlayer.checkpoint.coordinator.completion import Completion
from ftlayer.checkpoint.coordinator.decisions import (
    Answer,
    Decision,
    FailJob,
    FinishTasks,
    JobEnd,
    RestoreFrom,
)
from ftlayer.checkpoint.coordinator.failures import AbortReason
from ftlayer.checkpoint.coordinator.in_flight import PendingCheckpoints
from ftlayer.checkpoint.coordinator.pending import JobFacts, Subtask
from ftlayer.checkpoint.coordinator.schedule import Schedule
from ftlayer.checkpoint.coordinator.statistics import CheckpointCounts, CheckpointStats
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot
from ftlayer.clock import Now
from ftlayer.errors import CheckpointError

FINAL_AGAIN_MS = 1_000
"""A final checkpoint that failed is taken again after this time."""


class _Phase(Enum):
    DOWN = auto()  # starts or restarts
    RUNNING = auto()
    FAILING = auto()  # from `FailJob` to `restarting`
    ENDING = auto()  # from `FinishTasks` on
    CLOSED = auto()  # is being cancelled
    OVER = auto()


class CheckpointCoordinator:
    """Methods are events; each returns what is to be done, in order. Its owner serializes the calls."""

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
        self._config = config
        self._facts = facts
        self._out: list[Decision] = []
        self._store = CompletedStore(config, known, claimed=claimed)
        highest = max([highest, *(each.checkpoint for each in known)])
        self._barriers = BarrierFactory(config, highest)
        self._schedule = Schedule(config)
        self._flight = PendingCheckpoints(config, facts, self._out)
        self._completion = Completion(facts, self._flight, self._store, self._schedule, self._out)
        self._phase = _Phase.DOWN
        self._asked: list[int] = []
        self._requests: list[int] = []
        self._ended: set[Subtask] = set()

    # ------------------------------------------------------------ the job

    def restarting(self, number: int, now: Now, sources: Collection[Subtask] | None = None) -> list[Decision]:
        """Tasks are to be restored (at the start too): `RestoreFrom` with this number answers, now or later.

        `FinishTasks` answers where there is nothing left to do, and nothing does once the job is cancelled or over.

        Everything under way is given up, and nothing begins before `running`. ``sources``: the subtasks of sources
        that begin again, None for all: what they said of their end and backlog is forgotten.
        """
        if self._phase in (_Phase.CLOSED, _Phase.OVER):
            return []
        if self._phase is not _Phase.ENDING:
            self._phase = _Phase.DOWN
        self._schedule.stop()
        again = self._facts.sources if sources is None else sources
        self._ended.difference_update(again)
        self._schedule.forget_backlogs(again)
        self._asked.append(number)
        self._give_up_all(AbortReason.JOB_RESTARTS, now)
        return self._advance(now)

    def restored(self, checkpoint: Checkpoint | None, now: Now) -> list[Decision]:
        """This one was restored, and its sinks are committed: the one of `RestoreFrom`, or an earlier one.

        Those behind it do not stand any more, and are discarded.
        """
        self._flight.restored()
        self._completion.restored(checkpoint)
        return self._advance(now)

    def running(self, now: Now) -> list[Decision]:
        """All tasks run. The first periodic checkpoint is due after an interval."""
        if self._phase is _Phase.DOWN:
            self._phase = _Phase.RUNNING
            self._flight.final_failed_ms = None
            self._schedule.start(now.mono_ms)
        return self._advance(now)

    def cancel(self, now: Now) -> list[Decision]:
        """The job is being cancelled, or has failed for good: everything under way is given up, nothing begins."""
        if self._phase is not _Phase.OVER:
            self._close(_Phase.CLOSED, now)
        return self._advance(now)

    def over(self, end: JobEnd, now: Now) -> list[Decision]:
        """The job is over: discard what is not to be retained."""
        self._close(_Phase.OVER, now)
        self._completion.over(end)
        return self._advance(now)

    # ------------------------------------------------------------ time

    def tick(self, now: Now) -> list[Decision]:
        """Time has passed; early calls do no harm."""
        return self._advance(now)

    @property
    def due_ms(self) -> int | None:
        """Monotone time at which `tick` has something to do; None: not foreseen."""
        times = [self._flight.expires_ms]
        if self._may_trigger:
            times.append(self._final_due_ms if self._all_ended else self._schedule.due_ms)
        return min((time for time in times if time is not None), default=None)

    # ------------------------------------------------------------ tasks

    def acked(self, checkpoint: int, part: SubtaskSnapshot, now: Now) -> list[Decision]:
        """A subtask's part is written."""
        self._flight.acked(checkpoint, part)
        return self._advance(now)

    def declined(
        self,
        checkpoint: int,
        subtask: Subtask,
        reason: str,
        now: Now,
        *,
        counts: bool = True,
    ) -> list[Decision]:
        """A subtask cannot take its part: see `ftlayer.runtime.protocol.messages.SubtaskDeclined`."""
        pending = self._flight.get(checkpoint)
        detail = f"{subtask[0]!r}, subtask {subtask[1]}: {reason}"
        if pending is not None and pending.can_be_aborted:
            why = AbortReason.DECLINED if counts else AbortReason.GIVEN_UP
            self._flight.abort(pending, why, now, detail)
        return self._advance(now)

    def data_ended(self, subtask: Subtask, now: Now) -> list[Decision]:
        """A source's subtask has emitted its last record (in its present life)."""
        self._ended.add(subtask)
        return self._advance(now)

    def backlog(self, subtask: Subtask, working_off: bool, now: Now) -> list[Decision]:
        """A source's subtask begins, or ceases, to work off a backlog."""
        self._schedule.backlog(subtask, working_off, now.mono_ms)
        return self._advance(now)

    # ------------------------------------------------------------ what was decided is done

    def published(self, checkpoint: Checkpoint, now: Now) -> list[Decision]:
        """`Publish` is done; ``checkpoint`` is what was written, with its location."""
        self._completion.published(checkpoint, now)
        return self._advance(now)

    def publish_failed(self, checkpoint: int, reason: str, now: Now) -> list[Decision]:
        """`Publish` has failed."""
        self._completion.publish_failed(checkpoint, reason, now)
        return self._advance(now)

    def committed(self, checkpoint: int, now: Now) -> list[Decision]:
        """`CommitSinks` is done."""
        self._completion.committed(checkpoint, now)
        return self._advance(now)

    def commit_failed(self, checkpoint: int, reason: str, now: Now) -> list[Decision]:
        """`CommitSinks` has failed, wholly or in part: the job is restored from this checkpoint, and commits again."""
        self._completion.commit_failed(checkpoint, reason, now)
        return self._advance(now)

    # ------------------------------------------------------------ users

    def checkpoint_now(self, request: int, now: Now) -> list[Decision]:
        """Take a checkpoint beside the periodic ones: no pause holds it back, but ``max_concurrent`` does."""
        if not self._refused(request):
            self._requests.append(request)
        return self._advance(now)

    def savepoint(self, request: int, now: Now, location: str) -> list[Decision]:
        """Take a savepoint at once, in the new directory ``location``."""
        if not self._refused(request):
            barrier = self._barriers.savepoint(now.wall_ms, location, final=False)
            self._flight.begin(barrier, now, [request])
        return self._advance(now)

    def stop_with_savepoint(self, request: int, now: Now, location: str) -> list[Decision]:
        """Take a savepoint, commit it, and end the job. Where that fails, the job is restarted."""
        if not self._refused(request):
            barrier = self._barriers.savepoint(now.wall_ms, location, final=True)
            self._flight.begin(barrier, now, [request], stops=True)
        return self._advance(now)

    # ------------------------------------------------------------ views

    @property
    def completed(self) -> tuple[Checkpoint, ...]:
        """The checkpoints that the job may be restored from, the oldest first: `Discard` has to leave them whole."""
        return self._store.checkpoints

    @property
    def in_progress(self) -> tuple[int, ...]:
        """Ids of what is under way."""
        return tuple(pending.number for pending in self._flight.all)

    @property
    def counts(self) -> CheckpointCounts:
        """Totals."""
        return self._flight.counts

    def history(self, now: Now) -> tuple[CheckpointStats, ...]:
        """Checkpoints under way, and the last 100 others; the latest first."""
        return self._flight.history(now)

    # ------------------------------------------------------------ going on

    def _advance(self, now: Now) -> list[Decision]:
        self._flight.expire(now)
        self._completion.advance(now)
        if self._completion.last_done:
            self._refuse_waiting("the job has come to its end")
        if self._flight.failure is not None:
            self._fail_job(self._flight.failure)
            self._flight.failure = None
        while self._trigger_next(now):
            pass
        if self._asked and not self._completion.busy:
            self._answer_restarts()
        if self._completion.last_done and not self._flight.all and self._phase is _Phase.RUNNING:
            self._phase = _Phase.ENDING
            self._out.append(FinishTasks(drain=self._all_ended))
        out = list(self._out)
        self._out.clear()
        return out

    def _trigger_next(self, now: Now) -> bool:
        """Trigger what is due, if anything is."""
        if not self._may_trigger:
            return False
        if self._all_ended:
            if now.mono_ms < self._final_due_ms:
                return False
        elif not self._requests:
            due_ms = self._schedule.due_ms
            if due_ms is None or now.mono_ms < due_ms:
                return False
            self._schedule.triggered(now.mono_ms)
        requests, self._requests = self._requests, []
        barrier = self._barriers.checkpoint(now.wall_ms, final=self._all_ended, full=self._store.needs_full)
        self._flight.begin(barrier, now, requests)
        return True

    def _answer_restarts(self) -> None:
        if self._completion.last_done:
            # Everything is committed: there is nothing to be restored for.
            self._phase = _Phase.ENDING
            self._out.append(FinishTasks(drain=False))
        else:
            self._out.extend(RestoreFrom(number, self._store.latest) for number in self._asked)
        self._asked.clear()

    def _give_up_all(self, reason: AbortReason, now: Now) -> None:
        for pending in self._flight.all:
            if pending.can_be_aborted:
                self._flight.abort(pending, reason, now)
        self._refuse_waiting(reason.text)

    def _close(self, phase: _Phase, now: Now) -> None:
        self._phase = phase
        self._asked.clear()
        self._schedule.stop()
        self._give_up_all(AbortReason.JOB_OVER, now)

    def _fail_job(self, reason: str) -> None:
        if self._phase is _Phase.RUNNING and not self._completion.last_done:
            self._phase = _Phase.FAILING
            self._schedule.stop()
            self._out.append(FailJob(reason))

    # ------------------------------------------------------------ small ones

    @property
    def _all_ended(self) -> bool:
        return self._ended >= self._facts.sources

    @property
    def _may_trigger(self) -> bool:
        return (
            self._phase is _Phase.RUNNING
            and not self._completion.last_done
            and len(self._flight) < self._config.max_concurrent
            and not any(pending.barrier.final for pending in self._flight.all)
        )

    @property
    def _final_due_ms(self) -> int:
        failed_ms = self._flight.final_failed_ms
        return 0 if failed_ms is None else failed_ms + FINAL_AGAIN_MS

    def _refused(self, request: int) -> bool:
        if self._completion.last_done or any(pending.stops for pending in self._flight.all):
            reason = "the job is coming to its end"
        elif self._phase is not _Phase.RUNNING:
            reason = "the job does not run now; ask again when it does"
        else:
            return False
        self._out.append(Answer(request, error=CheckpointError(f"no checkpoint: {reason}")))
        return True

    def _refuse_waiting(self, reason: str) -> None:
        error = CheckpointError(f"no checkpoint: {reason}")
        self._out.extend(Answer(request, error=error) for request in self._requests)
        self._requests.clear()
