"""When checkpoints are triggered, complete and fail: rules after Flink's `CheckpointCoordinator`.

A checkpoint's life:

    `Trigger` → `PartWritten` of every subtask → `Publish` → `Published` → `CommitSinks` → `SinksCommitted` →
    `NotifyCompleted`

Until it is being published it can be given up (`NotifyAborted`): it expires, a task declines, a later one completes
first, the job restarts. Once its metadata is being written, whether it stands is decided there alone: a restart waits
for that answer, since what is restored must not be overtaken by a checkpoint that turns out to exist.

A savepoint that the job goes on behind is published and answered, and no more: see `PendingCheckpoint.commits`.
No slot hears of it again, unless it is given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import assert_never

from ftlayer.checkpoint.barrier import Alignment, Barrier, SnapshotKind
from ftlayer.checkpoint.coordinator.completed import CompletedStore
from ftlayer.checkpoint.coordinator.completion import Completion
from ftlayer.checkpoint.coordinator.events import (
    BacklogChanged,
    CheckpointEvent,
    CheckpointRequested,
    CheckpointTick,
    CommitFailed,
    InputHeld,
    JobOver,
    JobStopping,
    PartDeclined,
    PartWritten,
    Published,
    PublishFailed,
    SavepointRequested,
    SinksCommitted,
    StopRequested,
    SubtaskFinished,
    TasksRestarting,
    TasksRestored,
    TasksRunning,
)
from ftlayer.checkpoint.coordinator.failures import AbortReason
from ftlayer.checkpoint.coordinator.holds import InputHolds
from ftlayer.checkpoint.coordinator.in_flight import PendingCheckpoints
from ftlayer.checkpoint.coordinator.instructions import (
    Answer,
    CheckpointInstruction,
    FinishTasks,
    RestoreFrom,
)
from ftlayer.checkpoint.coordinator.pending import JobFacts, Subtask
from ftlayer.checkpoint.coordinator.schedule import Schedule
from ftlayer.checkpoint.coordinator.statistics import CheckpointCounts, CheckpointStats
from ftlayer.checkpoint.options import CheckpointConfig, CheckpointingMode
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.clock import Now
from ftlayer.errors import CheckpointError

FINAL_AGAIN_MS = 1_000
"""A final checkpoint that failed is taken again after this time."""


class _CoordinatorPhase(Enum):
    DOWN = auto()  # starts or restarts
    RUNNING = auto()
    FAILING = auto()  # from `FailJob` to `TasksRestarting`
    ENDING = auto()  # from `FinishTasks` on
    CLOSED = auto()  # is being cancelled
    OVER = auto()


class CheckpointCoordinator:
    """Takes events, and returns what is to be done, in order. Its owner serializes the calls."""

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
        self._store = CompletedStore(config, known, claimed=claimed)
        highest = max([highest, *(each.checkpoint for each in known)])
        self._barriers = _BarrierFactory(config, highest)
        self._schedule = Schedule(config)
        self._holds = InputHolds()
        self._flight = PendingCheckpoints(config, facts)
        self._completion = Completion(facts, self._flight, self._store, self._schedule)
        self._phase = _CoordinatorPhase.DOWN
        self._asked: list[int] = []
        self._requests: list[int] = []
        self._ended: set[Subtask] = set()

    def handle(self, event: CheckpointEvent, now: Now) -> list[CheckpointInstruction]:
        """Take one event and return what is to be done, in order."""
        return [*self._take(event, now), *self._advance(now)]

    def _take(self, event: CheckpointEvent, now: Now) -> list[CheckpointInstruction]:
        match event:
            case TasksRestarting():
                return self._restarting(event, now)
            case TasksRestored(checkpoint):
                if checkpoint is not None:
                    self._flight.restored()
                return self._completion.restored(checkpoint)
            case TasksRunning():
                self._running(now)
            case JobStopping():
                return (
                    []
                    if self._phase is _CoordinatorPhase.OVER
                    else self._close(_CoordinatorPhase.CLOSED, now)
                )
            case JobOver(end):
                return self._close(_CoordinatorPhase.OVER, now) + self._completion.over(end)
            case PartWritten(checkpoint, part):
                return self._flight.acked(checkpoint, part, self._holds)
            case PartDeclined():
                return self._declined(event, now)
            case SubtaskFinished(subtask):
                self._ended.add(subtask)
            case InputHeld(chains):
                self._holds.told(chains, now.mono_ms)
            case BacklogChanged(subtask, working_off):
                self._schedule.backlog(subtask, working_off, now.mono_ms)
            case Published(checkpoint):
                return self._completion.published(checkpoint, now)
            case PublishFailed(checkpoint, reason, final):
                return self._completion.publish_failed(checkpoint, reason, final, now)
            case SinksCommitted(checkpoint):
                return self._completion.committed(checkpoint, now)
            case CommitFailed(checkpoint, reason, final):
                return self._completion.commit_failed(checkpoint, reason, final, now)
            case CheckpointRequested() | SavepointRequested() | StopRequested():
                return self._requested(event, now)
            case CheckpointTick():
                pass
            case _:
                assert_never(event)
        return []

    # ------------------------------------------------------------ what happens

    def _restarting(self, event: TasksRestarting, now: Now) -> list[CheckpointInstruction]:
        if self._phase in (_CoordinatorPhase.CLOSED, _CoordinatorPhase.OVER):
            return []
        if self._phase is not _CoordinatorPhase.ENDING:
            self._phase = _CoordinatorPhase.DOWN
        self._schedule.stop()
        again = self._facts.sources if event.sources is None else event.sources
        self._ended.difference_update(again)
        self._schedule.forget_backlogs(again)
        self._asked.append(event.number)
        return self._give_up_all(AbortReason.JOB_RESTARTS, now)

    def _running(self, now: Now) -> None:
        if self._phase is _CoordinatorPhase.DOWN:
            self._phase = _CoordinatorPhase.RUNNING
            self._flight.final_failed_ms = None
            self._schedule.start(now.mono_ms)

    def _declined(self, event: PartDeclined, now: Now) -> list[CheckpointInstruction]:
        pending = self._flight.get(event.checkpoint)
        if pending is None or not pending.can_be_aborted:
            return []
        uid, number = event.subtask
        why = AbortReason.DECLINED if event.counts else AbortReason.GIVEN_UP
        detail = f"{uid!r}, subtask {number}: {event.reason}"
        return self._flight.abort(pending, why, now, detail, event.final)

    def _requested(
        self, event: CheckpointRequested | SavepointRequested | StopRequested, now: Now
    ) -> list[CheckpointInstruction]:
        refusal = self._refusal
        if refusal:
            return [_refused(event.request, refusal)]
        match event:
            case CheckpointRequested(request):
                self._requests.append(request)
                return []
            case SavepointRequested(request, location):
                barrier = self._barriers.savepoint(now.wall_ms, location, final=False)
                return self._flight.begin(barrier, now, [request])
            case StopRequested(request, location):
                barrier = self._barriers.savepoint(now.wall_ms, location, final=True)
                return self._flight.begin(barrier, now, [request], stops=True)

    # ------------------------------------------------------------ views

    @property
    def due_ms(self) -> int | None:
        """Monotone time at which `CheckpointTick` has something to do; None: not foreseen."""
        times = [self._flight.expires_ms]
        held = self._flight.held_up(self._holds.chains) if self._facts.may_overtake else []
        if held:
            times.append(self._holds.lasts_at_ms(held))
        if self._may_trigger:
            times.append(self._final_due_ms if self._all_ended else self._schedule.due_ms)
        return min((time for time in times if time is not None), default=None)

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
        return self._flight.counts

    def history(self, now: Now) -> tuple[CheckpointStats, ...]:
        """Checkpoints under way, and the last 100 others; the latest first."""
        return self._flight.history(now)

    def validate(self) -> None:
        """Raise `AssertionError` if what is known does not fit together; for tests, behind each event."""
        self._store.validate()
        self._flight.validate()
        self._completion.validate()
        assert self._flight.failure is None, f"the job was not failed: {self._flight.failure}"
        asked = f"{self._asked} are not answered"
        assert not self._asked or self._completion.busy, asked
        assert not self._asked or self._phase in (_CoordinatorPhase.DOWN, _CoordinatorPhase.ENDING), (
            f"{asked}: {self._phase}"
        )
        running = self._phase in (_CoordinatorPhase.RUNNING, _CoordinatorPhase.FAILING)
        assert running or not self._requests, f"{self._requests} are not refused: {self._phase}"
        if not running:
            left = [pending.number for pending in self._flight.all if pending.can_be_aborted]
            assert not left, f"{left} are not given up: {self._phase}"

    # ------------------------------------------------------------ going on

    def _advance(self, now: Now) -> list[CheckpointInstruction]:
        return [
            *self._flight.expire(now, self._holds),
            *self._overtake(now),
            *self._completion.advance(now),
            *(self._refuse_waiting("the job has come to its end") if self._completion.last_done else ()),
            *self._fail_job(),
            *self._trigger_due(now),
            *self._answer_restarts(),
            *self._finish(),
        ]

    def _overtake(self, now: Now) -> list[CheckpointInstruction]:
        """Wait no longer for chains that hold their input: the next checkpoint overtakes what waits there."""
        if not self._facts.may_overtake:
            return []
        instructions, requests = self._flight.overtake(self._holds.lasting(now.mono_ms), now)
        self._requests = [*requests, *self._requests]
        return instructions

    def _fail_job(self) -> list[CheckpointInstruction]:
        failure, self._flight.failure = self._flight.failure, None
        if failure is None or self._phase is not _CoordinatorPhase.RUNNING or self._completion.last_done:
            return []
        self._phase = _CoordinatorPhase.FAILING
        self._schedule.stop()
        return [failure]

    def _trigger_due(self, now: Now) -> list[CheckpointInstruction]:
        instructions: list[CheckpointInstruction] = []
        while self._is_due(now):
            requests, self._requests = self._requests, []
            if not self._all_ended and not requests:
                self._schedule.triggered(now.mono_ms)
            final, full = self._all_ended, self._store.needs_full
            overtakes = self._facts.may_overtake and bool(self._holds.lasting(now.mono_ms))
            barrier = self._barriers.checkpoint(now.wall_ms, final=final, full=full, overtakes=overtakes)
            instructions += self._flight.begin(barrier, now, requests)
        return instructions

    def _is_due(self, now: Now) -> bool:
        """Whether a checkpoint is to be triggered now: the final one, one that users wait for, or a periodic one."""
        if not self._may_trigger:
            return False
        if self._all_ended:
            return now.mono_ms >= self._final_due_ms
        due_ms = self._schedule.due_ms
        return bool(self._requests) or (due_ms is not None and now.mono_ms >= due_ms)

    def _answer_restarts(self) -> list[CheckpointInstruction]:
        if not self._asked or self._completion.busy:
            return []
        asked, self._asked = self._asked, []
        if self._completion.last_done:
            # Everything is committed: there is nothing to be restored for.
            self._phase = _CoordinatorPhase.ENDING
            return [FinishTasks(drain=False)]
        return [RestoreFrom(number, self._store.latest) for number in asked]

    def _finish(self) -> list[CheckpointInstruction]:
        if not self._completion.last_done or self._flight.all or self._phase is not _CoordinatorPhase.RUNNING:
            return []
        self._phase = _CoordinatorPhase.ENDING
        return [FinishTasks(drain=self._all_ended)]

    def _give_up_all(self, reason: AbortReason, now: Now) -> list[CheckpointInstruction]:
        given_up = [
            each
            for pending in self._flight.all
            if pending.can_be_aborted
            for each in self._flight.abort(pending, reason, now)
        ]
        return given_up + self._refuse_waiting(reason.text)

    def _close(self, phase: _CoordinatorPhase, now: Now) -> list[CheckpointInstruction]:
        self._phase = phase
        self._asked.clear()
        self._schedule.stop()
        return self._give_up_all(AbortReason.JOB_OVER, now)

    # ------------------------------------------------------------ small ones

    @property
    def _all_ended(self) -> bool:
        return self._ended >= self._facts.sources

    @property
    def _may_trigger(self) -> bool:
        return (
            self._phase is _CoordinatorPhase.RUNNING
            and not self._completion.last_done
            and len(self._flight) < self._config.max_concurrent
            and not any(pending.barrier.final for pending in self._flight.all)
        )

    @property
    def _final_due_ms(self) -> int:
        failed_ms = self._flight.final_failed_ms
        return 0 if failed_ms is None else failed_ms + FINAL_AGAIN_MS

    @property
    def _refusal(self) -> str:
        """Why no user's request is taken now, "" where one is."""
        if self._completion.last_done or any(pending.stops for pending in self._flight.all):
            return "the job is coming to its end"
        if self._phase is not _CoordinatorPhase.RUNNING:
            return "the job does not run now; ask again when it does"
        return ""

    def _refuse_waiting(self, reason: str) -> list[CheckpointInstruction]:
        requests, self._requests = self._requests, []
        return [_refused(request, reason) for request in requests]


def _refused(request: int, reason: str) -> Answer:
    return Answer(request, error=CheckpointError(f"no checkpoint: {reason}"))


class _BarrierFactory:
    """Makes the barriers of one execution: what each checkpoint asks of the tasks, under an id that was never used."""

    def __init__(self, config: CheckpointConfig, highest: int) -> None:
        self._config = config
        self._last = highest

    def checkpoint(self, wall_ms: int, *, final: bool, full: bool, overtakes: bool) -> Barrier:
        """Return the next checkpoint's; ``overtakes``: it overtakes records, whatever the options say.

        The final one lets every record that is before it come to its end, so it is never unaligned: nothing would
        work off what it has overtaken.
        """
        self._last += 1
        alignment, timeout_ms = self._alignment(final, overtakes)
        return Barrier(self._last, wall_ms, alignment, timeout_ms, final=final, full=full)

    def savepoint(self, wall_ms: int, location: str, *, final: bool) -> Barrier:
        """Return the next savepoint's."""
        self._last += 1
        return Barrier(
            self._last,
            wall_ms,
            Alignment.ALIGNED,
            kind=SnapshotKind.SAVEPOINT,
            final=final,
            location=location,
        )

    def _alignment(self, final: bool, overtakes: bool) -> tuple[Alignment, int | None]:
        if self._config.mode is CheckpointingMode.AT_LEAST_ONCE:
            return Alignment.AT_LEAST_ONCE, None
        if overtakes and not final:
            return Alignment.UNALIGNED, None
        if not self._config.unaligned or final:
            return Alignment.ALIGNED, None
        timeout_ms = self._config.aligned_timeout_ms
        return (Alignment.ALIGNED, timeout_ms) if timeout_ms else (Alignment.UNALIGNED, None)
