"""A job without fault tolerance: it starts when every slot has an instance, and a loss ends it. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

from ftlayer.errors import FTLayerError
from ftlayer.restart import RestartStrategy
from ftlayer.runtime.driver.crew import Crew
from ftlayer.runtime.driver.driver_mode import CheckpointCalls, JobContext, no_checkpoints
from ftlayer.runtime.driver.events import Event, JobInstruction, JobState, Over, Said
from ftlayer.runtime.driver.mode import ModeInstruction, StopJob, failed
from ftlayer.runtime.driver.position_keeper import PositionKeeper
from ftlayer.runtime.driver.range_keeper import KeptRanges
from ftlayer.runtime.driver.reasons import untracked
from ftlayer.runtime.driver.slot_record import SlotRecord
from ftlayer.runtime.protocol.messages import Deploy, FromSlot
from ftlayer.topology.operators import Source

_Instructions: TypeAlias = Sequence[ModeInstruction[NoReturn]]


class UntrackedJob:
    """`JobMode` of ``FTStatus.OFF``. ``run`` names the execution."""

    restarts = 0
    was_lost = is_ending = False
    state = isolation = None

    def __init__(self, crew: Crew, *, run: str, restart: RestartStrategy) -> None:
        """``restart`` says when the process of a slot is replaced that was lost before it ran."""
        self.slot_restart = restart
        self._crew = crew
        self._run = run
        self._begun = False

    @property
    def epoch(self) -> int:
        """0 before all tasks have been told to start, and 1 from then on."""
        return int(self._begun)

    @property
    def has_begun(self) -> bool:
        return self._begun

    @property
    def never_ran(self) -> bool:
        return self._begun

    @property
    def is_complete(self) -> bool:
        return self._crew.all_deployed

    def begin(self) -> _Instructions:
        """See `JobMode`: nothing is left of an earlier run."""
        return []

    def handle(self, event: Event, now_ms: int) -> _Instructions:
        return []

    def heard(self, slot: SlotRecord, message: FromSlot, now_ms: int) -> _Instructions:
        return []

    def lost(self, slot: SlotRecord, now_ms: int, *, alone: bool) -> _Instructions:
        return [failed(untracked(slot.failure))]

    def lost_before(self) -> None:
        """See `JobMode`: another instance is waited for."""

    def go_on(self, now_ms: int) -> _Instructions:
        slots = self._crew.slots
        if self._begun:
            return [StopJob(Over(JobState.ENDED))] if all(slot.ended for slot in slots) else []
        if not all(slot.hello for slot in slots):
            return []
        self._begun = True
        deploy = Deploy(1, f"{self._run}/1", tuple(slot.peer for slot in slots))
        return [each for slot in slots for each in self._crew.deploy(slot, deploy, now_ms)]

    def explained(self, error: FTLayerError) -> FTLayerError:
        return error

    def last_wish(self, verdict: Over) -> list[JobInstruction]:
        return []

    def validate(self) -> None:
        assert self._begun == self._crew.all_deployed, "a job that goes on has lost a slot"


class UntrackedDriver:
    """`DriverMode` of ``FTStatus.OFF``: nothing is to be done beside the job's thread."""

    checkpoint_counts = result = stopped_with = None

    def __init__(self, job: JobContext) -> None:
        self.rules = UntrackedJob(job.crew, run=job.run, restart=job.restart)
        self._name = job.graph.name

    @property
    def checkpoints(self) -> CheckpointCalls:
        raise no_checkpoints(self._name)

    def before(self, said: Said) -> None:
        """See `DriverMode`."""

    def carry_out(self, instruction: NoReturn) -> None:
        """See `DriverMode`: the rules have no instructions of their own."""

    def after(self, event: Event, state: JobState, now_ms: int) -> None:
        """See `DriverMode`."""

    def vertex_status(self) -> None:
        """See `DriverMode`: there is no vertex."""

    def end(
        self,
        state: JobState,
        take_events: Callable[[], None],
        close_by_s: float | None,
        *,
        interrupted: bool,
    ) -> None:
        """See `DriverMode`."""

    def close(self) -> None:
        """See `DriverMode`."""

    def when_done(self, done: Callable[[], None]) -> None:
        done()


def open_untracked(source: Source, happened: Callable[[Any], None]) -> KeptRanges:
    """Return the keeper of a reader source with ``FTStatus.OFF``: an `OpenKeeper`. Positions are kept nowhere."""
    return KeptRanges(PositionKeeper())
