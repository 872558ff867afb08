"""Records of a source as record batches of its schema: strictly, or as Spark would take it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.common.printable import text_of
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
    """Return the schema of the letters of rows that do not fit ``schema``, which is another one."""
    name = "row" if schema.names != ["row"] else "source_row"
    return pa.schema([pa.field(name, pa.string())])


class RowMaker:
    """Makes record batches of a source's ``schema``; what does not fit is a `SourceRowError` that shows the row.

    Records come as the functions of a topology take them: the bare value where the schema has one column, a
    tuple in column order where it has several, or a pyspark `Row` with the schema's names.
    """

    def __init__(self, source: str, schema: pa.Schema, offset_column: str = "") -> None:
        """``offset_column`` says where a row has its offset; "": it has none."""
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
    """Return the beginning of a text, and how long it is."""
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
