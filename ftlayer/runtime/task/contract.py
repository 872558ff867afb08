"""The interfaces of tasks. Every method returns the task's decisions, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import pyarrow as pa

from ftlayer.clock import Now
from ftlayer.functions.chain import RowFailure
from ftlayer.records.ids import U64Array
from ftlayer.runtime.protocol.elements import Element
from ftlayer.runtime.task.actions import Action
from ftlayer.topology.job_graph import Channel
from ftlayer.vertex.calls import Records, SourcePosition

TaskKey: TypeAlias = tuple[str, int]
"""(uid of a chain, subtask)."""


class Task(Protocol):
    """One subtask of a chain."""

    uid: str
    subtask: int

    def start(self, now: Now) -> list[Action]:
        """Begin; called once, before anything else."""

    def on_time(self, now: Now) -> list[Action]:
        """Do what time brings (timers, idle sources, sinks that wait); early calls do no harm."""

    def accepted(self, ticket: int, now: Now) -> list[Action]:
        """The vertex has persisted what `PersistRoots` with this ticket asked for."""

    def held_roots(self) -> U64Array:
        """Return the roots of what the task holds on purpose (join buffers, unwritten rows of a sink), uint64[n].

        Called by another thread than the loop's: answers from values that are replaced, never changed.
        """


class InputTask(Task, Protocol):
    """A task with inputs."""

    def input(self, channel: Channel, element: Element, now: Now) -> list[Action]:
        """Take one element. Elements of one channel come in their order."""

    def reset(self, channel: Channel, now: Now) -> list[Action]:
        """The sender is gone and another one will begin afresh: forget what the channel said of watermark and end."""


class SourceTask(Task, Protocol):
    """A source's subtask: gets rows from a reader that runs beside the loop."""

    def rows(self, rows: SourceRows, now: Now) -> list[Action]:
        """Take rows that were read: persist them, and emit them once they are accepted."""

    def end(self, now: Now) -> list[Action]:
        """There are no more rows."""


class ReplayTask(Task, Protocol):
    """A `Replay`'s subtask."""

    def poll(self, now: Now) -> list[Action]:
        """Replays may be due: ask for them."""

    def replays(self, records: tuple[Records, ...], now: Now, *, held: bool = False) -> list[Action]:
        """The answer to `AskReplays`; ``held``: a circuit breaker holds what there may be beyond."""

    @property
    def is_asking(self) -> bool:
        """Whether there is none yet."""

    def hold(self) -> None:
        """Ask for nothing until `go_on`: a slot is away. What is answered goes out."""

    def go_on(self, now: Now) -> list[Action]:
        """All slots are there again."""

    def pause(self) -> None:
        """See `PauseIntake`, `ResumeIntake`, `AllowReplays` and `LetOut` in `ftlayer.runtime.protocol.messages`."""

    def resume(self, now: Now) -> list[Action]:
        """Ask again."""

    def allow(self, group: int, limit: int, now: Now) -> list[Action]:
        """Ask for so many; `ReplaysOut` follows."""

    def let_out(self, group: int, now: Now) -> list[Action]:
        """Send what was kept."""

    def end(self, now: Now) -> list[Action]:
        """Nothing is pending any more."""


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Rows of one split of a source, in their order.

    ``partition`` names the split over restarts, ``number`` is a small number of it within this run, and
    ``first_ordinal`` counts the rows this run has read of it before: both go into the root ids.
    ``position`` None: the source cannot rewind.
    """

    partition: str
    number: int
    first_ordinal: int
    payload: pa.RecordBatch
    position: SourcePosition | None


# ---------------------------------------------------------------- sinks


@dataclass(frozen=True, slots=True)
class Settled:
    """The first ``rows`` of the rows that a sink was given and has not settled are done, save ``failures``.

    ``RowFailure.row`` counts from the first of them.
    """

    rows: int
    failures: tuple[RowFailure, ...] = ()


class SinkBody(Protocol):
    """A sink made ready in a task (`ftlayer.runtime.connectors.sinks`). Settles rows in the order it got them."""

    def write(self, batch: pa.RecordBatch, mono_ms: int) -> Settled:
        """Take rows; they may be settled at once or later."""

    def flush(self, mono_ms: int, *, force: bool) -> Settled:
        """Write what has waited long enough (``force``: everything)."""

    @property
    def due_ms(self) -> int | None:
        """Monotone time (ms) at which `flush` has something to do; None while nothing waits."""

    def close(self) -> None:
        """Give resources up; called once at the end, after a forced flush."""
