"""From losses in a row to a record that is condemned: `Isolation`, carried out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ftlayer.runtime.acker_mode.driver.ending import EndDetection, GroupSettled, at_rest
from ftlayer.runtime.acker_mode.driver.isolation import (
    AllThrough,
    Isolation,
    RecallAll,
    ReplayInput,
    Step,
    Tell,
)
from ftlayer.runtime.acker_mode.driver.recalls import Recalls
from ftlayer.runtime.driver.crew import Crew
from ftlayer.runtime.driver.events import AckerInstruction, Condemn
from ftlayer.runtime.driver.job_status import IsolationStatus
from ftlayer.runtime.driver.mode import LossesForgiven, ModeInstruction
from ftlayer.runtime.driver.reasons import SOON_MS, SUSPICIOUS_LOSSES, conviction
from ftlayer.runtime.driver.slot_record import SlotRecord
from ftlayer.runtime.protocol.messages import PauseIntake, ReplaysOut, ResumeIntake

_Instructions: TypeAlias = Sequence[ModeInstruction[AckerInstruction]]


class Suspicion:
    """Counts losses that follow each other, and lets replays in by groups once there are too many.

    Not to be told of anything any more once the job stops.
    """

    def __init__(
        self,
        replays: Sequence[ReplayInput],
        crew: Crew,
        recalls: Recalls,
        detection: EndDetection,
    ) -> None:
        self._isolation = Isolation(replays)
        self._crew = crew
        self._recalls = recalls
        self._detection = detection
        self._condemning = False
        self._repaired_ms = 0
        self.quick_losses = 0

    @property
    def active(self) -> bool:
        """Whether a record is looked for."""
        return self._isolation.active

    @property
    def on_trial(self) -> bool:
        """Whether a record is accused, and one more loss proves it."""
        return self._isolation.on_trial

    @property
    def watches(self) -> bool:
        """Whether `EndDetection` has something to find out: the end of the job, or of a group."""
        return not self._isolation.active or self._isolation.waits_for_rest

    @property
    def status(self) -> IsolationStatus | None:
        """How far it is; None while there is none."""
        return self._isolation.status

    # ------------------------------------------------------------ losses and repairs

    def lost(self, slot: SlotRecord, now_ms: int, *, alone: bool) -> _Instructions:
        """A slot that ran was lost; ``alone``: it is not one of several that were lost together."""
        if alone:
            self.quick_losses = self.quick_losses + 1 if now_ms - self._repaired_ms < SOON_MS else 1
        slot.excused = self._isolation.active and self._isolation.lost(slot.number, now_ms)
        if self._isolation.active:
            if not slot.excused:
                self.quick_losses = 0
                slot.failure += " (while no record was out)"
        elif self.quick_losses >= SUSPICIOUS_LOSSES:
            self._isolation.begin()
            return self._crew.tell_running(PauseIntake())
        return []

    def repaired(self, now_ms: int) -> None:
        """All slots run again."""
        self._repaired_ms = now_ms
        if self._isolation.active:
            self._isolation.deployed()
            self._detection.restart(at_rest)

    @property
    def has_convict(self) -> bool:
        """Whether there is a record that has to be condemned first: by a recall the vertex forgets its root."""
        return self._isolation.convicted is not None

    def condemn(self) -> _Instructions:
        """Have that record condemned, if that is not under way."""
        found = self._isolation.convicted
        if found is None or self._condemning:
            return []
        self._condemning = True
        return [Condemn(conviction(found.root, self._crew.slots[found.slot]))]

    def condemned(self) -> None:
        """The vertex has done it."""
        self._condemning = False
        self._isolation.condemned()

    # ------------------------------------------------------------ groups

    def recalled(self, rows: int, now_ms: int) -> _Instructions:
        """The vertex has recalled so many rows."""
        return self._go(self._isolation.recalled(rows, now_ms))

    def took(self, report: ReplaysOut, now_ms: int) -> _Instructions:
        instructions = self._go(self._isolation.took(report, now_ms))
        if self._isolation.group_is_out:
            self._detection.restart(GroupSettled())
        return instructions

    def at_rest(self, now_ms: int) -> _Instructions:
        """Nothing moves in any slot, and the group is settled."""
        return self._go(self._isolation.at_rest(now_ms))

    def tick(self, now_ms: int) -> _Instructions:
        """Time has passed."""
        return self._go(self._isolation.tick(now_ms))

    def _go(self, steps: Sequence[Step]) -> _Instructions:
        return [each for step in steps for each in self._step(step)]

    def _step(self, step: Step) -> _Instructions:
        match step:
            case RecallAll():
                return self._recalls.ask()
            case Tell(source, message):
                return self._crew.tell(self._crew.slots[source.slot], message)
            case AllThrough():
                return self._go_on_as_usual()

    def _go_on_as_usual(self) -> _Instructions:
        self.quick_losses = 0
        self._detection.restart()
        forgiven = [LossesForgiven()] if self._isolation.found else []
        return [*forgiven, *self._crew.tell_running(ResumeIntake())]
