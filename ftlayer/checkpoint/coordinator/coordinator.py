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

import re
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from enum import Enum, auto
from typing import assert_never

from ftlayer.checkpoint.barrier import Alignment, Barrier, SnapshotKind
from ftlayer.checkpoint.coordinator import events
from ftlayer.checkpoint.coordinator.events import CheckpointEvent, CheckpointInstruction, JobEnd, Subtask
from ftlayer.checkpoint.coordinator.in_flight import (
    AbortReason,
    CheckpointStage,
    InputHolds,
    JobFacts,
    PendingCheckpoint,
    PendingCheckpoints,
)
from ftlayer.checkpoint.options import CheckpointConfig, CheckpointingMode, Retention
from ftlayer.checkpoint.snapshots import Checkpoint, Scope, SubtaskSnapshot
from ftlayer.common.clock import Now
from ftlayer.common.printable import shown_url
from ftlayer.errors import CheckpointError, CommitFailedError, FTLayerError
from ftlayer.vertex.calls.jobs import CheckpointDetails, CheckpointTotals

# Incremental checkpoints refer to one another's pieces, so that damage to one file may reach all that are retained.
# With ``retained`` 2 or more there is always a way back beside that: one more checkpoint is kept, the latest that
# shares nothing with the latest one. So that there is one, and never an old one, every `FULL_EVERY`-th checkpoint is
# a full one, and so is the second of a job that begins with nothing.

_REMEMBERED = 16
# Of so many discarded checkpoints the pieces are known: a task that has missed so many completions cannot take part.

FULL_EVERY = 10
"""Where checkpoints build on one another and more than one is retained, every so many-th is a full one."""

_Place = tuple[str, int]
"""A file's mark and offset of a piece. Files say too little: one that a discarded checkpoint was in may be written on.

The mark ends the name, and is the same where a later run has the same file under a name of its own."""

_MARK = re.compile(r"[-.]")


class CompletedStore:
    """Checkpoints that the job may be restored from, the oldest first. Savepoints among them are never discarded."""

    def __init__(self, config: CheckpointConfig, known: Sequence[Checkpoint], *, claimed: bool) -> None:
        """``known`` are there from the beginning; they are discarded like the job's own ones if ``claimed``."""
        self._retained = config.retained
        self._retention = config.effective_retention
        self._is_lasting = config.directory is not None
        self._has_own = False
        self._checkpoints = sorted(known, key=lambda each: each.checkpoint)
        self._foreign = set() if claimed else {each.checkpoint for each in known}
        self._gone: deque[set[_Place]] = deque(maxlen=_REMEMBERED)
        self._builds = config.incremental or config.changelog
        # A new driver's first one may go on with what the last of these has.
        spare = self._spare()
        self._since_full = 0 if spare is None else self._checkpoints[-1].checkpoint - spare.checkpoint

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        return tuple(self._checkpoints)

    @property
    def latest(self) -> Checkpoint | None:
        return self._checkpoints[-1] if self._checkpoints else None

    @property
    def needs_full(self) -> bool:
        """Whether the next checkpoint is to share nothing with those before."""
        if not self._builds or self._retained == 1 or not self._checkpoints:
            return False
        return self._since_full >= FULL_EVERY or self._spare() is None

    def add(self, checkpoint: Checkpoint, *, full: bool = False) -> None:
        """Take one that the job has completed. ``full``: it was written to share nothing with those before."""
        self._has_own = self._has_own or checkpoint.kind != SnapshotKind.SAVEPOINT
        # A new list: another thread may be looking at the one before.
        self._checkpoints = sorted([*self._checkpoints, checkpoint], key=lambda each: each.checkpoint)
        self._since_full = 1 if full else self._since_full + 1

    def subsume(self) -> list[Checkpoint]:
        """Forget what is more than is retained; returns what is to be discarded of it."""
        spare = self._spare()
        return self._forget([each for each in self._checkpoints[: -self._retained] if each is not spare])

    def _spare(self) -> Checkpoint | None:
        """Return the latest checkpoint that shares nothing with the latest one of all, where that is promised."""
        if self._retained == 1 or not self._checkpoints:
            return None
        *earlier, latest = self._checkpoints
        places = _shared(latest.subtasks)
        return next((each for each in reversed(earlier) if places.isdisjoint(_shared(each.subtasks))), None)

    def restored(self, checkpoint: Checkpoint | None) -> list[Checkpoint]:
        """The job was restored from this one: later ones do not stand any more. Returns what is to be discarded."""
        last = 0 if checkpoint is None else checkpoint.checkpoint
        dropped = self._forget([each for each in self._checkpoints if each.checkpoint > last])
        if checkpoint is not None and all(each.checkpoint != last for each in self._checkpoints):
            self._foreign.add(last)
            self._checkpoints = [*self._checkpoints, checkpoint]  # No later one is left.
            self._since_full += 1
        return dropped

    def over(self, end: JobEnd) -> list[Checkpoint]:
        keep = {
            JobEnd.FINISHED: False,
            JobEnd.INTERRUPTED: self._is_lasting,
            JobEnd.CANCELLED: self._retention is Retention.RETAIN_ON_CANCELLATION,
            # Before a checkpoint of its own, it may be the restore that was refused: what was restored is the way back.
            JobEnd.FAILED: self._retention is not Retention.NO_EXTERNALIZED_CHECKPOINTS or not self._has_own,
        }
        return [] if keep[end] else self._forget(list(self._checkpoints))

    def lacks_base(self, parts: Iterable[SubtaskSnapshot]) -> bool:
        """Whether parts of a new checkpoint refer to pieces that went with a discarded one.

        The news of a completion may reach a task later than a barrier does, and what it builds on be discarded by then.
        """
        places = _shared(parts)
        return any(not places.isdisjoint(gone) for gone in self._gone)

    def validate(self) -> None:
        numbers = [each.checkpoint for each in self._checkpoints]
        assert numbers == sorted(set(numbers)), f"completed checkpoints are {numbers}"
        assert self._foreign <= set(numbers), f"{self._foreign} are foreign, of {numbers}"

    def _forget(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        dropped = {each.checkpoint for each in checkpoints}
        self._checkpoints = [each for each in self._checkpoints if each.checkpoint not in dropped]
        discarded = [
            each
            for each in checkpoints
            if each.checkpoint not in self._foreign and each.kind != SnapshotKind.SAVEPOINT
        ]
        for each in discarded:
            kept = [part for left in self._checkpoints for part in left.subtasks]
            self._gone.append(_shared(each.subtasks) - _shared(kept))
        self._foreign -= dropped
        return discarded


def _shared(parts: Iterable[SubtaskSnapshot]) -> set[_Place]:
    return {
        (_MARK.split(piece.path)[-1], piece.offset)
        for part in parts
        for piece in part.pieces()
        if piece.scope is Scope.SHARED and piece.inline is None
    }


class Schedule:
    """When periodic checkpoints are due, by one monotone clock, ms.

    While a source works off a backlog another interval holds: a longer one takes effect with the next trigger, a
    shorter one at once, 0 suspends.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._interval = config.interval_ms
        self._backlog_interval = config.interval_during_backlog_ms
        self._pause = config.min_pause_ms
        self.backlogs: set[Hashable] = set()
        self._next: int | None = None
        self._not_before: int | None = None
        self._on = False

    def start(self, now_ms: int) -> None:
        self._on = True
        self._next = None
        self._plan(now_ms)

    def stop(self) -> None:
        self._on = False

    def backlog(self, source: Hashable, working_off: bool, now_ms: int) -> None:
        if working_off:
            self.backlogs.add(source)
        else:
            self.backlogs.discard(source)
        if self._on:
            self._plan(now_ms)

    def triggered(self, now_ms: int) -> None:
        self._next = None
        self._plan(now_ms)

    def completed(self, now_ms: int) -> None:
        self._not_before = now_ms + self._pause

    @property
    def due_ms(self) -> int | None:
        if not self._on or self._next is None:
            return None
        return self._next if self._not_before is None else max(self._next, self._not_before)

    def _plan(self, now_ms: int) -> None:
        interval = self._interval
        if self.backlogs and self._backlog_interval is not None:
            interval = self._backlog_interval
        if not interval:
            self._next = None
        elif self._next is None or now_ms + interval < self._next:
            self._next = now_ms + interval


class Completion:
    """Answers that were not asked for are a `ValueError`: the owner has lost count."""

    def __init__(
        self, facts: JobFacts, flight: PendingCheckpoints, store: CompletedStore, schedule: Schedule
    ) -> None:
        self._facts, self._flight, self._store, self._schedule = facts, flight, store, schedule
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
            instructions.append(events.Publish(whole, pending.barrier.location))
        return instructions

    def published(self, checkpoint: Checkpoint, now: Now) -> list[CheckpointInstruction]:
        pending = self._answered(checkpoint.checkpoint, CheckpointStage.PUBLISHING)
        self._flight.failures.succeeded(pending.number)
        if not pending.commits:
            return self._complete(pending, checkpoint, now)
        subsumed = self._subsume_earlier(pending, now)
        self._store.add(checkpoint, full=pending.barrier.full)
        pending.stage, pending.checkpoint = CheckpointStage.COMMITTING, checkpoint
        if self._end is not None:
            # Nothing is committed for a job that is over: the job that restores the checkpoint does that.
            answers = self._complete(pending, checkpoint, now)
            return subsumed + answers + _discard(self._store.subsume() + self._store.over(self._end))
        written = (each for part in checkpoint.subtasks for each in part.committables)
        if any(each.checkpoint > self._committed for each in written):
            return [*subsumed, events.CommitSinks(checkpoint)]
        return subsumed + self._sinks_committed(pending, checkpoint, now)

    def publish_failed(
        self, checkpoint: int, reason: str, final: FTLayerError | None, now: Now
    ) -> list[CheckpointInstruction]:
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
                f". The job goes on from savepoint {shown_url(pending.checkpoint.location)}; if its driver dies "
                "before the next checkpoint is complete, restore it from there"
            )
        self._commits_again = True
        self._flight.fail_job(text, final)
        return self._complete(pending, pending.checkpoint, now, CommitFailedError(text))

    def restored(self, checkpoint: Checkpoint | None) -> list[CheckpointInstruction]:
        self._commits_again = False
        if checkpoint is not None:
            self._committed = max(self._committed, checkpoint.checkpoint)
        return _discard(self._store.restored(checkpoint))

    def over(self, end: JobEnd) -> list[CheckpointInstruction]:
        self._end = end
        return _discard(self._store.over(end))

    def validate(self) -> None:
        answering = (CheckpointStage.PUBLISHING, CheckpointStage.COMMITTING)
        under_way = [pending.number for pending in self._flight.all if pending.stage in answering]
        current = [] if self._current is None else [self._current.number]
        assert under_way == current, f"{under_way} are published or committed, {current} waits for an answer"

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
            events.NotifyCompleted(pending.number),
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
    return [events.Discard(checkpoint) for checkpoint in checkpoints]


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
        return [*self._take(event, now), *self._advance(now)]

    def _take(self, event: CheckpointEvent, now: Now) -> list[CheckpointInstruction]:
        match event:
            case events.TasksRestarting():
                return self._restarting(event, now)
            case events.TasksRestored(checkpoint):
                if checkpoint is not None:
                    self._flight.statistics.restore()
                return self._completion.restored(checkpoint)
            case events.TasksRunning():
                self._running(now)
            case events.JobStopping():
                if self._phase is not _CoordinatorPhase.OVER:
                    return self._close(_CoordinatorPhase.CLOSED, now)
            case events.JobOver(end):
                return self._close(_CoordinatorPhase.OVER, now) + self._completion.over(end)
            case events.PartWritten(checkpoint, part):
                return self._flight.acked(checkpoint, part, self._holds)
            case events.PartDeclined():
                return self._declined(event, now)
            case events.SubtaskFinished(subtask):
                self._ended.add(subtask)
            case events.InputHeld(chains):
                self._holds.told(chains, now.mono_ms)
            case events.BacklogChanged(subtask, working_off):
                self._schedule.backlog(subtask, working_off, now.mono_ms)
            case events.Published(checkpoint):
                return self._completion.published(checkpoint, now)
            case events.PublishFailed(checkpoint, reason, final):
                return self._completion.publish_failed(checkpoint, reason, final, now)
            case events.SinksCommitted(checkpoint):
                return self._completion.committed(checkpoint, now)
            case events.CommitFailed(checkpoint, reason, final):
                return self._completion.commit_failed(checkpoint, reason, final, now)
            case events.CheckpointRequested() | events.SavepointRequested() | events.StopRequested():
                return self._requested(event, now)
            case events.CheckpointTick():
                pass
            case _:
                assert_never(event)
        return []

    def _restarting(self, event: events.TasksRestarting, now: Now) -> list[CheckpointInstruction]:
        if self._phase in (_CoordinatorPhase.CLOSED, _CoordinatorPhase.OVER):
            return []
        if self._phase is not _CoordinatorPhase.ENDING:
            self._phase = _CoordinatorPhase.DOWN
        self._schedule.stop()
        again = self._facts.sources if event.sources is None else event.sources
        self._ended.difference_update(again)
        self._schedule.backlogs.difference_update(again)  # They will say so anew.
        self._asked.append(event.number)
        return self._give_up_all(AbortReason.JOB_RESTARTS, now)

    def _running(self, now: Now) -> None:
        if self._phase is _CoordinatorPhase.DOWN:
            self._phase = _CoordinatorPhase.RUNNING
            self._flight.final_failed_ms = None
            self._schedule.start(now.mono_ms)

    def _declined(self, event: events.PartDeclined, now: Now) -> list[CheckpointInstruction]:
        pending = self._flight.get(event.checkpoint)
        if pending is None or not pending.can_be_aborted:
            return []
        uid, number = event.subtask
        why = AbortReason.DECLINED if event.counts else AbortReason.GIVEN_UP
        detail = f"{uid!r}, subtask {number}: {event.reason}"
        return self._flight.abort(pending, why, now, detail, event.final)

    def _requested(
        self, event: events.CheckpointRequested | events.SavepointRequested | events.StopRequested, now: Now
    ) -> list[CheckpointInstruction]:
        refusal = self._refusal
        if refusal:
            return [_refused(event.request, refusal)]
        match event:
            case events.CheckpointRequested(request):
                self._requests.append(request)
                return []
            case events.SavepointRequested(request, location):
                barrier = self._barriers.savepoint(now.wall_ms, location, final=False)
                return self._flight.begin(barrier, now, [request])
            case events.StopRequested(request, location):
                barrier = self._barriers.savepoint(now.wall_ms, location, final=True)
                return self._flight.begin(barrier, now, [request], stops=True)

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
        return tuple(pending.number for pending in self._flight.all)

    @property
    def counts(self) -> CheckpointTotals:
        return self._flight.counts(self._store.checkpoints)

    def history(self, now: Now) -> tuple[CheckpointDetails, ...]:
        """Checkpoints under way, and the last 100 others; the latest first. Any thread."""
        return self._flight.statistics.history(self._flight.all, now.wall_ms)

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
            return [events.FinishTasks(drain=False)]
        return [events.RestoreFrom(number, self._store.latest) for number in asked]

    def _finish(self) -> list[CheckpointInstruction]:
        if not self._completion.last_done or self._flight.all or self._phase is not _CoordinatorPhase.RUNNING:
            return []
        self._phase = _CoordinatorPhase.ENDING
        return [events.FinishTasks(drain=self._all_ended)]

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
        if self._completion.last_done or any(pending.stops for pending in self._flight.all):
            return "the job is coming to its end"
        if self._phase is not _CoordinatorPhase.RUNNING:
            return "the job does not run now; ask again when it does"
        return ""

    def _refuse_waiting(self, reason: str) -> list[CheckpointInstruction]:
        requests, self._requests = self._requests, []
        return [_refused(request, reason) for request in requests]


def _refused(request: int, reason: str) -> events.Answer:
    return events.Answer(request, error=CheckpointError(f"no checkpoint: {reason}"))


class _BarrierFactory:
    """Makes the barriers of one execution, under ids that were never used."""

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
        self._last += 1
        return Barrier(self._last, wall_ms, kind=SnapshotKind.SAVEPOINT, final=final, location=location)

    def _alignment(self, final: bool, overtakes: bool) -> tuple[Alignment, int | None]:
        if self._config.mode is CheckpointingMode.AT_LEAST_ONCE:
            return Alignment.AT_LEAST_ONCE, None
        if overtakes and not final:
            return Alignment.UNALIGNED, None
        if not self._config.unaligned or final:
            return Alignment.ALIGNED, None
        timeout_ms = self._config.aligned_timeout_ms
        return (Alignment.ALIGNED, timeout_ms) if timeout_ms else (Alignment.UNALIGNED, None)
