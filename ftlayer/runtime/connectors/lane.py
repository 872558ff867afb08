"""One thread's rows on their way to the slot's loop: cut into batches by size or age, held back when it is busy.

An iterator of the user's may block for as long as it likes, and cannot be interrupted. So its thread collects
records in a list that the loop can see, and the loop itself cuts off what has grown too old. The list is
filled by one call in C: ``rows.extend(map({}.get, tokens, iterator))`` yields the iterator's items as they
are, one for each token, and asks for the token first. When the loop takes the tokens away, the call comes back
with the very next record, so that this one's age begins when it comes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ftlayer.config import MIB
from ftlayer.runtime.connectors.positions import PositionChain
from ftlayer.runtime.connectors.rows import RowMaker, slices
from ftlayer.runtime.task.events import SourceRows

READY_BATCHES = 2
"""Batches that wait for the loop before their thread has to."""

BATCH_BYTES = 4 * MIB
"""A batch is cut near this size, however few rows that are."""

# How many records are collected before their size is known, and how much more each time until it is.
_FIRST_ROWS = 16
_GROWTH = 4

_NOTHING: dict[None, Any] = {}
_END = object()


@dataclass
class BatchLimits:
    """Batches have up to ``rows`` rows, whose first one waits for up to ``age_ms`` for others.

    ``rows`` may be changed at any time by the loop's thread; it is the next batches that obey.
    """

    rows: int
    age_ms: int


class SplitProgress:
    """How far a split has been read, and the `SourceRows` that say so.

    ``position_of(rows, done)`` is what the vertex keeps when ``rows`` of its rows are accepted. ``tells_done``:
    the end of the split is told with its last rows, or behind them with a batch of no rows. With ``offsets``, their
    column and the split's first one, ``rows`` counts offsets: a gap between rows is counted with the row behind it.
    """

    def __init__(
        self,
        partition: str,
        number: int,
        rows: int,
        chain: PositionChain,
        position_of: Callable[[int, bool], bytes],
        *,
        tells_done: bool,
        offsets: tuple[str, int] | None = None,
    ) -> None:
        self.tells_done = tells_done
        self._offsets = offsets
        self._partition = partition
        self._number = number
        self._rows = rows
        self._chain = chain
        self._position_of = position_of

    def advance(self, payload: pa.RecordBatch, *, done: bool = False) -> SourceRows:
        """Count the rows, which are the next ones of the split."""
        first = self._rows
        if self._offsets is None:
            self._rows += payload.num_rows
        elif payload.num_rows:
            column, start = self._offsets
            self._rows = payload.column(column)[-1].as_py() + 1 - start
        position = self._chain.advance(self._partition, self._position_of(self._rows, done))
        return SourceRows(self._partition, self._number, first, payload, position)


class LaneClosedError(Exception):
    """The loop wants no more of this lane; ends its thread."""


class _Filling:
    """A batch that is being collected; ``taken`` of its rows have gone to the loop."""

    def __init__(self, split: SplitProgress, rows: list[Any], limit: int, due_ms: int) -> None:
        self.split = split
        self.rows = rows
        self.due_ms: int | None = due_ms
        self._taken = 0
        self._tokens: list[None] = [None] * (limit - len(rows))
        self._room = len(self._tokens)

    def collect(self, iterator: Iterator[Any]) -> bool:
        """Collect up to the limit, or until `interrupt`; return whether the iterator is known to have ended."""
        before = len(self.rows)
        self.rows.extend(map(_NOTHING.get, iter(self._tokens), iterator))
        return len(self._tokens) == self._room and len(self.rows) - before < self._room

    def interrupt(self) -> None:
        """Have `collect` come back with the next record."""
        self._tokens.clear()

    def cut(self) -> list[Any]:
        """Take the rows that have come since the last cut."""
        rows = self.rows[self._taken :]
        self._taken += len(rows)
        return rows


class PartitionLane:
    """Rows of one split after another. `pump` belongs to the lane's thread, all else to the loop's.

    ``wake`` is called, from the lane's thread, when there is something to `take`, a `due_ms`, or an end.
    """

    def __init__(
        self, maker: RowMaker, limits: BatchLimits, clock: Callable[[], int], wake: Callable[[], None]
    ) -> None:
        self._maker = maker
        self._limits = limits
        self._clock = clock
        self._wake = wake
        self._changed = threading.Condition()
        self._ready: deque[SourceRows] = deque()
        self._filling: _Filling | None = None
        self._next_rows = min(_FIRST_ROWS, limits.rows)
        self._failure: BaseException | None = None
        self._finished = False
        self._closed = False

    # ------------------------------------------------------------ the loop's side

    def take(self, mono_ms: int) -> SourceRows | None:
        """Return the next rows, None if there are none now. Raises what ended the lane, behind its last rows."""
        with self._changed:
            filling = self._filling
            if not self._ready and filling is not None and filling.due_ms is not None:
                if filling.due_ms > mono_ms:
                    return None
                filling.due_ms = None
                filling.interrupt()
                batch = self._maker.batch(filling.cut())
                self._ready.extend(map(filling.split.advance, self._parts(batch)))
            if self._ready:
                self._changed.notify()
                return self._ready.popleft()
            if self._failure is not None:
                raise self._failure
            return None

    @property
    def due_ms(self) -> int | None:
        """When rows that are collected now have to be taken (monotone, ms); None while there are none."""
        filling = self._filling
        return None if filling is None else filling.due_ms

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        with self._changed:
            return (self._finished or self._closed) and not self._ready and self._failure is None

    def close(self, *, discard: bool) -> None:
        """Read no further. What waits in whole batches can still be taken, or is discarded too."""
        with self._changed:
            self._closed = True
            if discard:
                self._ready.clear()
                self._failure = None
            if self._filling is not None:
                self._filling.interrupt()
                self._filling = None
            self._changed.notify()

    # ------------------------------------------------------------ the thread's side

    def run(self, work: Callable[[], None]) -> None:
        """Do all of the lane's ``work``, in its thread, and note how it ended."""
        try:
            work()
        except LaneClosedError:
            pass  # as it was told to
        except BaseException as error:  # noqa: BLE001 - the loop raises it; a thread's end would not be seen
            with self._changed:
                # What an iterator raises that is not read on is of no interest.
                if not self._closed:
                    self._failure = error
        finally:
            self._finished = True
            self._wake()

    def pump(self, items: Iterable[Any], split: SplitProgress) -> None:
        """Read a split to its end. Raises `LaneClosedError`, and what the iterator raises behind its last rows."""
        iterator = iter(items)
        rows: list[Any] = []
        while True:
            if not rows:
                first = next(iterator, _END)
                if first is _END:
                    break
                if isinstance(first, pa.RecordBatch):
                    if first.num_rows:
                        for part in self._parts(self._maker.checked(first)):
                            self._put(split, part)
                    continue
                rows = [first]
            rows, ended = self._collect(split, rows, iterator)
            if ended:
                return
        if split.tells_done:
            self._put(split, self._maker.empty(), done=True)

    def _collect(
        self, split: SplitProgress, rows: list[Any], iterator: Iterator[Any]
    ) -> tuple[list[Any], bool]:
        """Collect a batch that begins with ``rows``.

        Returns rows that came too late for it and begin the next one, and whether the split has ended.
        """
        limit = max(self._next_rows, len(rows))
        filling = _Filling(split, rows, limit, self._clock() + self._limits.age_ms)
        with self._changed:
            if self._closed:
                raise LaneClosedError
            self._filling = filling
            idle = not self._ready
        if idle:
            self._wake()
        failure: BaseException | None = None
        ended = False
        try:
            ended = filling.collect(iterator)
        except BaseException as error:  # noqa: BLE001 - raised again behind the rows that came before it
            failure = error
        with self._changed:
            self._filling = None
            rest = filling.cut()
            was_cut = filling.due_ms is None
        if was_cut and not ended and failure is None:
            return rest, False
        done = ended and split.tells_done
        if rest or done:
            parts = self._parts(self._maker.batch(rest))
            for part in parts[:-1]:
                self._put(split, part)
            self._put(split, parts[-1], done=done)
        if failure is not None:
            raise failure
        return [], ended

    def _put(self, split: SplitProgress, part: pa.RecordBatch, *, done: bool = False) -> None:
        with self._changed:
            while len(self._ready) >= READY_BATCHES and not self._closed:
                self._changed.wait()
            if self._closed:
                raise LaneClosedError
            idle = not self._ready
            self._ready.append(split.advance(part, done=done))
        if idle:
            self._wake()

    def _parts(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Cut a batch to the limits, and learn from it how many rows to collect next time."""
        if batch.num_rows:
            fitting = max(1, BATCH_BYTES * batch.num_rows // max(1, batch.nbytes))
            self._next_rows = min(self._limits.rows, self._next_rows * _GROWTH, fitting)
        return list(slices(batch, self._limits.rows, BATCH_BYTES))
