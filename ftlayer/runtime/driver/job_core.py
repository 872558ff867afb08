"""The coordinator's rules that both modes share. No I/O, no threads, no clock.

Slots are submitted, say Hello, are heard of, are lost, and end; the job drains, fails, and comes to its end. What a
loss leads to, and when tasks start, is `ftlayer.runtime.acker_mode.driver.core`'s and `barrier_core`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ftlayer.config import TopologyOptions
from ftlayer.errors import FTLayerError, error_for_code
from ftlayer.restart import RestartStrategy
from ftlayer.runtime.driver.crew import Crew
from ftlayer.runtime.driver.events import (
    AskSession,
    Broke,
    Broken,
    CancelRequested,
    CountTasks,
    Decision,
    DrainRequested,
    Event,
    JobState,
    Over,
    Said,
    SendTo,
    SessionOver,
    SparkJobEnded,
    TaskCounts,
    TasksCounted,
    Tick,
)
from ftlayer.runtime.driver.job_status import IsolationStatus
from ftlayer.runtime.driver.reasons import never_works, not_up, reason_of, with_spark_error
from ftlayer.runtime.driver.slot_record import SlotRecord
from ftlayer.runtime.driver.stopping import Stopping
from ftlayer.runtime.driver.upkeep import Upkeep
from ftlayer.runtime.protocol.messages import (
    Cancel,
    FromSlot,
    Heartbeat,
    Hello,
    SlotFailed,
    SourceFailed,
    StopSources,
    TasksStarted,
)

# While a slot has no instance, the Spark session is asked for this often (ms): Spark itself may not tell that it is
# gone. (A client of Spark Connect tries to reach its server for ten minutes.)
ASK_SESSION_MS = 5_000
# Spark is waited for this long (ms) to say which of the slots that are not up it has started.
COUNT_TASKS_MS = 5_000


class JobCore(ABC):
    """The state of one execution of a job. Times are of one monotone clock (ms).

    What an instance says that is not the connected one of its slot is not listened to. Each event changes what is
    known; then whatever has become possible is done, so that the order of events does not matter.

    Attributes:
        slots: what is known of each.
        epoch: how often tasks were told to begin anew.
        last_failure: as a text, "" for none yet.
    """

    def __init__(self, slots: int, options: TopologyOptions, restart: RestartStrategy) -> None:
        """``restart`` says when the process of a slot that is lost is replaced."""
        self._options = options
        self._out: list[Decision] = []
        self._crew = Crew(slots, self._out)
        self.slots = self._crew.slots
        self.epoch = 0
        self.last_failure = ""
        self._counting_since_ms: int | None = None
        self._draining = False
        self._ending = False
        self._end: Stopping | None = None
        self._started_ms = self._last_ms = self._asked_session_ms = 0
        self._upkeep = Upkeep(options, restart, self._out)

    # ------------------------------------------------------------ what differs

    @property
    @abstractmethod
    def _has_begun(self) -> bool:
        """Whether all tasks have been told to start."""

    @property
    @abstractmethod
    def restarts(self) -> int:
        """How often something that ran was started again, as the restart strategy counts it."""

    @property
    @abstractmethod
    def _was_lost(self) -> bool:
        """Whether something was lost that ran."""

    @property
    @abstractmethod
    def _is_complete(self) -> bool:
        """Whether no slot is being replaced."""

    def _state_before_it_runs(self) -> JobState:
        """Return where the job is while not all tasks have been told to start."""
        return JobState.STARTING

    def _state_while_it_runs(self) -> JobState | None:
        """Return where the job is, all tasks being up; None if nothing is the matter."""
        return None

    @abstractmethod
    def _begin(self, now_ms: int) -> None:
        """The job begins; the slots are submitted behind this."""

    @abstractmethod
    def _take(self, event: Event, now_ms: int) -> None:
        """Take an event that this class does not know; `Tick` too."""

    @abstractmethod
    def _heard(self, slot: SlotRecord, message: FromSlot, now_ms: int) -> None:
        """The connected instance of a slot says something that is no failure."""

    @property
    @abstractmethod
    def _never_ran(self) -> bool:
        """Whether a failure that its slot says is a lasting one ends the job."""

    @abstractmethod
    def _lost(self, slot: SlotRecord, now_ms: int, *, alone: bool) -> None:
        """An instance is lost that ran; ``alone``: all others were deployed."""

    def _lost_before(self) -> None:  # noqa: B027 - most have nothing to do
        """An instance is lost that is unknown here."""

    def _given_up(self, error: FTLayerError) -> FTLayerError:
        """Return why the job ends when a slot is not submitted any more."""
        return error

    @abstractmethod
    def _go_on(self, now_ms: int) -> None:
        """Do what has become possible: start tasks, look for the end."""

    def _last_wish(self, verdict: Over) -> None:  # noqa: B027 - as above
        """The job is over: add what is to be done before that is said."""

    # ------------------------------------------------------------ from outside

    @property
    def isolation(self) -> IsolationStatus | None:
        """How far the search for a record that ends processes is; None while there is none."""
        return None

    @property
    def error(self) -> FTLayerError | None:
        """What the job fails with, as soon as that is certain; None otherwise."""
        return None if self._end is None else self._end.verdict.error

    @property
    def state(self) -> JobState:
        """Where the job is."""
        if self._end is not None:
            return self._end.verdict.state if self._end.over else JobState.STOPPING
        if not self._has_begun:
            return self._state_before_it_runs()
        if self._ending:
            return JobState.ENDING
        if not (self._is_complete and self._crew.all_started):
            return JobState.RECOVERING if self._was_lost else JobState.INITIALIZING
        return self._state_while_it_runs() or (JobState.DRAINING if self._draining else JobState.RUNNING)

    def start(self, now_ms: int) -> list[Decision]:
        """Begin: find out what there is to go on with, and submit the slots."""
        self._started_ms = self._last_ms = self._asked_session_ms = now_ms
        self._begin(now_ms)
        for slot in self.slots:
            self._upkeep.submit(slot, now_ms)
        return self._decided()

    def handle(self, event: Event, now_ms: int) -> list[Decision]:
        """Take one event and return what is to be done, in order."""
        if self._end is not None and self._end.over:
            return []
        self._mind_the_gap(now_ms)
        match event:
            case Said():
                self._said(self.slots[event.slot], event.instance, event.message, now_ms)
            case Broke():
                slot = self.slots[event.slot]
                if slot.is_instance(event.instance) and not slot.ended:
                    self._lose(slot, event.reason, now_ms)
            case SparkJobEnded():
                self._spark_job_ended(self.slots[event.slot], event, now_ms)
            case CancelRequested():
                self._stop(Over(JobState.CANCELLED), event.reason, now_ms)
            case DrainRequested():
                self._drain()
            case TasksCounted():
                self._end_late(event.counts, now_ms)
            case SessionOver():
                self._session_over(event.error, now_ms)
            case Broken():
                self._fail(event.error, now_ms)
            case Tick():
                self._check_silence(now_ms)
                self._take(event, now_ms)
            case _:
                self._take(event, now_ms)
        self._advance(now_ms)
        return self._decided()

    def _decided(self) -> list[Decision]:
        out = list(self._out)
        self._out.clear()
        return out

    # ------------------------------------------------------------ what slots say

    def _said(self, slot: SlotRecord, instance: str, message: FromSlot, now_ms: int) -> None:
        if isinstance(message, Hello):
            self._hello(slot, message, now_ms)
            return
        if not slot.is_instance(instance):
            if isinstance(message, SlotFailed) and slot.hello is None and not self._stopping():
                slot.failure = self.last_failure = f"slot {slot.number}: {reason_of(message)}"
                if message.code:
                    self._fail(error_for_code(message.code)(message.reason), now_ms)
            return
        slot.heard_ms = now_ms
        match message:
            case SlotFailed(code=code) if code:
                self._fail(error_for_code(code)(message.reason), now_ms)
            case SlotFailed(lasting=True) if self._never_ran:
                self._fail(never_works(slot.number, message), now_ms)
            case SlotFailed():
                self._lose(slot, reason_of(message), now_ms, message.operator)
            case TasksStarted():
                slot.started = slot.deployed
            case SourceFailed():
                self.last_failure = f"slot {slot.number}: {message.reason}"
            case Heartbeat():
                slot.heartbeat = message
                self._heard(slot, message, now_ms)
            case _:
                self._heard(slot, message, now_ms)

    def _hello(self, slot: SlotRecord, hello: Hello, now_ms: int) -> None:
        if self._stopping() or slot.ended:
            self._out.append(SendTo(slot.number, hello.instance, Cancel("the job does not need it any more")))
            return
        if slot.hello is not None:
            self._crew.tell(slot, Cancel("another process has taken its place"))
            self._lose(slot, "another process took its place", now_ms)
            if self._stopping():
                return
        slot.connect(hello, now_ms)
        slot.submit_at_ms = slot.lost_ms = None

    def _spark_job_ended(self, slot: SlotRecord, event: SparkJobEnded, now_ms: int) -> None:
        if event.attempt != slot.attempt:
            return
        if self._stopping():
            slot.submitted = False
            return
        error = self._upkeep.ended(slot, event)
        if event.error is not None and slot.hello is None:
            self.last_failure = slot.loss = slot.failure
        if error is not None:
            self._fail(error, now_ms)

    # ------------------------------------------------------------ losses

    def _check_silence(self, now_ms: int) -> None:
        limit = self._options.heartbeat_timeout_ms
        for slot in () if self._stopping() else self.slots:
            if slot.running and now_ms - slot.heard_ms >= limit:
                self._lose(slot, f"it was not heard of for {limit} ms", now_ms)
                self._upkeep.cancel(slot, now_ms)

    def _lose(self, slot: SlotRecord, reason: str, now_ms: int, operator: str = "") -> None:
        was_deployed, alone = slot.deployed, self._crew.all_deployed
        busy = "" if slot.heartbeat is None else slot.heartbeat.busy
        slot.disconnect(now_ms + self._options.start_timeout_ms)
        if self._stopping():
            return
        slot.failure = self.last_failure = with_spark_error(f"slot {slot.number}: {reason}", slot.spark_error)
        if not was_deployed:
            self._lost_before()
            return
        slot.loss, slot.loss_in = slot.failure, operator or busy
        slot.was_lost = True
        self._lost(slot, now_ms, alone=alone)

    # ------------------------------------------------------------ going on

    def _advance(self, now_ms: int) -> None:
        self._mind_the_session(now_ms)
        if not self._stopping():
            self._keep_slots_up(now_ms)
        if not self._stopping():
            self._go_on(now_ms)
        if self._end is not None and self._end.advance(now_ms):
            self._last_wish(self._end.verdict)
            self._out.append(self._end.verdict)

    def _keep_slots_up(self, now_ms: int) -> None:
        if self._is_late(now_ms):
            if self._counting_since_ms is None:
                self._counting_since_ms = now_ms
                self._out.append(CountTasks())
            elif now_ms - self._counting_since_ms >= COUNT_TASKS_MS:
                self._end_late(None, now_ms)
        for slot in self.slots:
            if slot.hello is None and not self._stopping():
                error = self._upkeep.keep_up(slot, now_ms)
                if error is not None:
                    self._fail(self._given_up(error), now_ms)

    def _is_late(self, now_ms: int) -> bool:
        late = not self._has_begun and now_ms - self._started_ms >= self._options.start_timeout_ms
        return late and not all(slot.hello for slot in self.slots)

    def _end_late(self, counts: TaskCounts | None, now_ms: int) -> None:
        if self._is_late(now_ms) and not self._stopping():
            self._fail(not_up(self.slots, self._options.start_timeout_ms, counts), now_ms)

    def _mind_the_session(self, now_ms: int) -> None:
        """Ask for the session where a slot has no instance, or a Spark job does not end: it may be gone."""
        missing = any(slot.hello is None and not slot.ended for slot in self.slots)
        if (missing or self._stopping()) and now_ms - self._asked_session_ms >= ASK_SESSION_MS:
            self._asked_session_ms = now_ms
            self._out.append(AskSession())

    def _session_over(self, error: FTLayerError, now_ms: int) -> None:
        for slot in self.slots:
            # No message will say that it has ended.
            slot.submitted = False
        self._fail(error, now_ms)

    def _drain(self) -> None:
        if not self._draining and not self._stopping():
            self._draining = True
            self._crew.tell_running(StopSources())

    # ------------------------------------------------------------ coming to an end

    def _fail(self, error: FTLayerError, now_ms: int) -> None:
        self.last_failure = str(error)
        self._stop(Over(JobState.FAILED, error), str(error).partition("\n")[0], now_ms)

    def _stop(self, verdict: Over, reason: str, now_ms: int) -> None:
        if self._end is None:
            self._end = Stopping(verdict, self.slots, self._out, now_ms)
            self._end.begin(reason)

    def _stopping(self) -> bool:
        return self._end is not None

    def _mind_the_gap(self, now_ms: int) -> None:
        """Where the driver itself stood still, silence says nothing of the slots: give them the time back."""
        gap = now_ms - self._last_ms
        self._last_ms = now_ms
        if gap >= self._options.heartbeat_timeout_ms // 2:
            for slot in self.slots:
                slot.heard_ms += gap
