"""The coordinator's rules as a state machine: events in, decisions out. No I/O, no threads, no clock.

A job starts when every slot has an instance, and is repaired when one is lost:

    lost → `DropPeers` to the others → all answered, and a new instance is there → the vertex recalls what is
    pending → `PeersUp` to the others, `Deploy` to the new one, `ReplayNow` to all

From the loss on the vertex recalls what is pending, so that it does not time out; nobody asks for it before all slots
are there again.

Where slots are lost again and again soon after that, a record may end the processes that work on it: `Isolation`
takes over what is let in until it is found.

A further loss at any point of this begins it again, with a higher epoch. What an instance says that is not the
connected one of its slot is not listened to. Each event changes what is known; then `_advance` does whatever has
become possible, so that the order of events does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from ftlayer.config import TopologyOptions
from ftlayer.errors import FTLayerError, error_for_code
from ftlayer.layer.calls import StreamOptions
from ftlayer.restart import RestartStrategy
from ftlayer.runtime.coordinator.crew import Crew, Recalls
from ftlayer.runtime.coordinator.ending import (
    AskStatus,
    EndDetection,
    NothingLeft,
    ProbeAll,
)
from ftlayer.runtime.coordinator.events import (
    AskVertexStatus,
    Broke,
    Broken,
    CancelRequested,
    Condemned,
    Decision,
    DrainRequested,
    Event,
    JobState,
    Over,
    RecallDone,
    Said,
    SendTo,
    SlotDown,
    SlotUp,
    SparkJobEnded,
    StatusKnown,
    Tick,
)
from ftlayer.runtime.coordinator.isolation import IsolationStatus, ReplayInput
from ftlayer.runtime.coordinator.reasons import (
    given_up,
    never_works,
    not_up,
    reason_of,
    untracked,
    with_spark_error,
)
from ftlayer.runtime.coordinator.slot_record import SlotRecord
from ftlayer.runtime.coordinator.stopping import Stopping
from ftlayer.runtime.coordinator.suspicion import Suspicion
from ftlayer.runtime.coordinator.upkeep import Upkeep
from ftlayer.runtime.messages import (
    Cancel,
    Deploy,
    DropPeers,
    EndReplays,
    FromSlot,
    Heartbeat,
    Hello,
    PeersDropped,
    PeersUp,
    Probe,
    ReplayNow,
    ReplaysOut,
    SlotEnded,
    SlotFailed,
    SplitDone,
    StopSources,
)


class CoordinatorCore:
    """The state of one execution of a job.

    ``run`` names it; each epoch's instances get a name of their own made from it, so that a root id is never
    made twice. Times are of one monotone clock (ms).
    """

    def __init__(
        self,
        *,
        slots: int,
        tracked: bool,
        run: str,
        options: TopologyOptions,
        restart: RestartStrategy,
        replays: Sequence[ReplayInput] = (),
        timeout_ms: int = StreamOptions().timeout_ms,
    ) -> None:
        """``replays`` are all inputs by which the vertex lets records in again.

        ``timeout_ms``: no record times out before.
        """
        self._tracked = tracked
        self._run = run
        self._options = options
        self._out: list[Decision] = []
        self._crew = Crew(slots, self._out)
        self.slots = self._crew.slots
        self.epoch = 0
        self.restarts = 0
        self.last_failure = ""
        self._draining = False
        self._ending = False
        self._end: Stopping | None = None
        self._started_ms = self._last_ms = 0
        self._recalls = Recalls(not tracked, timeout_ms, self._out)
        self._detection = EndDetection()
        self._upkeep = Upkeep(options, restart, self._out)
        self._suspicion = Suspicion(
            replays, self._crew, self._recalls, self._detection, self._upkeep, self._out
        )

    @property
    def state(self) -> JobState:
        """Where the job is."""
        if self._end is not None:
            return self._end.verdict.state if self._end.over else JobState.STOPPING
        if self.epoch == 0:
            return JobState.STARTING
        if self._ending:
            return JobState.ENDING
        if not self._crew.all_deployed:
            return JobState.RECOVERING
        if self._suspicion.active:
            return JobState.ISOLATING
        return JobState.DRAINING if self._draining else JobState.RUNNING

    @property
    def isolation(self) -> IsolationStatus | None:
        """How far the search for a record that ends processes is; None while there is none."""
        return self._suspicion.status

    def start(self, now_ms: int) -> list[Decision]:
        """Begin: what an earlier run left pending becomes due, and the slots are submitted."""
        self._started_ms = self._last_ms = now_ms
        if self._tracked:
            self._recalls.ask()
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
                self._broke(self.slots[event.slot], event, now_ms)
            case SparkJobEnded():
                self._spark_job_ended(self.slots[event.slot], event, now_ms)
            case CancelRequested():
                self._stop(Over(JobState.CANCELLED), event.reason, now_ms)
            case DrainRequested():
                self._drain()
            case StatusKnown():
                self._probe(self._detection.status(event.number, event.status, now_ms))
            case RecallDone():
                self._recalls.answered(event.number)
                if not self._stopping():
                    self._suspicion.recalled(event.rows, now_ms)
            case Condemned():
                self._suspicion.condemned()
            case Broken():
                self._fail(event.error, now_ms)
            case Tick():
                self._check_silence(now_ms)
                if not self._stopping():
                    self._suspicion.tick(now_ms)
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
            return
        slot.heard_ms = now_ms
        match message:
            case Heartbeat():
                slot.heartbeat = message
                if slot.running:
                    self._detection.heartbeat(slot.number, message)
            case PeersDropped():
                slot.dropped_epoch = max(slot.dropped_epoch, message.epoch)
            case SlotFailed(code=code) if code:
                self._fail(error_for_code(code)(message.reason), now_ms)
            case SlotFailed(lasting=True) if self.epoch == 1:
                self._fail(never_works(slot.number, message), now_ms)
            case SlotFailed():
                self._lose(slot, reason_of(message), now_ms, message.operator)
            case SlotEnded():
                slot.ended = slot.deployed
                if slot.ended and self.state is JobState.RECOVERING:
                    self._repair([], now_ms)
            case ReplaysOut() if not self._stopping():
                self._suspicion.took(message, now_ms)
            case SplitDone() | ReplaysOut():
                pass  # the planner's, not ours; of no use any more

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

    def _broke(self, slot: SlotRecord, event: Broke, now_ms: int) -> None:
        if slot.is_instance(event.instance) and not slot.ended:
            self._lose(slot, event.reason, now_ms)

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
        if self._stopping():
            return
        limit = self._options.heartbeat_timeout_ms
        for slot in self.slots:
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
            if self.epoch:
                # Nobody has heard of it; but the others went on since the vertex was asked to recall.
                self._recalls.forget()
            return
        slot.loss, slot.loss_in = slot.failure, operator or busy
        slot.lost_ms = now_ms
        slot.restarts += 1
        self.restarts += 1
        if not self._tracked:
            self._fail(untracked(slot.failure), now_ms)
        elif self._ending:
            # Everything is done and the vertex is empty: what remained was to say so.
            self._stop(Over(JobState.ENDED), "everything is done", now_ms)
        else:
            self._suspicion.lost(slot, now_ms, alone=alone)
            self._repair([slot.number], now_ms)

    def _repair(self, lost: list[int], now_ms: int) -> None:
        """Begin a repair: slots that had ended start again as well."""
        gone = list(lost)
        for slot in self.slots:
            if slot.ended:
                # Its channels to the new instance would never say that they end.
                slot.disconnect(now_ms + self._options.start_timeout_ms)
                slot.revived = True
                gone.append(slot.number)
        self.epoch += 1
        self._recalls.forget()
        self._detection.restart()
        for slot in self._crew.running:
            self._crew.tell(slot, DropPeers(self.epoch, tuple(sorted(gone))))
            slot.asked_epoch = self.epoch
        self._out.extend(SlotDown(number) for number in gone)

    # ------------------------------------------------------------ going on

    def _advance(self, now_ms: int) -> None:
        if not self._stopping():
            self._keep_slots_up(now_ms)
        if not self._stopping():
            self._bring_up(now_ms)
            self._look_for_end(now_ms)
        if self._end is not None and self._end.advance(now_ms):
            if self._tracked and self._end.verdict.state is not JobState.ENDED:
                # For the next start, which may be long after their timeout.
                self._recalls.at_the_end()
            self._out.append(self._end.verdict)

    def _keep_slots_up(self, now_ms: int) -> None:
        late = self.epoch == 0 and now_ms - self._started_ms >= self._options.start_timeout_ms
        if late and not all(slot.hello for slot in self.slots):
            self._fail(not_up(self.slots, self._options.start_timeout_ms), now_ms)
        for slot in self.slots:
            if slot.hello is None and not self._stopping():
                error = self._upkeep.keep_up(slot, now_ms)
                if error is not None:
                    self._fail(given_up(error, self._suspicion.quick_losses), now_ms)

    def _bring_up(self, now_ms: int) -> None:
        new = [slot for slot in self.slots if not slot.deployed]
        if not new:
            return
        others = list(self._crew.running)
        all_know = all(slot.dropped_epoch >= slot.asked_epoch for slot in others)
        if not all_know or not all(slot.hello for slot in self.slots):
            self._recall_meanwhile(all_know, now_ms)
            return
        if not self._recalls.is_done:
            if not self._suspicion.condemns():
                self._recalls.ask()
            return
        self.epoch = max(self.epoch, 1)
        arrived = tuple(slot.peer for slot in new)
        for slot in others:
            self._crew.tell(slot, PeersUp(self.epoch, arrived))
        peers = tuple(slot.peer for slot in self.slots)
        for slot in new:
            paused = self._suspicion.active
            self._crew.tell(slot, Deploy(self.epoch, f"{self._run}/{self.epoch}", peers, paused))
            slot.deployed, slot.heard_ms = True, now_ms
            if self._draining:
                self._crew.tell(slot, StopSources())
            self._out.append(SlotUp(slot.number))
        self._suspicion.repaired(now_ms)
        if self._tracked and not self._suspicion.active:
            for slot in self.slots:
                self._crew.tell(slot, ReplayNow())

    def _recall_meanwhile(self, all_know: bool, now_ms: int) -> None:
        if not self._tracked or not self.epoch or not self._recalls.is_due(self.epoch, all_know, now_ms):
            return
        if not self._suspicion.condemns():
            self._recalls.meanwhile(self.epoch, all_know, now_ms)

    def _look_for_end(self, now_ms: int) -> None:
        if self.epoch and all(slot.ended for slot in self.slots):
            self._stop(Over(JobState.ENDED), "", now_ms)
        elif not self._tracked or self._ending or not self._crew.all_deployed:
            return
        elif self._suspicion.watches:
            latest = {slot.number: slot.heartbeat for slot in self._crew.running}
            match self._detection.advance(latest, now_ms):
                case ProbeAll() as probe:
                    self._probe(probe)
                case AskStatus(number):
                    self._out.append(AskVertexStatus(number))
                case NothingLeft() if self._suspicion.active:
                    self._suspicion.at_rest(now_ms)
                case NothingLeft():
                    self._ending = True
                    self._crew.tell_running(EndReplays())

    def _probe(self, probe: ProbeAll | None) -> None:
        if probe is not None:
            self._crew.tell_running(Probe(probe.number))

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

    # ------------------------------------------------------------ small ones

    def _stopping(self) -> bool:
        return self._end is not None

    def _mind_the_gap(self, now_ms: int) -> None:
        """Where the driver itself stood still, silence says nothing of the slots: give them the time back."""
        gap = now_ms - self._last_ms
        self._last_ms = now_ms
        if gap >= self._options.heartbeat_timeout_ms // 2:
            for slot in self.slots:
                slot.heard_ms += gap
