"""The rules of a job's life. No I/O, no threads, no clock.

Slots are submitted, say Hello, are heard of, are lost, and end; the job drains, fails, and comes to its end. What a
loss leads to, and when tasks start, is its mode's: `ftlayer.runtime.driver.rules.job_rules`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, assert_never

from ftlayer.common.rules.restart import (
    RestartStrategy,
    gave_up,
    lasting_in_text,
    note_success,
    pause_after,
    restart_of,
)
from ftlayer.config import TopologyOptions
from ftlayer.errors import FTLayerError, JobStartError, SlotLostError, error_for_code
from ftlayer.runtime.driver.rules import events
from ftlayer.runtime.driver.rules.events import (
    Crew,
    SlotRecord,
    never_works,
    not_up,
    reason_of,
    with_spark_error,
)
from ftlayer.runtime.driver.rules.job_rules import (
    FailureNoted,
    JobMode,
    LossesForgiven,
    ModeInstruction,
    Own,
    StopJob,
    failed,
)
from ftlayer.runtime.driver.rules.job_status import IsolationStatus
from ftlayer.runtime.protocol import messages
from ftlayer.vertex.calls.jobs import Incident

KEPT = 50


class Incidents:
    """Of one execution. Times are of one monotone clock (ms). ``news`` are those that nobody has taken out there."""

    def __init__(self) -> None:
        self._last: deque[Incident] = deque(maxlen=KEPT)
        self.news: list[Incident] = []
        self._state = events.JobState.STARTING
        self._restarts: dict[int, int] = {}
        self._lost = ""

    def loss(self, text: str, now_ms: int, slot: int = -1) -> None:
        """Something failed. What is said twice in a row is one failure that two have heard of."""
        if text != self._lost:
            self._lost = text
            self.add("loss", text, now_ms, slot)

    def add(self, kind: str, text: str, now_ms: int, slot: int = -1) -> None:
        self._last.append(Incident(now_ms, kind, text, slot))
        self.news.append(self._last[-1])

    def look(
        self, state: events.JobState, slots: Sequence[SlotRecord], reason: str, restarts: int, now_ms: int
    ) -> None:
        """See what has changed; ``reason`` is the last failure, "" for none, ``restarts`` how many there were."""
        for slot in slots:
            if slot.restarts > self._restarts.get(slot.number, 0):
                self._restarts[slot.number] = slot.restarts
                self._lost = ""
                text = f"slot {slot.number} is started again ({slot.restarts}) {slot.again}".rstrip()
                self.add("restart", text, now_ms, slot.number)
        if state is not self._state:
            why = (
                f": {reason}"
                if reason and state in (events.JobState.RECOVERING, events.JobState.FAILED)
                else ""
            )
            if self._state is events.JobState.RECOVERING and state is events.JobState.RUNNING:
                why = f": runs again, restart {restarts}"
            self.add("state", f"{self._state} → {state}{why}", now_ms)
            self._state = state

    def at(self, offset_ms: int) -> tuple[Incident, ...]:
        return tuple(replace(incident, at_ms=incident.at_ms + offset_ms) for incident in self._last)


# A slot that has never come up is tried a few times: its reason is the machine's or the plan's.
START_ATTEMPTS = 2
# All that Spark says of a Python process that has ended in whatever way.
PROCESS_GONE = "Python worker exited unexpectedly"
# How long a cancelled Spark job may take to end (ms): Spark kills a Python worker after 2 s.
CANCEL_GRACE_MS = 10_000


class Upkeep:
    """Submits slots that have neither a Spark job nor an instance."""

    def __init__(self, options: TopologyOptions, restart: RestartStrategy) -> None:
        self._options = options
        self._restart = restart
        self._fresh = copy.deepcopy(restart)

    def forgive(self) -> None:
        self._restart = copy.deepcopy(self._fresh)

    def works(self) -> None:
        note_success(self._restart)

    def submit(self, slot: SlotRecord, now_ms: int) -> list[events.JobInstruction]:
        slot.attempt += 1
        slot.submitted, slot.cancelled, slot.submit_at_ms, slot.lost_ms = True, False, None, None
        slot.patience_ms = now_ms + self._options.start_timeout_ms
        return [events.SubmitSlot(slot.number, slot.attempt)]

    def cancel(self, slot: SlotRecord, now_ms: int) -> list[events.JobInstruction]:
        slot.cancelled = True
        slot.patience_ms = now_ms + CANCEL_GRACE_MS
        return [events.CancelSlot(slot.number, slot.attempt)] if slot.submitted else []

    def ended(self, slot: SlotRecord, event: events.SparkJobEnded) -> FTLayerError | None:
        """The slot's Spark job has ended; return an error if there is no use in another one."""
        slot.submitted = slot.cancelled = False
        slot.spark_error = event.error
        # That the process of a slot that is lost is gone is no news.
        is_news = not (slot.was_lost and PROCESS_GONE in (event.error or ""))
        if slot.hello is None and event.error is not None and is_news:
            slot.failure = with_spark_error(slot.failure or f"slot {slot.number}", event.error)
            final = lasting_in_text(event.error)
            if final is not None:
                return type(final)(f"{event.needed_by}: {final}") if event.needed_by else final
        if slot.greeted:
            return None
        slot.failed_starts += 1
        if slot.failed_starts < START_ATTEMPTS:
            return None
        reason = slot.failure or (
            f"slot {slot.number}: its process ended before it had reached the driver; the log of the executor "
            "has its last words"
        )
        return JobStartError(f"a slot cannot start, {START_ATTEMPTS} attempts failed. {reason}")

    def keep_up(
        self, slot: SlotRecord, now_ms: int, restarts: int
    ) -> list[events.JobInstruction] | FTLayerError:
        """Return what is due for a slot without an instance, or an error if it is given up."""
        if slot.submitted:
            if now_ms < slot.patience_ms:
                return []
            if not slot.cancelled:
                return self.cancel(slot, now_ms)
            slot.submitted = False  # it does not answer; its successor fences it
        if slot.submit_at_ms is None:
            pause = 0 if slot.revived or slot.excused else pause_after(self._restart, now_ms)
            if pause is None:
                return SlotLostError(gave_up(restarts, slot.failure))
            slot.again = restart_of(self._restart, pause) if pause > 1 else ""
            slot.revived = slot.excused = False
            slot.start_again()
            # Spark takes its time to say that a job has ended whose process is gone: part of the pause is over.
            slot.submit_at_ms = (now_ms if slot.lost_ms is None else slot.lost_ms) + pause
        return self.submit(slot, now_ms) if now_ms >= slot.submit_at_ms else []


# How long slots have to end by themselves (ms) before their Spark jobs are cancelled.
STOP_GRACE_MS = 5_000
# Cancelling is repeated (ms): a job that was being submitted cannot be cancelled yet.
CANCEL_AGAIN_MS = 1_000


class Stopping:
    def __init__(self, verdict: events.Over, slots: Sequence[SlotRecord], now_ms: int) -> None:
        self.verdict = verdict
        self.over = False
        self._slots = slots
        self._since_ms = self._cancelled_ms = now_ms

    def begin(self, reason: str) -> list[events.JobInstruction]:
        instructions: list[events.JobInstruction] = []
        for slot in self._slots:
            if slot.hello is None:
                if slot.submitted:
                    instructions.append(events.CancelSlot(slot.number, slot.attempt))
            elif not slot.ended:
                instructions.append(events.SendTo(slot.number, slot.hello.instance, messages.Cancel(reason)))
        return instructions

    def advance(self, now_ms: int) -> list[events.JobInstruction]:
        """End what has not ended. It is `over` once no Spark job is left, or one cannot be ended."""
        stuck = [slot for slot in self._slots if slot.submitted]
        if not stuck or now_ms - self._since_ms >= STOP_GRACE_MS + CANCEL_GRACE_MS:
            self.over = True
        elif now_ms - self._cancelled_ms >= CANCEL_AGAIN_MS:
            self._cancelled_ms = now_ms
            late = now_ms - self._since_ms >= STOP_GRACE_MS
            return [
                events.CancelSlot(slot.number, slot.attempt) for slot in stuck if late or slot.hello is None
            ]
        return []


# While a slot has no instance, the Spark session is asked for this often (ms): Spark itself may not tell that it is
# gone. (A client of Spark Connect tries to reach its server for ten minutes.)
ASK_SESSION_MS = 5_000
# Spark is waited for this long (ms) to say which of the slots that are not up it has started.
COUNT_TASKS_MS = 5_000


class JobCore(Generic[Own]):
    """The state of one execution of a job. Times are of one monotone clock (ms).

    What an instance says that is not the connected one of its slot is not listened to. Each event changes what is
    known; then whatever has become possible is done, so that the order of events does not matter.
    """

    def __init__(self, crew: Crew, options: TopologyOptions, mode: JobMode[Own]) -> None:
        """``mode`` shares ``crew``, and is of this job alone."""
        self._crew = crew
        self._options = options
        self._mode = mode
        self.slots = crew.slots
        self.last_failure = ""
        self.incidents = Incidents()
        self._counting_since_ms: int | None = None
        self._end: Stopping | None = None
        self._started_ms = self._last_ms = self._asked_session_ms = 0
        self._upkeep = Upkeep(options, mode.slot_restart)

    @property
    def epoch(self) -> int:
        return self._mode.epoch

    @property
    def restarts(self) -> int:
        return self._mode.restarts

    @property
    def isolation(self) -> IsolationStatus | None:
        return self._mode.isolation

    @property
    def error(self) -> FTLayerError | None:
        """What the job fails with, as soon as that is certain; None otherwise."""
        return None if self._end is None else self._end.verdict.error

    @property
    def state(self) -> events.JobState:
        if self._end is not None:
            return self._end.verdict.state if self._end.over else events.JobState.STOPPING
        if not self._mode.has_begun:
            return self._mode.state or events.JobState.STARTING
        if self._mode.is_ending:
            return events.JobState.ENDING
        if not (self._mode.is_complete and self._crew.all_started):
            return events.JobState.RECOVERING if self._mode.was_lost else events.JobState.INITIALIZING
        return self._mode.state or (
            events.JobState.DRAINING if self._crew.draining else events.JobState.RUNNING
        )

    def validate(self) -> None:
        """Raise `AssertionError` if what is known does not fit together; for tests."""
        self._crew.validate()
        if not self.is_stopping:
            self._mode.validate()

    def start(self, now_ms: int) -> list[events.JobInstruction | Own]:
        """Begin: find out what there is to go on with, and submit the slots."""
        self._started_ms = self._last_ms = self._asked_session_ms = now_ms
        begun = self._carried_out(self._mode.begin(), now_ms)
        return [*begun, *(each for slot in self.slots for each in self._upkeep.submit(slot, now_ms))]

    def handle(self, event: events.Event, now_ms: int) -> list[events.JobInstruction | Own]:
        if self._end is not None and self._end.over:
            return []
        self._mind_the_gap(now_ms)
        instructions = [*self._happened(event, now_ms), *self._advance(now_ms)]
        self.incidents.look(self.state, self.slots, self.last_failure, self.restarts, now_ms)
        return instructions

    def _happened(self, event: events.Event, now_ms: int) -> Sequence[events.JobInstruction | Own]:
        match event:
            case events.Said():
                return self._said(self.slots[event.slot], event.instance, event.message, now_ms)
            case events.Broke():
                slot = self.slots[event.slot]
                if slot.is_instance(event.instance) and not slot.ended:
                    return self._lose(slot, event.reason, now_ms)
                return []
            case events.SparkJobEnded():
                return self._spark_job_ended(self.slots[event.slot], event, now_ms)
            case events.CancelRequested():
                return self._stop(events.Over(events.JobState.CANCELLED), event.reason, now_ms)
            case events.DrainRequested():
                return [] if self.is_stopping else self._crew.drain()
            case events.TasksCounted():
                return self._end_late(event.counts, now_ms)
            case events.SessionOver():
                return self._session_over(event.error, now_ms)
            case events.Broken():
                return self._fail(event.error, now_ms)
            case events.Tick():
                return [*self._check_silence(now_ms), *self._told(event, now_ms)]
            case events.RestoreReady(gone_back=text) if text:
                self.incidents.add("restore", text, now_ms)
                return self._told(event, now_ms)
            case (
                events.StatusKnown()
                | events.RecallDone()
                | events.Condemned()
                | events.RestartRequested()
                | events.RestoreReady()
                | events.RestoreFailed()
                | events.CheckpointComplete()
                | events.EndTasksRequested()
            ):
                return self._told(event, now_ms)
            case _:
                assert_never(event)

    def _told(self, event: events.Event, now_ms: int) -> Sequence[events.JobInstruction | Own]:
        return [] if self.is_stopping else self._carried_out(self._mode.handle(event, now_ms), now_ms)

    def _heard(
        self, slot: SlotRecord, message: messages.FromSlot, now_ms: int
    ) -> Sequence[events.JobInstruction | Own]:
        return [] if self.is_stopping else self._carried_out(self._mode.heard(slot, message, now_ms), now_ms)

    def _carried_out(
        self, instructions: Sequence[ModeInstruction[Own]], now_ms: int
    ) -> Sequence[events.JobInstruction | Own]:
        """Carry out what a mode wants of this class, and return what is to be done for it by others."""
        return [each for instruction in instructions for each in self._carry_out(instruction, now_ms)]

    def _carry_out(
        self, instruction: ModeInstruction[Own], now_ms: int
    ) -> Sequence[events.JobInstruction | Own]:
        match instruction:
            case StopJob(verdict, reason):
                return self._stop(verdict, reason, now_ms)
            case FailureNoted(reason, again, ended_itself):
                how = reason.partition(": ")[2]
                if not (ended_itself and any(how in slot.loss for slot in self.slots)):
                    self._note(reason, now_ms)
                if again:
                    self.incidents.add("restart", again, now_ms)
            case LossesForgiven():
                self._upkeep.forgive()
            case _:
                return [instruction]
        return []

    def _said(
        self, slot: SlotRecord, instance: str, message: messages.FromSlot, now_ms: int
    ) -> Sequence[events.JobInstruction | Own]:
        if isinstance(message, messages.Hello):
            return self._hello(slot, message, now_ms)
        if not slot.is_instance(instance):
            return self._said_by_another(slot, message, now_ms)
        slot.heard_ms = now_ms
        match message:
            case messages.SlotFailed(code=code) if code:
                return self._fail(error_for_code(code)(message.reason), now_ms)
            case messages.SlotFailed(lasting=True) if self._mode.never_ran:
                # It takes no records yet, or no checkpoint.
                return self._fail(never_works(slot.number, message), now_ms)
            case messages.SlotFailed():
                return self._lose(slot, reason_of(message), now_ms, message.operator, silent=False)
            case messages.TasksStarted():
                slot.started = slot.deployed
            case messages.SourceFailed():
                self._note(f"slot {slot.number}: {message.reason}", now_ms, slot.number)
            case messages.Heartbeat():
                slot.heartbeat = message
                if messages.has_worked(message.counters):
                    self._upkeep.works()
                return self._heard(slot, message, now_ms)
            case messages.SlotEnded():
                slot.ended = slot.deployed
                return self._heard(slot, message, now_ms)
            case _:
                return self._heard(slot, message, now_ms)
        return []

    def _said_by_another(
        self, slot: SlotRecord, message: messages.FromSlot, now_ms: int
    ) -> Sequence[events.JobInstruction | Own]:
        """An instance that has not said Hello may say why it cannot; others are not listened to."""
        if not isinstance(message, messages.SlotFailed) or slot.hello is not None or self.is_stopping:
            return []
        slot.failure = f"slot {slot.number}: {reason_of(message)}"
        self._note(slot.failure, now_ms, slot.number)
        return self._fail(error_for_code(message.code)(message.reason), now_ms) if message.code else []

    def _hello(
        self, slot: SlotRecord, hello: messages.Hello, now_ms: int
    ) -> Sequence[events.JobInstruction | Own]:
        if self.is_stopping or slot.ended:
            return [
                events.SendTo(
                    slot.number, hello.instance, messages.Cancel("the job does not need it any more")
                )
            ]
        instructions: list[events.JobInstruction | Own] = []
        if slot.hello is not None:
            instructions += self._crew.tell(slot, messages.Cancel("another process has taken its place"))
            instructions += self._lose(slot, "another process took its place", now_ms)
            if self._end is not None:
                return instructions
        slot.connect(hello, now_ms)
        slot.submit_at_ms = slot.lost_ms = None
        return [*instructions, *self._heard(slot, hello, now_ms)]

    def _spark_job_ended(
        self, slot: SlotRecord, event: events.SparkJobEnded, now_ms: int
    ) -> Sequence[events.JobInstruction | Own]:
        if event.attempt != slot.attempt:
            return []
        if self.is_stopping:
            slot.submitted = False
            return []
        error = self._upkeep.ended(slot, event)
        if event.error is not None and slot.hello is None:
            slot.loss = slot.failure
            self._note(slot.failure, now_ms, slot.number)
        return [] if error is None else self._fail(error, now_ms)

    def _check_silence(self, now_ms: int) -> Sequence[events.JobInstruction | Own]:
        limit = self._options.heartbeat_timeout_ms
        instructions: list[events.JobInstruction | Own] = []
        for slot in () if self.is_stopping else self.slots:
            if slot.running and now_ms - slot.heard_ms >= limit:
                instructions += self._lose(slot, f"it was not heard of for {limit} ms", now_ms)
                instructions += self._upkeep.cancel(slot, now_ms)
        return instructions

    def _lose(
        self, slot: SlotRecord, reason: str, now_ms: int, operator: str = "", *, silent: bool = True
    ) -> Sequence[events.JobInstruction | Own]:
        was_deployed, alone = slot.deployed, self._crew.all_deployed
        busy = "" if slot.heartbeat is None else slot.heartbeat.busy
        instance = "" if slot.hello is None else slot.hello.instance
        which = (
            f" (process {slot.hello.pid} on {slot.hello.host})" if slot.hello is not None and silent else ""
        )
        self._crew.drop(slot, now_ms)
        if self.is_stopping:
            return []
        slot.failure = with_spark_error(f"slot {slot.number}{which}: {reason}", slot.spark_error)
        self._note(slot.failure, now_ms, slot.number)
        if not was_deployed:
            self._mode.lost_before()
            return []
        slot.loss, slot.loss_in = slot.failure, operator or busy
        slot.lost_instance, slot.death = instance, None
        slot.was_lost, slot.silent = True, silent
        return self._carried_out(self._mode.lost(slot, now_ms, alone=alone), now_ms)

    def _note(self, failure: str, now_ms: int, slot: int = -1) -> None:
        self.last_failure = failure
        self.incidents.loss(failure, now_ms, slot)

    def _advance(self, now_ms: int) -> Sequence[events.JobInstruction | Own]:
        instructions = [*self._mind_the_session(now_ms)]
        if not self.is_stopping:
            instructions += self._keep_slots_up(now_ms)
        if not self.is_stopping:
            instructions += self._carried_out(self._mode.go_on(now_ms), now_ms)
        if self._end is not None:
            instructions += self._end.advance(now_ms)
            if self._end.over:
                instructions += [*self._mode.last_wish(self._end.verdict), self._end.verdict]
        return instructions

    def _keep_slots_up(self, now_ms: int) -> Sequence[events.JobInstruction | Own]:
        instructions = [*self._mind_the_start(now_ms)]
        for slot in self.slots:
            if slot.hello is None and not self.is_stopping:
                due = self._upkeep.keep_up(slot, now_ms, self.restarts)
                instructions += (
                    due if isinstance(due, list) else self._fail(self._mode.explained(due), now_ms)
                )
        return instructions

    def _mind_the_start(self, now_ms: int) -> Sequence[events.JobInstruction | Own]:
        """Where slots are not up in time, ask Spark which of them it has started: the error says so."""
        if self._is_late(now_ms):
            if self._counting_since_ms is None:
                self._counting_since_ms = now_ms
                return [events.CountTasks()]
            if now_ms - self._counting_since_ms >= COUNT_TASKS_MS:
                return self._end_late(None, now_ms)
        return []

    def _is_late(self, now_ms: int) -> bool:
        late = not self._mode.has_begun and now_ms - self._started_ms >= self._options.start_timeout_ms
        return late and not all(slot.hello for slot in self.slots)

    def _end_late(
        self, counts: events.TaskCounts | None, now_ms: int
    ) -> Sequence[events.JobInstruction | Own]:
        if not self._is_late(now_ms) or self.is_stopping:
            return []
        return self._fail(not_up(self.slots, self._options.start_timeout_ms, counts), now_ms)

    def _mind_the_session(self, now_ms: int) -> Sequence[events.JobInstruction | Own]:
        """Ask for the session where a slot has no instance, or a Spark job does not end: it may be gone."""
        missing = any(slot.hello is None and not slot.ended for slot in self.slots)
        if (missing or self.is_stopping) and now_ms - self._asked_session_ms >= ASK_SESSION_MS:
            self._asked_session_ms = now_ms
            return [events.AskSession()]
        return []

    def _session_over(self, error: FTLayerError, now_ms: int) -> Sequence[events.JobInstruction | Own]:
        for slot in self.slots:
            # No message will say that it has ended.
            slot.submitted = False
        return self._fail(error, now_ms)

    @property
    def is_stopping(self) -> bool:
        """Whether the job comes to its end: its slots are told to, or have."""
        return self._end is not None

    def _fail(self, error: FTLayerError, now_ms: int) -> Sequence[events.JobInstruction | Own]:
        return self._carry_out(failed(error), now_ms)

    def _stop(self, verdict: events.Over, reason: str, now_ms: int) -> Sequence[events.JobInstruction | Own]:
        if verdict.error is not None:
            self.last_failure = str(verdict.error)
        if self._end is not None:
            return []
        self._end = Stopping(verdict, self.slots, now_ms)
        return self._end.begin(reason)

    def _mind_the_gap(self, now_ms: int) -> None:
        """Where the driver itself stood still, silence says nothing of the slots: give them the time back."""
        gap = now_ms - self._last_ms
        self._last_ms = now_ms
        if gap >= self._options.heartbeat_timeout_ms // 2:
            for slot in self.slots:
                slot.heard_ms += gap
