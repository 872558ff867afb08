"""The coordinator's rules as a state machine: events in, instructions out. No I/O, no threads, no clock.

A job starts when every slot has an instance, and is repaired when one is lost:

    lost → `DropPeers` to the others → all answered, and a new instance is there → the vertex recalls what is
    pending → `PeersUp` to the others, `Deploy` to the new one, `ReplayNow` to all

From the loss on the vertex recalls what is pending, so that it does not time out; replays are not asked for
before all slots are there again.

Where slots are lost again and again soon after that, a record may end the processes that work on it: `Isolation`
takes over what is let in until it is found.

A further loss at any point of this begins it again, with a higher epoch. What an instance says that is not the
connected one of its slot is not listened to. Each event changes what is known; then `_advance` does whatever has
become possible, so that the order of events does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from ftlayer.config import TopologyOptions
from ftlayer.errors import FTLayerError
from ftlayer.restart import RestartStrategy
from ftlayer.runtime.acker_mode.driver.isolation import ReplayInput
from ftlayer.runtime.acker_mode.driver.suspicion import Suspicion
from ftlayer.runtime.driver.crew import Recalls
from ftlayer.runtime.driver.ending import (
    AskStatus,
    EndDetection,
    NothingLeft,
    ProbeAll,
)
from ftlayer.runtime.driver.events import (
    AskVertexStatus,
    Condemned,
    Event,
    JobInstruction,
    JobState,
    Over,
    RecallDone,
    SlotDown,
    StatusKnown,
    Tick,
)
from ftlayer.runtime.driver.job_core import JobCore
from ftlayer.runtime.driver.job_status import IsolationStatus
from ftlayer.runtime.driver.reasons import (
    given_up,
    untracked,
)
from ftlayer.runtime.driver.slot_record import SlotRecord
from ftlayer.runtime.protocol.messages import (
    Deploy,
    DropPeers,
    EndReplays,
    FromSlot,
    Heartbeat,
    PeersDropped,
    PeersUp,
    Probe,
    ReplayNow,
    ReplaysOut,
    SlotEnded,
)
from ftlayer.vertex.calls import StreamOptions


class CoordinatorCore(JobCore):
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
        super().__init__(slots, options, restart)
        self._tracked = tracked
        self._run = run
        self._recalls = Recalls(not tracked, timeout_ms)
        self._detection = EndDetection()
        self._suspicion = Suspicion(replays, self._crew, self._recalls, self._detection, self._upkeep)

    @property
    def isolation(self) -> IsolationStatus | None:
        """How far the search for a record that ends processes is; None while there is none."""
        return self._suspicion.status

    @property
    def restarts(self) -> int:
        """See `JobCore.restarts`: slots, each by itself. Those that a record ended count too."""
        return sum(slot.restarts for slot in self.slots)

    @property
    def _was_lost(self) -> bool:
        return self.epoch > 1

    @property
    def _has_begun(self) -> bool:
        return self.epoch > 0

    @property
    def _never_ran(self) -> bool:
        return self.epoch == 1

    @property
    def _is_complete(self) -> bool:
        return self._crew.all_deployed

    def _state_while_it_runs(self) -> JobState | None:
        return JobState.ISOLATING if self._suspicion.active else None

    def _begin(self, now_ms: int) -> list[JobInstruction]:
        # What an earlier run left pending becomes due.
        return self._recalls.ask() if self._tracked else []

    def _take(self, event: Event, now_ms: int) -> list[JobInstruction]:
        match event:
            case StatusKnown():
                return self._probe(self._detection.status(event.number, event.status, now_ms))
            case RecallDone():
                self._recalls.answered(event.number)
                return [] if self._stopping() else self._suspicion.recalled(event.rows, now_ms)
            case Condemned():
                self._suspicion.condemned()
            case Tick() if not self._stopping():
                return self._suspicion.tick(now_ms)
        return []

    def _heard(self, slot: SlotRecord, message: FromSlot, now_ms: int) -> list[JobInstruction]:
        match message:
            case Heartbeat() if slot.running:
                self._detection.heartbeat(slot.number, message)
            case PeersDropped():
                slot.dropped_epoch = max(slot.dropped_epoch, message.epoch)
            case SlotEnded():
                slot.ended = slot.deployed
                is_over = self._stopping() or self._ending
                if slot.ended and not is_over and not self._crew.all_deployed:
                    return self._repair([], now_ms)
            case ReplaysOut() if not self._stopping():
                return self._suspicion.took(message, now_ms)
        return []

    # ------------------------------------------------------------ losses

    def _lost_before(self) -> None:
        if self.epoch:
            # The others went on since the vertex was asked to recall.
            self._recalls.forget()

    def _lost(self, slot: SlotRecord, now_ms: int, *, alone: bool) -> list[JobInstruction]:
        slot.lost_ms = now_ms
        if not self._tracked:
            return self._fail(untracked(slot.failure), now_ms)
        if self._ending:
            # Everything is done and the vertex is empty: what remained was to say so.
            return self._stop(Over(JobState.ENDED), "everything is done", now_ms)
        return [
            *self._suspicion.lost(slot, now_ms, alone=alone),
            *self._repair([slot.number], now_ms),
        ]

    def _repair(self, lost: list[int], now_ms: int) -> list[JobInstruction]:
        """Begin a repair: slots that had ended start again as well."""
        gone = list(lost)
        for slot in self.slots:
            if slot.ended:
                # Its channels to the new instance would never say that they end.
                self._crew.drop(slot, now_ms)
                slot.revived = True
                gone.append(slot.number)
        self.epoch += 1
        self._recalls.forget()
        self._detection.restart()
        for slot in self._crew.running:
            slot.asked_epoch = self.epoch
        told = self._crew.tell_running(DropPeers(self.epoch, tuple(sorted(gone))))
        return told + [SlotDown(number) for number in gone]

    # ------------------------------------------------------------ going on

    def _given_up(self, error: FTLayerError) -> FTLayerError:
        return given_up(error, self._suspicion.quick_losses)

    def _go_on(self, now_ms: int) -> list[JobInstruction]:
        return [*self._bring_up(now_ms), *self._look_for_end(now_ms)]

    def _last_wish(self, verdict: Over) -> list[JobInstruction]:
        if not self._tracked or verdict.state is JobState.ENDED:
            return []
        # For the next start, which may be long after their timeout.
        return self._recalls.at_the_end()

    def _bring_up(self, now_ms: int) -> list[JobInstruction]:
        new = [slot for slot in self.slots if not slot.deployed]
        if not new:
            return []
        others = list(self._crew.running)
        all_know = all(slot.dropped_epoch >= slot.asked_epoch for slot in others)
        if not all_know or not all(slot.hello for slot in self.slots):
            return self._recall_meanwhile(all_know, now_ms)
        if not self._recalls.is_done:
            return self._suspicion.condemn() if self._suspicion.has_convict else self._recalls.ask()
        return self._deploy(new, others, now_ms)

    def _deploy(
        self, new: Sequence[SlotRecord], others: Sequence[SlotRecord], now_ms: int
    ) -> list[JobInstruction]:
        self.epoch = max(self.epoch, 1)
        arrived = PeersUp(self.epoch, tuple(slot.peer for slot in new))
        peers = tuple(slot.peer for slot in self.slots)
        deploy = Deploy(self.epoch, f"{self._run}/{self.epoch}", peers, self._suspicion.active)
        instructions = [each for slot in others for each in self._crew.tell(slot, arrived)]
        instructions += [each for slot in new for each in self._crew.deploy(slot, deploy, now_ms)]
        self._suspicion.repaired(now_ms)
        if self._tracked and not self._suspicion.active:
            instructions += [each for slot in self.slots for each in self._crew.tell(slot, ReplayNow())]
        return instructions

    def _recall_meanwhile(self, all_know: bool, now_ms: int) -> list[JobInstruction]:
        if not self._tracked or not self.epoch or not self._recalls.is_due(self.epoch, all_know, now_ms):
            return []
        if self._suspicion.has_convict:
            return self._suspicion.condemn()
        return self._recalls.meanwhile(self.epoch, all_know, now_ms)

    def _look_for_end(self, now_ms: int) -> list[JobInstruction]:
        if self.epoch and all(slot.ended for slot in self.slots):
            return self._stop(Over(JobState.ENDED), "", now_ms)
        is_up = self._tracked and not self._ending and self._crew.all_deployed
        if not is_up or not self._suspicion.watches:
            return []
        latest = {slot.number: slot.heartbeat for slot in self._crew.running}
        match self._detection.advance(latest, now_ms):
            case ProbeAll() as probe:
                return self._probe(probe)
            case AskStatus(number):
                return [AskVertexStatus(number)]
            case NothingLeft() if self._suspicion.active:
                return self._suspicion.at_rest(now_ms)
            case NothingLeft():
                self._ending = True
                return self._crew.tell_running(EndReplays())
        return []

    def _probe(self, probe: ProbeAll | None) -> list[JobInstruction]:
        return [] if probe is None else self._crew.tell_running(Probe(probe.number))
