"""What a mode decides of a job's life: `JobCore` owns one. No I/O, no threads, no clock."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from ftlayer.checkpoint.coordinator.events import CheckpointEvent
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.checkpoint.storage.loading import JobResult
from ftlayer.common.rules.restart import RestartStrategy
from ftlayer.errors import ConfigError, FTLayerError
from ftlayer.runtime.driver.rules.events import Crew, Event, JobInstruction, JobState, Over, Said, SlotRecord
from ftlayer.runtime.driver.rules.job_status import IsolationStatus
from ftlayer.runtime.protocol.messages import FromSlot, ToSlot
from ftlayer.topology.job_graph import JobGraph
from ftlayer.vertex.calls import CheckpointDetails, CheckpointTotals, StreamStatus


@dataclass(frozen=True, slots=True)
class StopJob:
    """The job comes to its end, with this verdict. ``reason`` is what slots are told."""

    verdict: Over
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FailureNoted:
    """This is the job's last failure. ``again``: which counted restart comes of it, and when; "" for none.

    ``ended_itself``: it is how a slot's process has ended, which the slot's loss may have said.
    """

    reason: str
    again: str = ""
    ended_itself: bool = False


@dataclass(frozen=True, slots=True)
class LossesForgiven:
    """The losses so far were a record's doing: the restart strategy of slots begins afresh."""


Own = TypeVar("Own")
Own_co = TypeVar("Own_co", covariant=True)
"""Instructions of the mode alone: `DriverMode` carries them out."""

ModeInstruction: TypeAlias = JobInstruction | StopJob | FailureNoted | LossesForgiven | Own
"""Three are for `JobCore` itself, which carries them out before anything else happens."""


def failed(error: FTLayerError) -> StopJob:
    return StopJob(Over(JobState.FAILED, error), str(error).partition("\n")[0])


class JobMode(Generic[Own_co]):
    """One mode's rules for one execution of a job. Times are of one monotone clock (ms).

    It knows the slots by the `Crew` that it shares with `JobCore`. Once the job stops it is asked for its `last_wish`
    and for nothing else.

    Attributes:
        slot_restart: says when the process of a slot that is lost is replaced.
        epoch: how often tasks were told to begin anew.
        is_ending: whether everything is done, and the tasks were told to end.
    """

    slot_restart: RestartStrategy
    epoch = 0
    is_ending = False

    def __init__(self, crew: Crew, run: str) -> None:
        self._crew = crew
        self._run = run

    @property
    def restarts(self) -> int:
        """How often something that ran was started again, as the restart strategy counts it."""
        return 0

    @property
    def has_begun(self) -> bool:
        """Whether all tasks have been told to start."""
        return self.epoch > 0

    @property
    def was_lost(self) -> bool:
        """Whether something was lost that ran."""
        return False

    @property
    def never_ran(self) -> bool:
        """Whether a failure that its slot says is a lasting one ends the job."""
        return self.epoch == 1

    @property
    def is_complete(self) -> bool:
        """Whether no slot is being replaced."""
        return self._crew.all_deployed

    @property
    def state(self) -> JobState | None:
        """Where the job is, before it has begun or while all tasks are up; None if nothing is the matter."""
        return None

    @property
    def isolation(self) -> IsolationStatus | None:
        """How far the search for a record that ends processes is; None while there is none."""
        return None

    def begin(self) -> Sequence[ModeInstruction[Own_co]]:
        """The job begins; the slots are submitted behind this."""
        return []

    def handle(self, event: Event, now_ms: int) -> Sequence[ModeInstruction[Own_co]]:
        """Take an event that `JobCore` does not know; `Tick` too."""
        return []

    def heard(self, slot: SlotRecord, message: FromSlot, now_ms: int) -> Sequence[ModeInstruction[Own_co]]:
        """The connected instance of a slot says something that is no failure; its Hello comes first."""
        return []

    @abstractmethod
    def lost(self, slot: SlotRecord, now_ms: int, *, alone: bool) -> Sequence[ModeInstruction[Own_co]]:
        """An instance is lost that ran; ``alone``: all others were deployed."""

    def lost_before(self) -> None:
        """An instance is lost that was not told to start."""

    @abstractmethod
    def go_on(self, now_ms: int) -> Sequence[ModeInstruction[Own_co]]:
        """Do what has become possible: start tasks, look for the end. Called behind each event."""

    def explained(self, error: FTLayerError) -> FTLayerError:
        """Return why the job ends when a slot is not submitted any more."""
        return error

    def last_wish(self, verdict: Over) -> Sequence[JobInstruction | Own_co]:
        """The job is over: return what is to be done before that is said."""
        return []

    def validate(self) -> None:
        """Raise `AssertionError` if what is known does not fit together; for tests."""


@dataclass(frozen=True)
class JobContext:
    """What a mode's half in the driver is given of its job.

    Attributes:
        run: names the execution.
        restart: is of this job alone.
        happened: takes an event for the rules of the job; any thread.
        later: has a function called in the job's thread; any thread.
        tell: sends to a slot, if it runs its tasks; the job's thread.
    """

    run: str
    graph: JobGraph
    restart: RestartStrategy
    crew: Crew
    happened: Callable[[Event], None]
    later: Callable[[Callable[[], None]], None]
    tell: Callable[[int, ToSlot], None]


class CheckpointCalls(Protocol):
    """What users may ask of a job's checkpoints. The job's thread, save what says otherwise."""

    def request(self, ask: Callable[[int], CheckpointEvent], answer: Future[Checkpoint]) -> None:
        """Have a request carried out, whose event ``ask`` makes by its number; ``answer`` gets what became of it."""

    def history(self) -> tuple[CheckpointDetails, ...]:
        """Checkpoints under way, and the last 100 others; the latest first. Any thread."""

    @property
    def unsent_letters(self) -> int:
        """Dead letters that wait to be sent to the vertex, or to be written where there is none. Any thread."""

    def savepoint_location(self, directory: str) -> str:
        """Return the URL of a new savepoint in ``directory`` ("": the configured one); any thread."""

    def backlog(self, source: str, working_off: bool) -> None:
        """A reader source begins, or ceases, to work off a backlog."""


class DriverMode(Generic[Own]):
    """One mode's half in the driver, for one job. Methods are of the job's thread, save what says otherwise.

    Its ``rules`` are the `JobCore`'s.
    """

    rules: JobMode[Own]

    def __init__(self, job: JobContext) -> None:
        self._job = job

    def before(self, said: Said) -> None:
        """A slot says something; the rules hear of it behind this."""

    @abstractmethod
    def carry_out(self, instruction: Own) -> None:
        """Do what the rules want done."""

    def after(self, event: Event, state: JobState, now_ms: int) -> None:
        """An event has had its effect on the job, which is in ``state`` now."""

    def vertex_status(self) -> StreamStatus | None:
        """Ask the vertex how much there is to do; None without one, or without an answer. Any thread."""
        return None

    @property
    def checkpoint_counts(self) -> CheckpointTotals | None:
        """Totals; None without checkpoints. Any thread."""
        return None

    @property
    def result(self) -> JobResult | None:
        """How the job has ended, as it is kept with its checkpoints; None where it is not. Any thread."""
        return None

    @property
    def stopped_with(self) -> Checkpoint | None:
        """The savepoint that the job is stopped with, once that is complete; None for none. Any thread."""
        return None

    @property
    def checkpoints(self) -> CheckpointCalls:
        """The job's checkpoints; raises `ConfigError` where there are none. Any thread."""
        raise no_checkpoints(self._job.graph.name)

    def end(
        self, state: JobState, take_events: Callable[[], None], close_by_s: float | None, *, interrupted: bool
    ) -> None:
        """The job is over; slots and readers are still there. ``interrupted``: by Ctrl-C.

        ``take_events`` calls what `JobContext.later` was given meanwhile. What takes longer than until
        ``close_by_s``, of the monotone clock, is left to itself.
        """

    def close(self) -> None:
        """Slots and readers are gone."""

    def when_done(self, done: Callable[[], None]) -> None:
        """Call ``done`` once nothing is done in the job's name any more: now, or later by another thread."""
        done()


OpenMode = Callable[[JobContext], DriverMode[Any]]


def no_checkpoints(name: str) -> ConfigError:
    return ConfigError(
        f"{name!r} runs without checkpoints; give StreamEnvironment checkpointing=CheckpointConfig(…)"
    )
