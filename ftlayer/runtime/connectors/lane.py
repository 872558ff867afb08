"""One thread's rows on their way to the slot's loop: cut into batches by size or age, held back when it is busy.

An iterator of the user's may block for as long as it likes, and cannot be interrupted. So its thread collects
records where the loop can see them (`ftlayer.runtime.connectors.lane`), and the loop itself cuts off what has
grown too old. When it does, collecting ends with the very next record, so that this one's age begins when it comes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from ftlayer.config import MIB
from ftlayer.errors import SourceRowError
from ftlayer.records.kernels import native
from ftlayer.runtime.connectors.offset_reader import PositionChain
from ftlayer.runtime.connectors.rows import Misfit, RowMaker, slices
from ftlayer.runtime.protocol.elements import Splits
from ftlayer.runtime.task.actions import SourceRows

_NOTHING: dict[None, Any] = {}


class Filling(Protocol):
    @property
    def left(self) -> list[Any]:
        """Return, behind `collect`, records that were read and are not in the batch: they begin the next one."""

    def collect(self, iterator: Iterator[Any]) -> bool:
        """Collect up to the limit, or until `interrupt`; return whether the iterator is known to have ended.

        Raises what the iterator raises; what came before is in.
        """

    def interrupt(self) -> None:
        """Have `collect` come back with the next record; any thread."""

    def cut(self) -> list[pa.RecordBatch | Misfit]:
        """Interrupt it, and take the records that have come, once; any thread."""


class PlainFilling:
    """Records become columns as they come, in C. `collect` ends also before a record that is not plain."""

    def __init__(self, maker: RowMaker, collector: native.RecordCollector) -> None:
        self._maker = maker
        self._collector = collector
        self.left: list[Any] = []

    def collect(self, iterator: Iterator[Any]) -> bool:
        self.left = self._collector.collect(iterator)
        return self._collector.ended

    def interrupt(self) -> None:
        self._collector.interrupt()

    def cut(self) -> list[pa.RecordBatch | Misfit]:
        return [self._maker.collected(self._collector)]


class RecordFilling:
    """Records of any kind, as Python objects.

    The list is filled by one call in C: ``rows.extend(map({}.get, tokens, iterator))`` yields the iterator's items as
    they are, one for each token, and asks for the token first. Without tokens the call comes back.
    """

    def __init__(self, maker: RowMaker, rows: Sequence[Any], limit: int) -> None:
        self._maker = maker
        self._rows = list(rows)
        self._taken = 0
        self._tokens: list[None] = [None] * (limit - len(rows))
        self._room = len(self._tokens)

    @property
    def left(self) -> list[Any]:
        return self._rows[self._taken :] if self._taken else []

    def collect(self, iterator: Iterator[Any]) -> bool:
        before = len(self._rows)
        self._rows.extend(map(_NOTHING.get, iter(self._tokens), iterator))
        return len(self._tokens) == self._room and len(self._rows) - before < self._room

    def interrupt(self) -> None:
        self._tokens.clear()

    def cut(self) -> list[pa.RecordBatch | Misfit]:
        self.interrupt()
        rows = self._rows[:]
        self._taken = len(rows)
        return self._maker.parts(rows)


READY_BATCHES = 2
"""Batches that wait for the loop before their thread has to."""

BATCH_BYTES = 4 * MIB
"""A batch is cut near this size, however few rows that are."""

# How many records are collected before their size is known, and how much more each time until it is.
_FIRST_ROWS = 16
_GROWTH = 4

_END = object()


@dataclass
class BatchLimits:
    """Batches have up to ``rows`` rows, whose first one waits for up to ``age_ms`` for others.

    ``rows`` may be changed at any time by the loop's thread; it is the next batches that obey. While ``waits`` is
    False, `take` gives what there is, however young. ``keeps_misfits``: a row that does not fit the schema is a batch
    of its own, which says why, and no error.
    """

    rows: int
    age_ms: int
    waits: bool = True
    keeps_misfits: bool = False


MOST_ENDS_TOLD = 16
"""Where more splits are open, what is told of them is told anew when half of them have ended: it names them all."""


class OpenSplits:
    """The splits of one range that a subtask reads in turns, and those that have nothing in this range.

    Attributes:
        now: what is told of them.
    """

    def __init__(self, splits: Iterable[int], quiet: Iterable[int] = ()) -> None:
        self._open = dict.fromkeys(splits)
        self._done: list[int] = []
        self._quiet = list(quiet)
        self.now = self._all()

    def end(self, split: int, *, empty: bool) -> None:
        """A split was read to its end; an ``empty`` one had nothing."""
        self._open.pop(split, None)
        (self._quiet if empty else self._done).append(split)
        if len(self._open) <= max(MOST_ENDS_TOLD, len(self.now.open) // 2):
            self.now = self._all()

    def _all(self) -> Splits:
        return Splits(tuple(self._open), tuple(self._done), tuple(self._quiet), endless=False)


class SplitProgress:
    """How far a split has been read, and the `SourceRows` that say so.

    ``position_of(rows, done)`` is what the vertex keeps when ``rows`` of its rows are accepted. ``tells_done``:
    the end of the split is told with its last rows, or behind them with a batch of no rows. With ``offsets``, their
    column and the split's first one, ``rows`` counts offsets: a gap between rows is counted with the row behind it.
    ``beside``: those that are read in turns, this one among them, which goes by the name ``split`` there.
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
        beside: OpenSplits | None = None,
        split: int | None = None,
    ) -> None:
        self._beside = beside
        self._split = number if split is None else split
        self.tells_done = tells_done
        self._offsets = offsets
        self._partition = partition
        self._number = number
        self._rows = rows
        self._chain = chain
        self._position_of = position_of

    def advance(self, part: pa.RecordBatch | Misfit, *, done: bool = False) -> SourceRows:
        first = self._rows
        places = None
        misfit = self.at(part) if isinstance(part, Misfit) else ""
        payload: pa.RecordBatch = part.payload if isinstance(part, Misfit) else part
        if self._offsets is None:
            self._rows += payload.num_rows
        elif isinstance(part, Misfit):
            assert part.offset is not None
            place = part.offset - self._offsets[1]
            self._rows = place + 1
            places = None if place == first else np.array([place], np.int64)
        elif payload.num_rows:
            column, start = self._offsets
            self._rows = payload.column(column)[-1].as_py() + 1 - start
            if self._rows - first != payload.num_rows:
                places = payload.column(column).to_numpy().astype(np.int64) - start
        position = self._chain.advance(self._partition, self._position_of(self._rows, done))
        splits = left = None if self._beside is None else self._beside.now
        if done and self._beside is not None:
            self._beside.end(self._split, empty=not self._rows)
            left = self._beside.now
        rows = self._partition, self._number, first, payload, position, places, done
        return SourceRows(*rows, splits, left, self._split, misfit)

    def can_pass(self, misfit: Misfit) -> bool:
        """Whether it is known where a row ends: in a log its offset tells, which grows."""
        offset = misfit.offset
        return self._offsets is None or (offset is not None and offset - self._offsets[1] >= self._rows)

    def at(self, misfit: Misfit) -> str:
        """Say of the next row what is wrong, and where it is."""
        of_log = self._offsets is not None and misfit.offset is not None
        place = f"offset {misfit.offset}" if of_log else f"row {self._rows}"
        return f"{place} of split {self._partition!r}: {misfit.reason}"


class LaneClosedError(Exception):
    """The loop wants no more of this lane; ends its thread."""


@dataclass
class _Open:
    """A batch of a split that is being collected; ``due_ms`` is None once the loop has cut it off."""

    filling: Filling
    split: SplitProgress
    due_ms: int | None


class PartitionLane:
    """Rows of splits, one after another or in turns. `pump` and `pieces` belong to its thread, all else to the loop's.

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
        self._open: _Open | None = None
        self._next_rows = min(_FIRST_ROWS, limits.rows)
        self._last_rows = 0
        self._is_plain = True  # as far as is known
        self._failure: BaseException | None = None
        self._finished = False
        self._closed = False

    def take(self, mono_ms: int) -> SourceRows | None:
        """Return the next rows, None if there are none now. Raises what ended the lane, behind its last rows."""
        with self._changed:
            current = self._open
            if not self._ready and current is not None and current.due_ms is not None:
                if current.due_ms > mono_ms and self._limits.waits:
                    return None
                current.due_ms = None
                try:
                    for part in self._parts(current.filling.cut()):
                        self._ready.append(self._advance(current.split, part, done=False))
                except SourceRowError as error:
                    # Nothing is read beyond it.
                    self._failure, self._closed = error, True
            if self._ready:
                self._changed.notify()
                return self._ready.popleft()
            if self._failure is not None:
                raise self._failure
            return None

    @property
    def due_ms(self) -> int | None:
        """When rows that are collected now have to be taken (monotone, ms); None while there are none."""
        current = self._open
        return None if current is None else current.due_ms

    @property
    def ended(self) -> bool:
        with self._changed:
            return (self._finished or self._closed) and not self._ready and self._failure is None

    def close(self, *, discard: bool) -> None:
        """Read no further. What waits in whole batches can still be taken, or is discarded too."""
        with self._changed:
            self._closed = True
            if discard:
                self._ready.clear()
                self._failure = None
            if self._open is not None:
                self._open.filling.interrupt()
                self._open = None
            self._changed.notify()

    def run(self, work: Callable[[], None]) -> None:
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
        for _ in self.pieces(items, split):
            pass

    def pieces(self, items: Iterable[Any], split: SplitProgress) -> Iterator[None]:
        """Read a split to its end, a batch at a time: others may have their turn between two of them.

        Raises `LaneClosedError`, and what the iterator raises behind its last rows.
        """
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
                        yield
                    continue
                rows = [first]
            rows, ended = self._collect(split, rows, iterator)
            if ended:
                return
            yield
        if split.tells_done:
            self._put(split, self._maker.empty(), done=True)

    def _collect(
        self, split: SplitProgress, rows: list[Any], iterator: Iterator[Any]
    ) -> tuple[list[Any], bool]:
        """Collect a batch that begins with ``rows``; return those that begin the next one, and whether the split ended.

        They came too late, or are none of those that it takes.
        """
        filling = self._filling(rows)
        current = _Open(filling, split, self._clock() + self._limits.age_ms)
        with self._changed:
            if self._closed:
                raise LaneClosedError
            self._open = current
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
            self._open = None
            was_cut = current.due_ms is None
        if was_cut and not ended and failure is None:
            return filling.left, False
        done = ended and split.tells_done
        parts = [] if was_cut else self._parts(filling.cut())
        if done and not parts:
            parts = [self._maker.empty()]
        for part in parts:
            self._put(split, part, done=done and part is parts[-1])
        if failure is not None:
            raise failure
        left = filling.left
        self._is_plain = self._is_plain and not left
        return left, ended

    def _filling(self, rows: list[Any]) -> Filling:
        """Begin a batch with ``rows``. Once a record was not plain, this lane's records stay Python objects."""
        limit = max(self._next_rows, len(rows))
        if self._is_plain:
            collector = self._maker.collector(limit, self._last_rows)
            if collector is not None and all(map(collector.put, rows)):
                return PlainFilling(self._maker, collector)
            self._is_plain = False
        return RecordFilling(self._maker, rows, limit)

    def _put(self, split: SplitProgress, part: pa.RecordBatch | Misfit, *, done: bool = False) -> None:
        with self._changed:
            while len(self._ready) >= READY_BATCHES and not self._closed:
                self._changed.wait()
            if self._closed:
                raise LaneClosedError
            idle = not self._ready
            self._ready.append(self._advance(split, part, done=done))
        if idle:
            self._wake()

    def _advance(self, split: SplitProgress, part: pa.RecordBatch | Misfit, *, done: bool) -> SourceRows:
        if isinstance(part, Misfit) and not (self._limits.keeps_misfits and split.can_pass(part)):
            raise SourceRowError(split.at(part))
        return split.advance(part, done=done)

    def _parts(self, made: list[pa.RecordBatch | Misfit]) -> list[pa.RecordBatch | Misfit]:
        """Cut batches to the limits, and learn from them how many rows to collect next time."""
        parts: list[pa.RecordBatch | Misfit] = []
        for each in made:
            if isinstance(each, Misfit):
                parts.append(each)
            elif each.num_rows:
                self._last_rows = each.num_rows
                fitting = max(1, BATCH_BYTES * each.num_rows // max(1, each.nbytes))
                self._next_rows = min(self._limits.rows, self._next_rows * _GROWTH, fitting)
                parts += slices(each, self._limits.rows, BATCH_BYTES)
        return parts
