"""The interfaces of tasks: events in, actions out, in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import pyarrow as pa

from ftlayer.clock import Now
from ftlayer.functions.chains.chain import RowFailure
from ftlayer.records.ids import U64Array
from ftlayer.runtime.task.actions import Action, TaskEvent

TaskKey: TypeAlias = tuple[str, int]
"""(uid of a chain, subtask)."""


class Task(Protocol):
    uid: str
    subtask: int

    def handle(self, event: TaskEvent, now: Now) -> list[Action]:
        """Take an event; `ProtocolError` for one that does not come to such a task."""

    def held_roots(self) -> U64Array:
        """Return the roots of what the task holds on purpose (join buffers, unwritten rows of a sink), uint64[n].

        Called by another thread than the loop's: answers from values that are replaced, never changed.
        """


class ReplayTask(Task, Protocol):
    @property
    def is_asking(self) -> bool:
        """Whether an answer to `AskReplays` is under way."""


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
