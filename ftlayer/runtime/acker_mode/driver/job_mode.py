"""Acker mode's rules of a job: what is replayed when a slot is lost, and when it ends. No I/O, no threads, no clock.

A job starts when every slot has an instance, and is repaired when one is lost:

    lost → `DropPeers` to the others → all answered, and a new instance is there → the vertex recalls what is
    pending → `PeersUp` to the others, `Deploy` to the new one, `ReplayNow` to all

From the loss on the vertex recalls what is pending, so that it does not time out; replays are not asked for
before all slots are there again.

Where slots are lost again and again soon after that, a record may end the processes that work on it: `Isolation`
takes over what is let in until it is found.

A further loss at any point of this begins it again, with a higher epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ftlayer.errors import FTLayerError
from ftlayer.restart import RestartStrategy
from ftlayer.runtime.acker_mode.driver.ending import AskStatus, EndDetection, NothingLeft, ProbeAll
from ftlayer.runtime.acker_mode.driver.isolation import ReplayInput
from ftlayer.runtime.acker_mode.driver.recalls import Recalls
from ftlayer.runtime.acker_mode.driver.suspicion import Suspicion
from ftlayer.runtime.driver.crew import Crew
from ftlayer.runtime.driver.events import (
    AckerInstruction,
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
from ftlayer.runtime.driver.job_status import IsolationStatus
from ftlayer.runtime.driver.mode import ModeInstruction, StopJob
from ftlayer.runtime.driver.reasons import given_up
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

_Instructions: TypeAlias = Sequence[ModeInstruction[AckerInstruction]]


class AckerJob:
    """`JobMode` of a job whose records the vertex follows.

    ``run`` names the execution; each epoch's instances get a name of their own made from it, so that a root id is
    never made twice.
    """

    def __init__(
        self,
        crew: Crew,
        *,
        run: str,
        restart: RestartStrategy,
        replays: Sequence[ReplayInput] = (),
        timeout_ms: int = StreamOptions().timeout_ms,
    ) -> None:
        """``restart`` says when the process of a slot that is lost is replaced.

        ``replays`` are all inputs by which the vertex lets records in again. ``timeout_ms``: no record times out
        before.
        """
        self.slot_restart = restart
        self.epoch = 0
        self.is_ending = False
        self._crew = crew
        self._run = run
        self._recalls = Recalls(timeout_ms)
        self._detection = EndDetection()
        self._suspicion = Suspicion(replays, crew, self._recalls, self._detection)

    @property
    def isolation(self) -> IsolationStatus | None:
        return self._suspicion.status

    @property
    def on_trial(self) -> bool:
        """Whether a record is accused of ending processes, and one more loss proves it."""
        return self._suspicion.on_trial

    @property
    def restarts(self) -> int:
        """See `JobMode`: slots, each by itself. Those that a record ended count too."""
        return sum(slot.restarts for slot in self._crew.slots)

    @property
    def was_lost(self) -> bool:
        return self.epoch > 1

    @property
    def has_begun(self) -> bool:
        return self.epoch > 0

    @property
    def never_ran(self) -> bool:
        return self.epoch == 1

    @property
    def is_complete(self) -> bool:
        return self._crew.all_deployed

    @property
    def state(self) -> JobState | None:
        return JobState.ISOLATING if self._suspicion.active else None

    def begin(self) -> _Instructions:
        """See `JobMode`: what an earlier run left pending becomes due."""
        return [*self._recalls.ask()]

    def handle(self, event: Event, now_ms: int) -> _Instructions:
        match event:
            case StatusKnown():
                return self._probe(self._detection.status(event.number, event.status, now_ms))
            case RecallDone():
                self._recalls.answered(event.number)
                return self._suspicion.recalled(event.rows, now_ms)
            case Condemned():
                self._suspicion.condemned()
            case Tick():
                return self._suspicion.tick(now_ms)
        return []

    def heard(self, slot: SlotRecord, message: FromSlot, now_ms: int) -> _Instructions:
        match message:
            case Heartbeat() if slot.running:
                self._detection.heartbeat(slot.number, message)
            case PeersDropped():
                slot.dropped_epoch = max(slot.dropped_epoch, message.epoch)
            case SlotEnded() if slot.ended and not self.is_ending and not self._crew.all_deployed:
                return self._repair([], now_ms)
            case ReplaysOut():
                return self._suspicion.took(message, now_ms)
        return []

    # ------------------------------------------------------------ losses

    def lost_before(self) -> None:
        if self.epoch:
            # The others went on since the vertex was asked to recall.
            self._recalls.forget()

    def lost(self, slot: SlotRecord, now_ms: int, *, alone: bool) -> _Instructions:
        slot.lost_ms = now_ms
        if self.is_ending:
            # Everything is done and the vertex is empty: what remained was to say so.
            return [StopJob(Over(JobState.ENDED), "everything is done")]
        return [
            *self._suspicion.lost(slot, now_ms, alone=alone),
            *self._repair([slot.number], now_ms),
        ]

    def _repair(self, lost: list[int], now_ms: int) -> list[JobInstruction]:
        """Begin a repair: slots that had ended start again as well."""
        gone = list(lost)
        for slot in self._crew.slots:
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

    def explained(self, error: FTLayerError) -> FTLayerError:
        return given_up(error, self._suspicion.quick_losses)

    def go_on(self, now_ms: int) -> _Instructions:
        return [*self._bring_up(now_ms), *self._look_for_end(now_ms)]

    def last_wish(self, verdict: Over) -> Sequence[JobInstruction | AckerInstruction]:
        """See `JobMode`: the next start may be long after the timeout of what is pending."""
        return [] if verdict.state is JobState.ENDED else self._recalls.at_the_end()

    def validate(self) -> None:
        for slot in self._crew.slots:
            epochs = slot.dropped_epoch, slot.asked_epoch, self.epoch
            assert list(epochs) == sorted(epochs), f"slot {slot.number} is ahead of its epoch: {epochs}"
        assert not self._suspicion.active or self.was_lost, "a record is looked for, and nothing was lost"

    def _bring_up(self, now_ms: int) -> _Instructions:
        new = [slot for slot in self._crew.slots if not slot.deployed]
        if not new:
            return []
        others = list(self._crew.running)
        all_know = all(slot.dropped_epoch >= slot.asked_epoch for slot in others)
        if not all_know or not all(slot.hello for slot in self._crew.slots):
            return self._recall_meanwhile(all_know, now_ms)
        if not self._recalls.is_done:
            return self._suspicion.condemn() if self._suspicion.has_convict else self._recalls.ask()
        return self._deploy(new, others, now_ms)

    def _deploy(
        self, new: Sequence[SlotRecord], others: Sequence[SlotRecord], now_ms: int
    ) -> list[JobInstruction]:
        self.epoch = max(self.epoch, 1)
        arrived = PeersUp(self.epoch, tuple(slot.peer for slot in new))
        peers = tuple(slot.peer for slot in self._crew.slots)
        deploy = Deploy(self.epoch, f"{self._run}/{self.epoch}", peers, self._suspicion.active)
        instructions = [each for slot in others for each in self._crew.tell(slot, arrived)]
        instructions += [each for slot in new for each in self._crew.deploy(slot, deploy, now_ms)]
        self._suspicion.repaired(now_ms)
        if not self._suspicion.active:
            instructions += [each for slot in self._crew.slots for each in self._crew.tell(slot, ReplayNow())]
        return instructions

    def _recall_meanwhile(self, all_know: bool, now_ms: int) -> _Instructions:
        if not self.epoch or not self._recalls.is_due(self.epoch, all_know, now_ms):
            return []
        if self._suspicion.has_convict:
            return self._suspicion.condemn()
        return self._recalls.meanwhile(self.epoch, all_know, now_ms)

    def _look_for_end(self, now_ms: int) -> _Instructions:
        if self.epoch and all(slot.ended for slot in self._crew.slots):
            return [StopJob(Over(JobState.ENDED))]
        if self.is_ending or not self._crew.all_deployed or not self._suspicion.watches:
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
                self.is_ending = True
                return self._crew.tell_running(EndReplays())
        return []

    def _probe(self, probe: ProbeAll | None) -> list[JobInstruction]:
        return [] if probe is None else self._crew.tell_running(Probe(probe.number))
