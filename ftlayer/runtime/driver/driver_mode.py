"""A mode's half in the driver: what it does beside `JobThread`, with what the rules of the mode want done."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from ftlayer.checkpoint.coordinator.events import CheckpointEvent
from ftlayer.checkpoint.coordinator.statistics import CheckpointCounts, CheckpointStats
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.checkpoint.storage.results import JobResult
from ftlayer.errors import ConfigError
from ftlayer.restart import RestartStrategy
from ftlayer.runtime.driver.crew import Crew
from ftlayer.runtime.driver.events import Event, JobState, Said
from ftlayer.runtime.driver.mode import JobMode, Own
from ftlayer.runtime.protocol.messages import ToSlot
from ftlayer.topology.job_graph import JobGraph
from ftlayer.vertex.calls import StreamStatus


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

    def history(self) -> tuple[CheckpointStats, ...]:
        """Checkpoints under way, and the last 100 others; the latest first."""

    def retained(self) -> tuple[str, ...]:
        """Where the checkpoints lie that the job may go back to, the oldest first; none in the driver's memory."""

    @property
    def unsent_letters(self) -> int:
        """Dead letters that wait to be sent to the vertex, or to be written where there is none."""

    def savepoint_location(self, directory: str) -> str:
        """Return the URL of a new savepoint in ``directory`` ("": the configured one); any thread."""

    def backlog(self, source: str, working_off: bool) -> None:
        """A reader source begins, or ceases, to work off a backlog."""


class DriverMode(Protocol[Own]):
    """One mode's half in the driver, for one job. Methods are of the job's thread, save what says otherwise."""

    @property
    def rules(self) -> JobMode[Own]:
        """They are the `JobCore`'s."""

    def before(self, said: Said) -> None:
        """A slot says something; the rules hear of it behind this."""

    def carry_out(self, instruction: Own) -> None:
        """Do what the rules want done."""

    def after(self, event: Event, state: JobState, now_ms: int) -> None:
        """An event has had its effect on the job, which is in ``state`` now."""

    def vertex_status(self) -> StreamStatus | None:
        """Ask the vertex how much there is to do; None without one, or without an answer. Any thread."""

    @property
    def checkpoint_counts(self) -> CheckpointCounts | None:
        """Totals; None without checkpoints. Any thread."""

    @property
    def result(self) -> JobResult | None:
        """How the job has ended, as it is kept with its checkpoints; None where it is not. Any thread."""

    @property
    def stopped_with(self) -> Checkpoint | None:
        """The savepoint that the job is stopped with, once that is complete; None for none. Any thread."""

    @property
    def checkpoints(self) -> CheckpointCalls:
        """The job's checkpoints; raises `ConfigError` where there are none. Any thread."""

    def end(
        self,
        state: JobState,
        take_events: Callable[[], None],
        close_by_s: float | None,
        *,
        interrupted: bool,
    ) -> None:
        """The job is over; slots and readers are still there. ``interrupted``: by Ctrl-C.

        ``take_events`` calls what `JobContext.later` was given meanwhile. What takes longer than until
        ``close_by_s``, of the monotone clock, is left to itself.
        """

    def close(self) -> None:
        """Slots and readers are gone."""

    def when_done(self, done: Callable[[], None]) -> None:
        """Call ``done`` once nothing is done in the job's name any more: now, or later by another thread."""


OpenMode = Callable[[JobContext], DriverMode[Any]]


def no_checkpoints(name: str) -> ConfigError:
    """Return the error for a topology that was asked for what is barrier mode's."""
    return ConfigError(
        f"{name!r} runs without checkpoints; give StreamEnvironment checkpointing=CheckpointConfig(…)"
    )
