"""One thread's rows on their way to the slot's loop: cut into batches by size or age, held back when it is busy.

An iterator of the user's may block for as long as it likes, and cannot be interrupted. So its thread collects
records where the loop can see them (`ftlayer.runtime.connectors.lane`), and the loop itself cuts off what has
grown too old. When it does, collecting ends with the very next record, so that this one's age begins when it comes.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from ftlayer.common.printable import text_of
from ftlayer.config import MIB
from ftlayer.errors import SourceChangedError, SourceRowError
from ftlayer.functions.conversion import (
    OTHER_CODE,
    array_of,
    cast_strictly,
    codes_of,
    column_of,
    in_order,
    plain_columns,
    schema_text,
)
from ftlayer.functions.failures import raise_signalled
from ftlayer.records.kernels import native
from ftlayer.runtime.connectors.offset_reader import PositionChain
from ftlayer.runtime.protocol.messages import Splits
from ftlayer.runtime.task.actions import SourceRows

MAX_SHOWN = 200
"""Characters of a row, and of what is wrong with it, that an error shows."""

MAX_KEPT = 1 << 20
"""Characters of a row that does not fit that its dead letter keeps."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+(?=>)")
_TUPLES = frozenset({tuple, list})
_END = object()


@dataclass(frozen=True, slots=True)
class Misfit:
    """A row that does not fit its source's schema, as its dead letter has it, and why; in a log with its ``offset``."""

    payload: pa.RecordBatch
    reason: str
    offset: int | None = None


def misfit_schema(schema: pa.Schema) -> pa.Schema:
    name = "row" if schema.names != ["row"] else "source_row"
    return pa.schema([pa.field(name, pa.string())])


class RowMaker:
    """Makes record batches of a source's ``schema``; what does not fit is a `SourceRowError` that shows the row.

    Records come as the functions of a topology take them: the bare value where the schema has one column, a
    tuple in column order where it has several, or a pyspark `Row` with the schema's names.
    """

    def __init__(self, source: str, schema: pa.Schema, offset_column: str = "") -> None:
        self._source = source
        self._schema = schema
        self._offset_column = offset_column
        self._bare = len(schema) == 1

    def batch(self, rows: Sequence[Any]) -> pa.RecordBatch:
        (part, *others) = self.parts(rows) or [self.empty()]
        for each in (part, *others):
            if isinstance(each, Misfit):
                raise SourceRowError(each.reason)
        return part if isinstance(part, pa.RecordBatch) and not others else self._convert(rows)

    def parts(self, rows: Sequence[Any]) -> list[pa.RecordBatch | Misfit]:
        try:
            return [self._convert(rows)] if rows else []
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001 - anything may be among what a source gives
            raise_signalled(error)
            if len(rows) == 1:
                return [self._misfit(rows[0], error)]
            half = len(rows) // 2
            return self.parts(rows[:half]) + self.parts(rows[half:])

    def collector(self, limit: int, expected: int) -> native.RecordCollector | None:
        """Return what makes columns of up to ``limit`` records while they come; None if it cannot.

        It takes what `batch` takes as plain values (`ftlayer.functions.conversion`), with room for ``expected``.
        """
        codes = codes_of(self._schema)
        if not (self._bare or len(codes) > 1) or OTHER_CODE in codes:
            return None
        nullable = bytes(field.nullable for field in self._schema)
        return native.RecordCollector(codes, nullable, limit, expected)

    def collected(self, collector: native.RecordCollector) -> pa.RecordBatch:
        rows, columns = collector.cut()
        arrays = [array_of(field.type, rows, each) for field, each in zip(self._schema, columns, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def checked(self, batch: pa.RecordBatch) -> list[pa.RecordBatch | Misfit]:
        """Return a batch of the source's in the schema's columns and types, each row that does not fit by itself."""
        same = sorted(batch.schema.names) == sorted(self._schema.names)
        try:
            if not same:
                raise ValueError(f"its columns are {', '.join(batch.schema.names)}")
            return [self._cast(batch)]
        except (ValueError, pa.ArrowException) as error:
            if batch.num_rows <= 1 or not same:
                return [self._misfit(row, error, batched=True) for row in batch.to_pylist()]
            half = batch.num_rows // 2
            return self.checked(batch.slice(0, half)) + self.checked(batch.slice(half))

    def _cast(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        schema = self._schema
        if not batch.schema.equals(schema, check_metadata=True):
            columns = [
                cast_strictly(batch.column(field.name), field.type, f"column {field.name!r}")
                for field in schema
            ]
            batch = pa.RecordBatch.from_arrays(columns, schema=schema)
        for field, column in zip(schema, batch.columns, strict=True):
            _with_nulls_allowed(column, field)
        return batch

    def empty(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([], schema=self._schema)

    # ------------------------------------------------------------ columns

    def _convert(self, rows: Sequence[Any]) -> pa.RecordBatch:
        takes_tuples = len(self._schema) > 1
        plain = plain_columns(rows, self._schema) if takes_tuples or self._bare else None
        if plain is not None:
            arrays = [
                column if isinstance(column, pa.Array) else self._array(column, place)
                for place, column in enumerate(plain)
            ]
            return pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        kinds = set(map(type, rows))
        if self._bare and not any(map(_is_row, kinds)):
            arrays = [strict_array(rows, self._schema.field(0), kinds)]
        else:
            arrays = [self._array(values, place) for place, values in enumerate(self._columns(rows, kinds))]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _columns(self, rows: Sequence[Any], kinds: set[type]) -> list[Sequence[Any]]:
        if kinds - _TUPLES:
            rows = self._by_name(rows)
            kinds = set(map(type, rows))
        for kind in kinds - _TUPLES:
            if not issubclass(kind, tuple):
                raise TypeError(f"a {kind.__name__} is not a tuple of {len(self._schema)} values")
        for length in set(map(len, rows)):
            if length != len(self._schema):
                raise ValueError(f"it has {length} values, and the schema {len(self._schema)} columns")
        return [list(map(itemgetter(place), rows)) for place in range(len(self._schema))]

    def _by_name(self, rows: Sequence[Any]) -> list[Any]:
        names = self._schema.names
        return [(row,) if self._bare and not _is_row(type(row)) else in_order(row, names) for row in rows]

    def _array(self, values: Sequence[Any], place: int) -> pa.Array:
        return strict_array(values, self._schema.field(place))

    # ------------------------------------------------------------ errors

    def _misfit(self, row: Any, error: BaseException, *, batched: bool = False) -> Misfit:
        """``batched``: the row is of a record batch, as a dict."""
        names = self._schema.names
        form = f"{names[0]!r} as a bare value" if self._bare else f"a tuple of {', '.join(names)}"
        reason = (
            f"source {self._source!r} gave {shown(row)}, which does not fit its schema "
            f"({schema_text(self._schema)}): {bounded(text_of(error))}"
        )
        if not batched:
            reason += (
                f". A record is {form}, or a Row with these names; a source gives records, or nothing but "
                "pyarrow.RecordBatches"
            )
        payload = pa.record_batch([[shown(row, MAX_KEPT)]], schema=misfit_schema(self._schema))
        return Misfit(payload, reason, self._offset_of(row))

    def _offset_of(self, row: Any) -> int | None:
        found = None
        if isinstance(row, dict):
            found = row.get(self._offset_column)
        elif isinstance(row, tuple | list) and self._offset_column:
            at = getattr(row, "__fields__", self._schema.names)
            place = at.index(self._offset_column) if self._offset_column in at else len(row)
            found = row[place] if place < len(row) else None
        return found if type(found) is int else None


class SparkRowMaker(RowMaker):
    """Takes what a Python Data Source's reader gives: tuples (of one value, too), lists, or `Row`s.

    Values that do not fit at once are bent as Spark bends them, and instants without a time zone are local
    ones, as in Spark: a reader gives the same records here and there.
    """

    def __init__(self, source: str, schema: pa.Schema, offset_column: str = "") -> None:
        super().__init__(source, schema, offset_column)
        self._bare = False
        self._converters: list[Callable[[Any], Any]] | None = None

    def _array(self, values: Sequence[Any], place: int) -> pa.Array:
        field = self._schema.field(place)
        if not _is_sparks_own(field.type):
            try:
                return strict_array(values, field)
            except (TypeError, ValueError, OverflowError, pa.ArrowException):
                pass  # Spark may know how to read it, and says so itself if it does not
        if self._converters is None:
            self._converters = _spark_converters(self._schema)
        convert = self._converters[place]
        return _with_nulls_allowed(pa.array([convert(value) for value in values], field.type), field)


def strict_array(values: Sequence[Any], field: pa.Field, kinds: set[type] | None = None) -> pa.Array:
    """Convert a column's values, which are of these ``kinds`` (None: not known).

    Raises also where Arrow would take a fraction for an integer, or a null too many.
    """
    if pa.types.is_integer(field.type) or pa.types.is_floating(field.type):
        kinds = kinds or set(map(type, values))
        # NumPy is twice as fast, and does not look what it takes for a number.
        if field.type == pa.int64() and kinds == {int}:
            return pa.array(np.fromiter(values, np.int64, len(values)))
        if field.type == pa.float64() and kinds == {float}:
            return pa.array(np.fromiter(values, np.float64, len(values)))
    return column_of(values, field)


def _with_nulls_allowed(array: pa.Array, field: pa.Field) -> pa.Array:
    if not field.nullable and array.null_count:
        raise ValueError(f"column {field.name!r} is null and may not be")
    return array


def slices(batch: pa.RecordBatch, max_rows: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """Cut a batch into parts of up to ``max_rows`` rows and about ``max_bytes`` bytes (one row at least)."""
    rows = batch.num_rows
    step = min(max_rows, rows)
    if batch.nbytes > max_bytes:
        step = min(step, max(1, max_bytes * rows // batch.nbytes))
    if step == rows:  # an empty one, too
        yield batch
        return
    for start in range(0, rows, step):
        yield batch.slice(start, step)


def skipped(items: Iterator[Any], rows: int, what: str) -> Iterator[Any]:
    """Return what is left of ``items`` (records or record batches) behind the first ``rows`` records.

    Raises `SourceChangedError` if there are fewer; ``what`` says of what.
    """
    left = rows
    while left:
        item = next(items, _END)
        if item is _END:
            break
        if not isinstance(item, pa.RecordBatch):
            # Counted in C.
            others = deque(enumerate(islice(items, left - 1), 1), maxlen=1)
            left -= 1 + (others[0][0] if others else 0)
            break
        if item.num_rows > left:
            return chain([item.slice(left)], items)
        left -= item.num_rows
    if left:
        raise SourceChangedError(
            f"{what} ends behind {rows - left} records now, and {rows} of it were read before: it was cut, made anew, "
            "or dealt into other parts. Give it back what it had; or give the source another uid, with which it is "
            "read from its start"
        )
    return items


def shown(row: Any, most: int = MAX_SHOWN) -> str:
    """Return what a row looks like, within bounds, and without addresses: it looks the same when it is read again."""
    try:
        text = _ADDRESS.sub("", repr(row))
    except BaseException as broken:  # noqa: BLE001 - a user's object may fail to describe itself
        raise_signalled(broken)
        text = f"a {type(row).__name__} (its repr raises {type(broken).__name__})"
    return bounded(text, most)


def bounded(text: str, most: int = MAX_SHOWN) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def _is_row(kind: type) -> bool:
    return kind.__name__ == "Row" and kind.__module__ == "pyspark.sql.types"


def _is_sparks_own(kind: pa.DataType) -> bool:
    """Whether Spark reads Python values of this type otherwise than Arrow does."""
    return pa.types.is_nested(kind) or (pa.types.is_timestamp(kind) and kind.tz is not None)


def _spark_converters(schema: pa.Schema) -> list[Callable[[Any], Any]]:
    from pyspark.sql.conversion import LocalDataToArrowConversion

    from ftlayer.functions.data_sources import from_arrow_schema

    make: Any = LocalDataToArrowConversion._create_converter
    return [make(field.dataType, field.nullable) for field in from_arrow_schema(schema).fields]


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


@dataclass
class SplitProgress:
    """How far a split has been read, and the `SourceRows` that say so.

    ``position_of(rows, done)`` is what the vertex keeps when ``rows`` of its rows are accepted. ``tells_done``:
    the end of the split is told with its last rows, or behind them with a batch of no rows. With ``offsets``, their
    column and the split's first one, ``rows`` counts offsets: a gap between rows is counted with the row behind it.
    ``beside``: those that are read in turns, this one among them, which goes by the name ``split`` there.
    """

    partition: str
    number: int
    rows: int
    chain: PositionChain
    position_of: Callable[[int, bool], bytes]
    _: KW_ONLY
    tells_done: bool
    offsets: tuple[str, int] | None = None
    beside: OpenSplits | None = None
    split: int | None = None

    def advance(self, part: pa.RecordBatch | Misfit, *, done: bool = False) -> SourceRows:
        first, places = self.rows, None
        name = self.number if self.split is None else self.split
        misfit = self.at(part) if isinstance(part, Misfit) else ""
        payload: pa.RecordBatch = part.payload if isinstance(part, Misfit) else part
        if self.offsets is None:
            self.rows += payload.num_rows
        elif isinstance(part, Misfit):
            assert part.offset is not None
            place = part.offset - self.offsets[1]
            self.rows = place + 1
            places = None if place == first else np.array([place], np.int64)
        elif payload.num_rows:
            column, start = self.offsets
            self.rows = payload.column(column)[-1].as_py() + 1 - start
            if self.rows - first != payload.num_rows:
                places = payload.column(column).to_numpy().astype(np.int64) - start
        position = self.chain.advance(self.partition, self.position_of(self.rows, done))
        splits = left = None if self.beside is None else self.beside.now
        if done and self.beside is not None:
            self.beside.end(name, empty=not self.rows)
            left = self.beside.now
        rows = self.partition, self.number, first, payload, position, places, done
        return SourceRows(*rows, splits, left, name, misfit)

    def can_pass(self, misfit: Misfit) -> bool:
        """Whether it is known where a row ends: in a log its offset tells, which grows."""
        offset = misfit.offset
        return self.offsets is None or (offset is not None and offset - self.offsets[1] >= self.rows)

    def at(self, misfit: Misfit) -> str:
        """Say of the next row what is wrong, and where it is."""
        of_log = self.offsets is not None and misfit.offset is not None
        place = f"offset {misfit.offset}" if of_log else f"row {self.rows}"
        return f"{place} of split {self.partition!r}: {misfit.reason}"


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
