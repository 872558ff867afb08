"""Records that come by callback: `push` waits until they are persisted."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ftlayer.checks import check_ran, shown
from ftlayer.config import MIB
from ftlayer.errors import SourceError, SourceRowError
from ftlayer.functions.conversion import concat, schema_text
from ftlayer.printable import text_of
from ftlayer.runtime.connectors.lane import BATCH_BYTES, BatchLimits
from ftlayer.runtime.connectors.rows import RowMaker, slices
from ftlayer.runtime.protocol.messages import AssignSplits, SplitDone
from ftlayer.runtime.task.events import SourceRows, TakenRows
from ftlayer.topology.operators import PushSource, Source

MAX_WAITING_BYTES = 16 * MIB
"""Records that wait for the loop; beyond that `PushReader.push_async` waits too."""


class _Pushed:
    """The records of one call; ``over`` is done when all of them are accepted, or raises."""

    def __init__(self, rows: int) -> None:
        self._missing = rows
        self.over: Future[None] = Future()
        # Else it could be cancelled, and what is on its way cannot.
        self.over.set_running_or_notify_cancel()

    def accepted(self, rows: int) -> None:
        self._missing -= rows
        if not self._missing:
            self.over.set_result(None)

    def fail(self, error: SourceError) -> None:
        # Its other parts may have done so.
        if not self.over.done():
            self.over.set_exception(error)


@dataclass(frozen=True)
class _PushedBatch:
    """Rows of one push that travel together."""

    pushed: _Pushed
    payload: pa.RecordBatch


class PushReader:
    """A subtask of a `PushSource`. Pushes of several threads travel together while the loop is busy.

    What was pushed cannot be had again: there are no positions. A push that was not answered when its slot got
    lost may have been persisted or not.
    """

    lag: int | None = None
    """See `SourceReader.lag`; there is none: senders wait."""
    is_away = False
    """See `SourceReader.is_away`; senders come here."""

    def __init__(self, source: Source, subtask: int, limits: BatchLimits, wake: Callable[[], None]) -> None:
        assert isinstance(source.connector, PushSource)
        self._uid = source.uid
        self._subtask = subtask
        self._start = source.connector.start
        self._maker = RowMaker(source.uid, source.schema)
        self._schema = source.schema
        self._limits = limits
        self._wake = wake
        # Another instance of this subtask numbers other records: its roots must not be these.
        self._number = secrets.randbits(48)
        self._rows = 0
        self._changed = threading.Condition()
        self._waiting: deque[_PushedBatch] = deque()
        self._waiting_bytes = 0
        self._pushed_rows = 0
        self._taken: dict[int, list[_PushedBatch]] = {}
        self._refusal: SourceError | None = None
        self._failure: SourceError | None = None
        self._stopper: Callable[[], None] | None = None

    def start(self) -> None:
        """See `SourceReader.start`. The user's function runs in a thread: it may stay in it and push."""
        self._in_thread(self._run)

    def assign(self, splits: AssignSplits) -> None:
        raise SourceError(f"source {self._uid!r} is pushed to and was assigned a reader's splits")

    def take(self, mono_ms: int) -> SourceRows | None:
        with self._changed:
            parts = list(self._next_parts())
            if parts:
                first, rows = self._rows, sum(part.payload.num_rows for part in parts)
                self._rows += rows
                self._taken[first] = parts
                self._waiting_bytes -= sum(part.payload.nbytes for part in parts)
                self._changed.notify_all()
            elif self._failure is not None:
                raise self._failure
            else:
                return None
        payload = concat([part.payload for part in parts], self._schema)
        return SourceRows(f"push-{self._subtask}", self._number, first, payload, None)

    @property
    def due_ms(self) -> int | None:
        return None

    def accepted(self, rows: TakenRows) -> SplitDone | None:
        """See `SourceReader.accepted`; whose rows are all accepted may go on."""
        for part in self._taken.pop(rows.first_ordinal):
            part.pushed.accepted(part.payload.num_rows)
        return None

    @property
    def ended(self) -> bool:
        with self._changed:
            return self._refusal is not None and self._failure is None and not self._waiting

    def finish(self) -> None:
        """See `SourceReader.finish`. Who pushes from here on gets a `SourceError`."""
        self._refuse(SourceError(f"source {self._uid!r} has been told to end: nothing was taken"))

    def stop(self) -> None:
        """See `SourceReader.stop`. Pushes that wait get a `SourceError`: their records may be persisted or not."""
        self._refuse(SourceError(f"source {self._uid!r} has ended: nothing was taken"))
        with self._changed:
            waiting, taken = list(self._waiting), list(itertools.chain(*self._taken.values()))
            self._waiting.clear()
            self._taken.clear()
        lost = SourceError(
            f"source {self._uid!r} ended before these records were known to be persisted; they may be or not"
        )
        for part in (*waiting, *taken):
            part.pushed.fail(lost)

    def abandon(self) -> None:
        """See `SourceReader.abandon`; pushes of other threads are answered as they are accepted."""
        with self._changed:
            self._failure = None

    # ------------------------------------------------------------ the user's threads

    def __call__(self, records: list[Any]) -> None:
        self.push_async(records).result()

    def push_async(self, records: list[Any]) -> Future[None]:
        if not isinstance(records, list | tuple):
            raise SourceRowError(
                f"source {self._uid!r}: push takes a list of records of its schema ({schema_text(self._schema)}), got "
                f"{shown(records)}"
            )
        batch = self._maker.batch(records) if records else self._maker.empty()
        pushed = _Pushed(batch.num_rows)
        with self._changed:
            while self._waiting_bytes > MAX_WAITING_BYTES and self._refusal is None:
                self._changed.wait()
            if self._refusal is not None:
                raise self._refusal
            if not records:
                pushed.accepted(0)
                return pushed.over
            parts = [_PushedBatch(pushed, part) for part in slices(batch, self._limits.rows, BATCH_BYTES)]
            self._waiting.extend(parts)
            self._waiting_bytes += sum(part.payload.nbytes for part in parts)
            self._pushed_rows += batch.num_rows
        self._wake()
        return pushed.over

    def _run(self) -> None:
        try:
            stopper = self._start(self)
            check_ran(stopper, "it")
        except BaseException as error:  # noqa: BLE001 - the loop raises it; a thread's end would not be seen
            self._fail(error)
            return
        with self._changed:
            late = self._refusal is not None
            self._stopper = None if late else stopper
        if late and stopper is not None:
            stopper()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            when = f"after {self._pushed_rows} records" if self._pushed_rows else "before its first record"
            failure = SourceError(
                f"source {self._uid!r}: its listener raised {when}: {type(error).__name__}: {text_of(error)}"
            )
            failure.__cause__ = error
            if self._refusal is None:
                self._refusal = self._failure = failure
            self._changed.notify_all()
        self._wake()

    # ------------------------------------------------------------ the loop's thread

    def _next_parts(self) -> Iterator[_PushedBatch]:
        """Take parts that have room in one batch, the first in any case."""
        rows = size = 0
        while self._waiting:
            payload = self._waiting[0].payload
            rows += payload.num_rows
            size += payload.nbytes
            if rows > payload.num_rows and (rows > self._limits.rows or size > BATCH_BYTES):
                return
            yield self._waiting.popleft()

    def _refuse(self, refusal: SourceError) -> None:
        with self._changed:
            if self._refusal is None:
                self._refusal = refusal
            self._changed.notify_all()
            stopper, self._stopper = self._stopper, None
        self._wake()
        if stopper is not None:
            # It may wait for a push that waits for the loop.
            self._in_thread(stopper)

    def _in_thread(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=f"ftlayer-{self._uid}-{self._subtask}", daemon=True).start()
