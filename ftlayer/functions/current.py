"""The record that a user's function works on now: how often it was tried, and since when it fails.

Nothing is done for a record that is not asked about: what is known of a batch's records is put down once a batch, and
which of them is meant is read from the loop's own progress.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Protocol

from ftlayer.common.checks import fast_dataclass
from ftlayer.errors import UnsupportedError
from ftlayer.functions.failures import I64
from ftlayer.records.ids import FIRST_TRY, U64Array, tries_or_first, unpacked


@fast_dataclass
class CurrentRecord:
    """Facts about a record beside its columns.

    Attributes:
        attempt: which run of it this is, from 1. A loss of a slot, an executor or the vertex counts for none.
        first_failed_at: when it first failed (UTC); None if it has not.
        origin: the id of its first attempt, the same in all of them, as the command shows it; None where
            records are not tracked.
    """

    attempt: int = 1
    first_failed_at: dt.datetime | None = None
    origin: str | None = None


class Known(Protocol):
    """Facts about n records: `Tries`, or the RecordIds of a batch in a topology."""

    def record(self, row: int) -> CurrentRecord:
        """Return what is known of one of them."""

    def tries(self, rows: I64) -> U64Array:
        """Return the tries (`ftlayer.records.ids`) of some of them."""


@fast_dataclass
class Tries:
    """`Known` of records with one root each; ``packed`` None: none of them has failed."""

    origins: U64Array | None
    packed: U64Array | None

    def record(self, row: int) -> CurrentRecord:
        origin = None if self.origins is None else int(self.origins[row])
        return record_of(FIRST_TRY if self.packed is None else int(self.packed[row]), origin)

    def tries(self, rows: I64) -> U64Array:
        return tries_or_first(None if self.packed is None else self.packed[rows], len(rows))

    def take(self, rows: I64) -> Tries:
        origins = None if self.origins is None else self.origins[rows]
        return Tries(origins, None if self.packed is None else self.packed[rows])


UNTRACKED = Tries(None, None)


@fast_dataclass
class _RunningBatch:
    """A batch whose functions run: what is known of its records, and which one they work on now.

    ``rows`` gives the batch's row of each row that the functions were given; None: they are the same.
    """

    known: Known
    row: Callable[[], int | None]
    rows: I64 | None


_running: ContextVar[_RunningBatch | None] = ContextVar("ftlayer_running", default=None)


@contextmanager
def running(known: Known, row: Callable[[], int | None], rows: I64 | None = None) -> Iterator[None]:
    """Let `current_record` answer meanwhile: ``row()`` is the row that a function works on, None while it is unknown.

    ``rows`` translates such a row to one of ``known``, if they are not the same.
    """
    token = begin_running(known, row, rows)
    try:
        yield
    finally:
        end_running(token)


def begin_running(
    known: Known, row: Callable[[], int | None], rows: I64 | None = None
) -> Token[_RunningBatch | None]:
    """Do as `running`, up to `end_running`: for those who run as many batches that a context manager is dear."""
    return _running.set(_RunningBatch(known, row, rows))


end_running = _running.reset


def for_calls() -> Callable[[int], None]:
    """Return what makes `current_record` answer, in the task of an asynchronous call, for the row that it is given."""
    found = _running.get()

    def begin(row: int) -> None:
        if found is not None:
            _running.set(_RunningBatch(found.known, lambda: row, found.rows))

    return begin


def has_failed_before() -> bool:
    """Whether the record that the calling function was called for failed before; False where there is no record."""
    found = _running.get()
    row = None if found is None else found.row()
    return found is not None and row is not None and current_record().first_failed_at is not None


def current_record() -> CurrentRecord:
    """Return what is known of the record that the calling function was called for.

    For a join's function it is the record of the two that was tried more often. Raises `UnsupportedError` where there
    is no single record: outside of a function of an operator, in one a batch at a time (``tagged=True`` gives it the
    columns ``_ft_attempt`` and ``_ft_first_failed_at``), in ``on_timer``, in a sink, in another thread.
    """
    found = _running.get()
    row = None if found is None else found.row()
    if found is None or row is None:
        raise UnsupportedError(
            "current_record(): there is no record here. It answers within a function that an operator calls for one "
            "record, in the thread of that call; a function of a batch has the columns '_ft_attempt' and "
            "'_ft_first_failed_at' with tagged=True, and timers, sinks and threads of your own have no record"
        )
    return found.known.record(row if found.rows is None else int(found.rows[row]))


def current_tries(rows: I64) -> U64Array:
    """Return the tries of rows of the batch that runs now; first tries where nothing is known."""
    found = _running.get()
    if found is None:
        return tries_or_first(None, len(rows))
    return found.known.tries(rows if found.rows is None else found.rows[rows])


def record_of(tries: int, origin: int | None) -> CurrentRecord:
    """Return a record's attempt and first failure from its packed form."""
    attempt, first_ms = unpacked(tries)
    first = dt.datetime.fromtimestamp(first_ms / 1_000, dt.UTC) if first_ms else None
    return CurrentRecord(attempt, first, None if origin is None else f"{origin:016x}")


def worst(one: CurrentRecord, other: CurrentRecord) -> CurrentRecord:
    """Return the one that was tried more often, the first of equals."""
    return other if other.attempt > one.attempt else one
