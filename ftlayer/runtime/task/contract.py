"""The interfaces of tasks. Every method returns the task's decisions, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.snapshots import Committable, SubtaskSnapshot
from ftlayer.checkpoint.storage.contract import PieceWriter
from ftlayer.clock import Now
from ftlayer.functions.chain import RowFailure
from ftlayer.records.ids import U64Array
from ftlayer.runtime.protocol.elements import Element
from ftlayer.runtime.task.actions import Action
from ftlayer.topology.job_graph import Channel
from ftlayer.vertex.calls import Records, SourcePosition


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


# ---------------------------------------------------------------- barrier mode


class PendingSnapshot(Protocol):
    """A task's snapshot between its synchronous part, which is over, and its end."""

    def write(self, writer: PieceWriter, cancelled: Callable[[], bool]) -> SubtaskSnapshot:
        """The asynchronous part; runs once, in another thread. ``channels`` and ``times`` are not filled in.

        Raises as `ftlayer.state.contract.Frozen.write`; any exception declines the checkpoint.
        """

    def release(self) -> None:
        """Give up what is kept for it; called once in the task's thread, behind `write` or in its place."""


class CheckpointedTask(Task, Protocol):
    """A task of a graph with checkpoints: every source task and every task with inputs is one.

    Its `start` restores what it was made with. Barriers never reach `InputTask.input`.
    """

    def snapshot(self, barrier: Barrier, now: Now) -> tuple[list[Action], PendingSnapshot]:
        """The synchronous part. The actions come before the barrier on the task's outputs.

        (They are `Send`s of what had to be flushed.) The caller sends the barrier on to all outputs by itself.
        """

    def completed(self, checkpoint: int, now: Now) -> None:
        """The checkpoint is complete, and its committables are committed."""

    def aborted(self, checkpoint: int, now: Now) -> None:
        """The checkpoint was given up: the next one has to hold what it would have held."""

    def discard(self, stands: int, acked: int) -> None:
        """The task goes away before its end: close everything, abort what no checkpoint can hold.

        ``stands`` is the latest checkpoint that may stand, ``acked`` the latest that the task has acknowledged: it is
        in none behind that, and in no savepoint either.
        """


class CheckpointedSource(CheckpointedTask, Protocol):
    """A source's task."""

    def rows(self, rows: SourceRows, now: Now) -> list[Action]:
        """Send rows at once; their position is the task's from now on."""

    def end(self, now: Now) -> list[Action]:
        """There are no more rows: send the last watermark (`MAX_TIME_MS`); barriers go on until `end_stream`."""

    def end_stream(self, now: Now) -> list[Action]:
        """Everything is committed: send `EndOfStream`, and end."""


class CommittingSinkBody(SinkBody, Protocol):
    """A sink whose rows become visible with the checkpoint that holds them."""

    def precommit(self, checkpoint: int) -> Callable[[], tuple[Committable, ...]]:
        """Set aside the rows so far, and return what writes them (in another thread, once).

        It returns every committable that this subtask has not been told to be committed, this checkpoint's last.
        """

    def completed(self, checkpoint: int) -> None:
        """All committables for checkpoints up to this one are committed."""

    def discard(self, restored: int) -> None:
        """Abort what was written for checkpoints behind ``restored``, and what is gathered."""
