"""The interfaces of tasks: events in, actions out, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.common.checks import fast_dataclass
from ftlayer.common.clock import Now
from ftlayer.functions.current import UNTRACKED, CurrentRecord, Known, record_of
from ftlayer.functions.failures import I64
from ftlayer.records.failures import RowFailure
from ftlayer.records.ids import FIRST_TRY, U64Array, tries_or_first
from ftlayer.runtime.handler import origins_of
from ftlayer.runtime.protocol.messages import Conviction, RecordIds
from ftlayer.runtime.task.actions import Action, TaskEvent


class ChainCompanion:
    """A mode's part in one chain; by default nothing. Its `ChainTask` owns it, and calls it in its own thread."""

    def opened(self) -> None:
        """All functions are open: no state is declared any more."""

    def closed(self) -> None:
        """All functions are closed, at the chain's end."""

    def reports(self) -> list[Action]:
        """Return what is to be told of the records that failed, and that were settled, since the last call."""
        return []

    def loop_ended(self) -> list[Action]:
        return []

    def data_ended(self) -> list[Action]:
        """Return what is to be told of the end of the chain's data: no record comes, and none waits."""
        return []

    def tend(self, records: int, now: Now) -> list[Action]:
        """Do what is to be done between two calls of functions; the chain has just taken so many records."""
        return []

    @property
    def rest_ms(self) -> int | None:
        """None: all goes on. A number: nothing stirs by itself now, look again in so many ms.

        Timers do not fire then, and what comes back to the head of a loop waits.
        """
        return None


class NoCompanion(ChainCompanion):
    rest_ms: int | None = None


BoolArray = npt.NDArray[np.bool_]


def ids_mask(lineage: RecordIds, records: BoolArray) -> BoolArray:
    """Return which RecordIds belong to the records of a mask bool[n]: bool[m]."""
    return records if lineage.offsets is None else np.repeat(records, np.diff(lineage.offsets))


@fast_dataclass
class KnownOf:
    """`ftlayer.functions.current.Known` of a batch; of a record with several anchors, the one tried most often."""

    lineage: RecordIds

    def record(self, row: int) -> CurrentRecord:
        lineage = self.lineage
        first, last = (row, row + 1) if lineage.offsets is None else lineage.offsets[row : row + 2].tolist()
        # The attempt is in the high bits.
        worst = 0 if lineage.tries is None else int(np.argmax(lineage.tries[first:last]))
        tries = FIRST_TRY if lineage.tries is None else int(lineage.tries[first + worst])
        return record_of(tries, int(origins_of(lineage)[first + worst]))

    def tries(self, rows: I64) -> U64Array:
        lineage = self.lineage
        if lineage.tries is None:
            return tries_or_first(None, len(rows))
        if lineage.offsets is None:
            return lineage.tries[rows]
        return np.maximum.reduceat(lineage.tries, lineage.offsets[:-1])[rows]


def known_of(lineage: RecordIds | None) -> Known:
    """Return what the functions of a chain may ask of a batch's records."""
    return UNTRACKED if lineage is None else KnownOf(lineage)


def replayed(lineage: RecordIds) -> BoolArray:
    """Return which records come from a replay (by any of their anchors): bool[n]."""
    if lineage.origins is None:
        return np.zeros(len(lineage), np.bool_)
    again: BoolArray = lineage.origins != lineage.roots
    if lineage.offsets is None:
        return again
    result = np.zeros(len(lineage), np.bool_)
    result[lineage.record_of[again]] = True
    return result


DIGEST_BYTES = 16
UNKNOWN_RECORD = bytes(DIGEST_BYTES)


class RecordNotes(Protocol):
    """Where a process notes the one record that it has in hand, or the chain that runs: the note outlives it."""

    def about_to(self, chain: str, digest: bytes) -> None:
        """This one is next. `UNKNOWN_RECORD`: one of a batch's."""

    def over(self) -> None:
        """None is."""


class Suspects:
    """One subtask's; by default nothing is suspected, and nothing noted.

    Rows are of the chain's input with the number ``input``, as they came.
    """

    @property
    def one_at_a_time(self) -> bool:
        """Whether rows go through the chain and its outlet one by one, each between `about_to` and `over`.

        So do timers, by `fires`.
        """
        return False

    def convicted(self, payload: pa.RecordBatch, input: int = 0) -> Sequence[tuple[int, Conviction]]:
        """Return the rows that must not come to user code again, ascending: the caller makes them dead letters.

        Asked again for the same rows, it says the same.
        """
        return ()

    def about_to(self, payload: pa.RecordBatch, row: int = 0, input: int = 0) -> None:
        """This row is next to go to user code."""

    @property
    def looks_at_timers(self) -> bool:
        """Whether `fires` is to be asked of each timer."""
        return False

    def fires(self, operator: str, kind: str, key: Any, time_ms: int) -> Conviction | None:
        """This timer is next to be fired; a convicted one must not be."""
        return None

    def over(self) -> None:
        """The row, or the timer, has passed, or failed."""

    def snapshot(self, checkpoint: int) -> tuple[bytes, ...]:
        """Return the digests of rows that `convicted` has named: this checkpoint is going to hold them as dead.

        Those that are left out are in a checkpoint that is known to be complete.
        """
        return ()

    def completed(self, checkpoint: int, read: int) -> None:
        """A checkpoint is complete, in which sources have read so many records."""


NO_SUSPECTS = Suspects()
"""Of a chain without a failure policy, and of a job in which nothing is suspected."""


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


@fast_dataclass
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


class _NoNotes:
    def about_to(self, chain: str, digest: bytes) -> None:
        """No process would read it."""

    def over(self) -> None:
        """Nothing was noted."""


NO_NOTES: RecordNotes = _NoNotes()
