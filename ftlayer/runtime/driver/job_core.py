"""The rules of a job's life. No I/O, no threads, no clock.

Slots are submitted, say Hello, are heard of, are lost, and end; the job drains, fails, and comes to its end. What a
loss leads to, and when tasks start, is its mode's: `ftlayer.runtime.driver.mode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, assert_never

from ftlayer.config import TopologyOptions
from ftlayer.errors import FTLayerError, error_for_code
from ftlayer.runtime.driver.crew import Crew
from ftlayer.runtime.driver.events import (
    AskSession,
    Broke,
    Broken,
    CancelRequested,
    CheckpointComplete,
    Condemned,
    CountTasks,
    DrainRequested,
    EndTasksRequested,
    Event,
    JobInstruction,
    JobState,
    Over,
    RecallDone,
    RestartRequested,
    RestoreFailed,
    RestoreReady,
    Said,
    SendTo,
    SessionOver,
    SparkJobEnded,
    StatusKnown,
    TaskCounts,
    TasksCounted,
    Tick,
)
from ftlayer.runtime.driver.incidents import Incidents
from ftlayer.runtime.driver.job_status import IsolationStatus
from ftlayer.runtime.driver.mode import (
    FailureNoted,
    JobMode,
    LossesForgiven,
    ModeInstruction,
    Own,
    StopJob,
    failed,
)
from ftlayer.runtime.driver.reasons import never_works, not_up, reason_of, with_spark_error
from ftlayer.runtime.driver.slot_record import SlotRecord
from ftlayer.runtime.driver.stopping import Stopping
from ftlayer.runtime.driver.upkeep import Upkeep
from ftlayer.runtime.protocol.messages import (
    Cancel,
    FromSlot,
    Heartbeat,
    Hello,
    SlotEnded,
    SlotFailed,
    SourceFailed,
    TasksStarted,
)

# While a slot has no instance, the Spark session is asked for this often (ms): Spark itself may not tell that it is
# gone. (A client of Spark Connect tries to reach its server for ten minutes.)
ASK_SESSION_MS = 5_000
# Spark is waited for this long (ms) to say which of the slots that are not up it has started.
COUNT_TASKS_MS = 5_000


class JobCore(Generic[Own]):
    """The state of one execution of a job. Times are of one monotone clock (ms).

    What an instance says that is not the connected one of its slot is not listened to. Each event changes what is
    known; then whatever has become possible is done, so that the order of events does not matter.

    Attributes:
        slots: what is known of each.
        last_failure: as a text, "" for none yet.
        incidents: what has happened.
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

    # ------------------------------------------------------------ views

    @property
    def epoch(self) -> int:
        """How often tasks were told to begin anew."""
        return self._mode.epoch

    @property
    def restarts(self) -> int:
        """How often something that ran was started again, as the restart strategy counts it."""
        return self._mode.restarts

    @property
    def isolation(self) -> IsolationStatus | None:
        """How far the search for a record that ends processes is; None while there is none."""
        return self._mode.isolation

    @property
    def error(self) -> FTLayerError | None:
        """What the job fails with, as soon as that is certain; None otherwise."""
        return None if self._end is None else self._end.verdict.error

    @property
    def state(self) -> JobState:
        if self._end is not None:
            return self._end.verdict.state if self._end.over else JobState.STOPPING
        if not self._mode.has_begun:
            return self._mode.state or JobState.STARTING
        if self._mode.is_ending:
            return JobState.ENDING
        if not (self._mode.is_complete and self._crew.all_started):
            return JobState.RECOVERING if self._mode.was_lost else JobState.INITIALIZING
        return self._mode.state or (JobState.DRAINING if self._crew.draining else JobState.RUNNING)

    def validate(self) -> None:
        """Raise `AssertionError` if what is known does not fit together; for tests, behind each event."""
        self._crew.validate()
        if not self._stopping():
            self._mode.validate()

    # ------------------------------------------------------------ from outside

    def start(self, now_ms: int) -> list[JobInstruction | Own]:
        """Begin: find out what there is to go on with, and submit the slots."""
        self._started_ms = self._last_ms = self._asked_session_ms = now_ms
        begun = self._carried_out(self._mode.begin(), now_ms)
        return [*begun, *(each for slot in self.slots for each in self._upkeep.submit(slot, now_ms))]

    def handle(self, event: Event, now_ms: int) -> list[JobInstruction | Own]:
        """Take one event and return what is to be done, in order."""
        if self._end is not None and self._end.over:
            return []
        self._mind_the_gap(now_ms)
        instructions = [*self._happened(event, now_ms), *self._advance(now_ms)]
        self.incidents.look(self.state, self.slots, self.last_failure, now_ms)
        return instructions

    def _happened(self, event: Event, now_ms: int) -> Sequence[JobInstruction | Own]:
        match event:
            case Said():
                return self._said(self.slots[event.slot], event.instance, event.message, now_ms)
            case Broke():
                slot = self.slots[event.slot]
                if slot.is_instance(event.instance) and not slot.ended:
                    return self._lose(slot, event.reason, now_ms)
                return []
            case SparkJobEnded():
                return self._spark_job_ended(self.slots[event.slot], event, now_ms)
            case CancelRequested():
                return self._stop(Over(JobState.CANCELLED), event.reason, now_ms)
            case DrainRequested():
                return [] if self._stopping() else self._crew.drain()
            case TasksCounted():
                return self._end_late(event.counts, now_ms)
            case SessionOver():
                return self._session_over(event.error, now_ms)
            case Broken():
                return self._fail(event.error, now_ms)
            case Tick():
                return [*self._check_silence(now_ms), *self._told(event, now_ms)]
            case (
                StatusKnown()
                | RecallDone()
                | Condemned()
                | RestartRequested()
                | RestoreReady()
                | RestoreFailed()
                | CheckpointComplete()
                | EndTasksRequested()
            ):
                return self._told(event, now_ms)
            case _:
                assert_never(event)

    # ------------------------------------------------------------ the mode

    def _told(self, event: Event, now_ms: int) -> Sequence[JobInstruction | Own]:
        return [] if self._stopping() else self._carried_out(self._mode.handle(event, now_ms), now_ms)

    def _heard(self, slot: SlotRecord, message: FromSlot, now_ms: int) -> Sequence[JobInstruction | Own]:
        return [] if self._stopping() else self._carried_out(self._mode.heard(slot, message, now_ms), now_ms)

    def _carried_out(
        self, instructions: Sequence[ModeInstruction[Own]], now_ms: int
    ) -> Sequence[JobInstruction | Own]:
        """Carry out what a mode wants of this class, and return what is to be done for it by others."""
        return [each for instruction in instructions for each in self._carry_out(instruction, now_ms)]

    def _carry_out(self, instruction: ModeInstruction[Own], now_ms: int) -> Sequence[JobInstruction | Own]:
        match instruction:
            case StopJob(verdict, reason):
                return self._stop(verdict, reason, now_ms)
            case FailureNoted(reason):
                self._note(reason, now_ms)
            case LossesForgiven():
                self._upkeep.forgive()
            case _:
                return [instruction]
        return []

    # ------------------------------------------------------------ what slots say

    def _said(
        self, slot: SlotRecord, instance: str, message: FromSlot, now_ms: int
    ) -> Sequence[JobInstruction | Own]:
        if isinstance(message, Hello):
            return self._hello(slot, message, now_ms)
        if not slot.is_instance(instance):
            return self._said_by_another(slot, message, now_ms)
        slot.heard_ms = now_ms
        match message:
            case SlotFailed(code=code) if code:
                return self._fail(error_for_code(code)(message.reason), now_ms)
            case SlotFailed(lasting=True) if (
                self._mode.never_ran
            ):  # it takes no records yet, or no checkpoint
                return self._fail(never_works(slot.number, message), now_ms)
            case SlotFailed():
                return self._lose(slot, reason_of(message), now_ms, message.operator, silent=False)
            case TasksStarted():
                slot.started = slot.deployed
            case SourceFailed():
                self._note(f"slot {slot.number}: {message.reason}", now_ms, slot.number)
            case Heartbeat():
                slot.heartbeat = message
                if any(count for name, count in message.counters.items() if name.startswith("records_in/")):
                    self._upkeep.works()
                return self._heard(slot, message, now_ms)
            case SlotEnded():
                slot.ended = slot.deployed
                return self._heard(slot, message, now_ms)
            case _:
                return self._heard(slot, message, now_ms)
        return []

    def _said_by_another(
        self, slot: SlotRecord, message: FromSlot, now_ms: int
    ) -> Sequence[JobInstruction | Own]:
        """An instance that has not said Hello may say why it cannot; others are not listened to."""
        if not isinstance(message, SlotFailed) or slot.hello is not None or self._stopping():
            return []
        slot.failure = f"slot {slot.number}: {reason_of(message)}"
        self._note(slot.failure, now_ms, slot.number)
        return self._fail(error_for_code(message.code)(message.reason), now_ms) if message.code else []

    def _hello(self, slot: SlotRecord, hello: Hello, now_ms: int) -> Sequence[JobInstruction | Own]:
        if self._stopping() or slot.ended:
            return [SendTo(slot.number, hello.instance, Cancel("the job does not need it any more"))]
        instructions: list[JobInstruction | Own] = []
        if slot.hello is not None:
            instructions += self._crew.tell(slot, Cancel("another process has taken its place"))
            instructions += self._lose(slot, "another process took its place", now_ms)
            if self._stopping():
                return instructions
        slot.connect(hello, now_ms)
        slot.submit_at_ms = slot.lost_ms = None
        return [*instructions, *self._heard(slot, hello, now_ms)]

    def _spark_job_ended(
        self, slot: SlotRecord, event: SparkJobEnded, now_ms: int
    ) -> Sequence[JobInstruction | Own]:
        if event.attempt != slot.attempt:
            return []
        if self._stopping():
            slot.submitted = False
            return []
        error = self._upkeep.ended(slot, event)
        if event.error is not None and slot.hello is None:
            slot.loss = slot.failure
            self._note(slot.failure, now_ms, slot.number)
        return [] if error is None else self._fail(error, now_ms)

    # ------------------------------------------------------------ losses

    def _check_silence(self, now_ms: int) -> Sequence[JobInstruction | Own]:
        limit = self._options.heartbeat_timeout_ms
        instructions: list[JobInstruction | Own] = []
        for slot in () if self._stopping() else self.slots:
            if slot.running and now_ms - slot.heard_ms >= limit:
                instructions += self._lose(slot, f"it was not heard of for {limit} ms", now_ms)
                instructions += self._upkeep.cancel(slot, now_ms)
        return instructions

    def _lose(
        self, slot: SlotRecord, reason: str, now_ms: int, operator: str = "", *, silent: bool = True
    ) -> Sequence[JobInstruction | Own]:
        was_deployed, alone = slot.deployed, self._crew.all_deployed
        busy = "" if slot.heartbeat is None else slot.heartbeat.busy
        self._crew.drop(slot, now_ms)
        if self._stopping():
            return []
        slot.failure = with_spark_error(f"slot {slot.number}: {reason}", slot.spark_error)
        self._note(slot.failure, now_ms, slot.number)
        if not was_deployed:
            self._mode.lost_before()
            return []
        slot.loss, slot.loss_in = slot.failure, operator or busy
        slot.was_lost, slot.silent = True, silent
        return self._carried_out(self._mode.lost(slot, now_ms, alone=alone), now_ms)

    def _note(self, failure: str, now_ms: int, slot: int = -1) -> None:
        self.last_failure = failure
        self.incidents.loss(failure, now_ms, slot)

    # ------------------------------------------------------------ going on

    def _advance(self, now_ms: int) -> Sequence[JobInstruction | Own]:
        instructions = [*self._mind_the_session(now_ms)]
        if not self._stopping():
            instructions += self._keep_slots_up(now_ms)
        if not self._stopping():
            instructions += self._carried_out(self._mode.go_on(now_ms), now_ms)
        if self._end is not None:
            instructions += self._end.advance(now_ms)
            if self._end.over:
                instructions += [*self._mode.last_wish(self._end.verdict), self._end.verdict]
        return instructions

    def _keep_slots_up(self, now_ms: int) -> Sequence[JobInstruction | Own]:
        instructions = [*self._mind_the_start(now_ms)]
        for slot in self.slots:
            if slot.hello is None and not self._stopping():
                due = self._upkeep.keep_up(slot, now_ms)
                instructions += (
                    due if isinstance(due, list) else self._fail(self._mode.explained(due), now_ms)
                )
        return instructions

    def _mind_the_start(self, now_ms: int) -> Sequence[JobInstruction | Own]:
        """Where slots are not up in time, ask Spark which of them it has started: the error says so."""
        if self._is_late(now_ms):
            if self._counting_since_ms is None:
                self._counting_since_ms = now_ms
                return [CountTasks()]
            if now_ms - self._counting_since_ms >= COUNT_TASKS_MS:
                return self._end_late(None, now_ms)
        return []

    def _is_late(self, now_ms: int) -> bool:
        late = not self._mode.has_begun and now_ms - self._started_ms >= self._options.start_timeout_ms
        return late and not all(slot.hello for slot in self.slots)

    def _end_late(self, counts: TaskCounts | None, now_ms: int) -> Sequence[JobInstruction | Own]:
        if not self._is_late(now_ms) or self._stopping():
            return []
        return self._fail(not_up(self.slots, self._options.start_timeout_ms, counts), now_ms)

    def _mind_the_session(self, now_ms: int) -> Sequence[JobInstruction | Own]:
        """Ask for the session where a slot has no instance, or a Spark job does not end: it may be gone."""
        missing = any(slot.hello is None and not slot.ended for slot in self.slots)
        if (missing or self._stopping()) and now_ms - self._asked_session_ms >= ASK_SESSION_MS:
            self._asked_session_ms = now_ms
            return [AskSession()]
        return []

    def _session_over(self, error: FTLayerError, now_ms: int) -> Sequence[JobInstruction | Own]:
        for slot in self.slots:
            # No message will say that it has ended.
            slot.submitted = False
        return self._fail(error, now_ms)

    # ------------------------------------------------------------ coming to an end

    @property
    def is_stopping(self) -> bool:
        """Whether the job comes to its end: its slots are told to, or have."""
        return self._stopping()

    def _fail(self, error: FTLayerError, now_ms: int) -> Sequence[JobInstruction | Own]:
        return self._carry_out(failed(error), now_ms)

    def _stop(self, verdict: Over, reason: str, now_ms: int) -> Sequence[JobInstruction | Own]:
        if verdict.error is not None:
            self.last_failure = str(verdict.error)
        if self._end is not None:
            return []
        self._end = Stopping(verdict, self.slots, now_ms)
        return self._end.begin(reason)

    def _stopping(self) -> bool:
        return self._end is not None

    def _mind_the_gap(self, now_ms: int) -> None:
        """Where the driver itself stood still, silence says nothing of the slots: give them the time back."""
        gap = now_ms - self._last_ms
        self._last_ms = now_ms
        if gap >= self._options.heartbeat_timeout_ms // 2:
            for slot in self.slots:
                slot.heard_ms += gap
