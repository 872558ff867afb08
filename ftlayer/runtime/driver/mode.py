"""What a mode decides of a job's life: `JobCore` owns one. No I/O, no threads, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from ftlayer.errors import FTLayerError
from ftlayer.restart import RestartStrategy
from ftlayer.runtime.driver.events import Event, JobInstruction, JobState, Over
from ftlayer.runtime.driver.job_status import IsolationStatus
from ftlayer.runtime.driver.slot_record import SlotRecord
from ftlayer.runtime.protocol.messages import FromSlot


@dataclass(frozen=True, slots=True)
class StopJob:
    """The job comes to its end, with this verdict. ``reason`` is what slots are told."""

    verdict: Over
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FailureNoted:
    """This is the job's last failure."""

    reason: str


@dataclass(frozen=True, slots=True)
class LossesForgiven:
    """The losses so far were a record's doing: the restart strategy of slots begins afresh."""


Own = TypeVar("Own")
Own_co = TypeVar("Own_co", covariant=True)
"""Instructions of the mode alone: `DriverMode` carries them out."""

ModeInstruction: TypeAlias = JobInstruction | StopJob | FailureNoted | LossesForgiven | Own
"""Three are for `JobCore` itself, which carries them out before anything else happens."""


def failed(error: FTLayerError) -> StopJob:
    """Return what ends the job with this error."""
    return StopJob(Over(JobState.FAILED, error), str(error).partition("\n")[0])


class JobMode(Protocol[Own_co]):
    """One mode's rules for one execution of a job. Times are of one monotone clock (ms).

    It knows the slots by the `Crew` that it shares with `JobCore`. Once the job stops it is asked for its `last_wish`
    and for nothing else.
    """

    @property
    def slot_restart(self) -> RestartStrategy:
        """Says when the process of a slot that is lost is replaced."""

    @property
    def epoch(self) -> int:
        """How often tasks were told to begin anew."""

    @property
    def restarts(self) -> int:
        """How often something that ran was started again, as the restart strategy counts it."""

    @property
    def has_begun(self) -> bool:
        """Whether all tasks have been told to start."""

    @property
    def was_lost(self) -> bool:
        """Whether something was lost that ran."""

    @property
    def never_ran(self) -> bool:
        """Whether a failure that its slot says is a lasting one ends the job."""

    @property
    def is_complete(self) -> bool:
        """Whether no slot is being replaced."""

    @property
    def is_ending(self) -> bool:
        """Whether everything is done, and the tasks were told to end."""

    @property
    def state(self) -> JobState | None:
        """Where the job is, before it has begun or while all tasks are up; None if nothing is the matter."""

    @property
    def isolation(self) -> IsolationStatus | None:
        """How far the search for a record that ends processes is; None while there is none."""

    def begin(self) -> Sequence[ModeInstruction[Own_co]]:
        """The job begins; the slots are submitted behind this."""

    def handle(self, event: Event, now_ms: int) -> Sequence[ModeInstruction[Own_co]]:
        """Take an event that `JobCore` does not know; `Tick` too."""

    def heard(self, slot: SlotRecord, message: FromSlot, now_ms: int) -> Sequence[ModeInstruction[Own_co]]:
        """The connected instance of a slot says something that is no failure; its Hello comes first."""

    def lost(self, slot: SlotRecord, now_ms: int, *, alone: bool) -> Sequence[ModeInstruction[Own_co]]:
        """An instance is lost that ran; ``alone``: all others were deployed."""

    def lost_before(self) -> None:
        """An instance is lost that was not told to start."""

    def go_on(self, now_ms: int) -> Sequence[ModeInstruction[Own_co]]:
        """Do what has become possible: start tasks, look for the end. Called behind each event."""

    def explained(self, error: FTLayerError) -> FTLayerError:
        """Return why the job ends when a slot is not submitted any more."""

    def last_wish(self, verdict: Over) -> Sequence[JobInstruction | Own_co]:
        """The job is over: return what is to be done before that is said."""

    def validate(self) -> None:
        """Raise `AssertionError` if what is known does not fit together; for tests."""
