"""Records between Arrow and Python: what cannot be converted is found, row by row, and never bent to fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from pyarrow.lib import string_to_tzinfo

from ftlayer.functions.plain import plain_columns, read_plain
from ftlayer.functions.steps import Record
from ftlayer.printable import text_of as text_of


class Form(Protocol):
    """The form in which a user's function gets a record."""

    def read(self, batch: pa.RecordBatch) -> Sequence[Any]:
        """Return the rows as records; one of `UNREADABLE` if Python cannot hold a value of them."""

    def columns(self, rows: Sequence[Any], schema: pa.Schema) -> Sequence[Sequence[Any] | pa.Array]:
        """Return the columns of records, to be converted as the schema says; TypeError for what is no record.

        One that is an Arrow array fits its field already.
        """

    def results(self, returned: Any) -> Iterable[Any]:
        """Return what a flat_map returned, to iterate over; TypeError for what is not meant as many records."""

    def expected(self, schema: pa.Schema) -> str:
        """Say what a function has to return."""


NO_RECORDS = (str, bytes, dict)
"""Types that can be iterated over, and are hardly meant as many records."""

_EPOCH = datetime(1970, 1, 1)
_UTC = string_to_tzinfo("UTC")

UNREADABLE = (ValueError, OverflowError, pa.ArrowException)
"""Spark takes strings that are not UTF-8, and dates past the year 9999."""


class _Dicts:
    """A dict from column to value. A column that a dict lacks is null, one that the schema lacks is left out."""

    def read(self, batch: pa.RecordBatch) -> Sequence[Record]:
        rows: list[Record] = batch.to_pylist()
        return rows

    def columns(self, rows: Sequence[Any], schema: pa.Schema) -> Sequence[Sequence[Any]]:
        for kind in set(map(type, rows)):
            if not issubclass(kind, Mapping):
                raise TypeError(f"a {kind.__name__} is not a dict")
        return [self._column(rows, name) for name in schema.names]

    def _column(self, rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
        try:
            return list(map(itemgetter(name), rows))
        except KeyError:
            return [row.get(name) for row in rows]

    def results(self, returned: Any) -> Iterable[Any]:
        # An iterator may yield one dict again and again, changed.
        return returned if isinstance(returned, list | tuple) else _copied(returned)

    def expected(self, schema: pa.Schema) -> str:
        return "a function returns a dict with these columns (flat_map: an iterable of them)"


def _copied(returned: Iterable[Any]) -> Iterator[Any]:
    for result in returned:
        yield result.copy() if type(result) is dict else result


class _Values:
    """The bare value of a single column, a tuple in the columns' order of several."""

    def read(self, batch: pa.RecordBatch) -> Sequence[Any]:
        plain = read_plain(batch)
        if plain is not None:
            return plain
        columns = [python_values(column) for column in batch.columns]
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def columns(self, rows: Sequence[Any], schema: pa.Schema) -> Sequence[Sequence[Any] | pa.Array]:
        plain = plain_columns(rows, schema)
        if plain is not None:
            return plain
        width = len(schema)
        if width == 1:
            return [rows]
        if not rows:
            return [()] * width
        for kind in set(map(type, rows)):
            if not issubclass(kind, tuple):
                raise TypeError(f"a {kind.__name__} is not a tuple of {width} values")
        for length in set(map(len, rows)):
            if length != width:
                raise TypeError(f"a tuple of {length} values is not one of {width}")
        return [list(map(itemgetter(place), rows)) for place in range(width)]

    def results(self, returned: Any) -> Iterable[Any]:
        if isinstance(returned, NO_RECORDS):
            raise TypeError(
                f"expected an iterable of records, got a {type(returned).__name__}; wrap it in a list"
            )
        results: Iterable[Any] = returned
        return results

    def expected(self, schema: pa.Schema) -> str:
        one = "the bare value" if len(schema) == 1 else f"a tuple of {len(schema)} values in this order"
        return f"a function returns {one} (flat_map and process: an iterable of them)"


DICTS: Form = _Dicts()
VALUES: Form = _Values()


def records_of(batch: pa.RecordBatch) -> Sequence[Record | Exception]:
    """Return the rows as dicts; in the place of one that Python cannot hold, why."""
    return records_in_form(batch, DICTS)


def records_in_form(batch: pa.RecordBatch, form: Form) -> Sequence[Any]:
    """Return the rows as records; in the place of one that Python cannot hold, an `Exception` that says why."""
    try:
        return form.read(batch)
    except UNREADABLE:
        return [_record(batch.slice(row, 1), form) for row in range(batch.num_rows)]


def _record(row: pa.RecordBatch, form: Form) -> Any:
    try:
        return form.read(row)[0]
    except UNREADABLE as error:
        name = next((name for name in row.schema.names if not _is_readable(row.column(name))), "?")
        return ValueError(f"column {name!r} of the record cannot be read in Python: {text_of(error)}")


def _is_readable(column: pa.Array) -> bool:
    try:
        python_values(column)
    except UNREADABLE:
        return False
    return True


def python_values(column: pa.Array) -> list[Any]:
    """Return a column's values as its ``to_pylist`` does; timestamps, which that takes microseconds for, sooner."""
    kind = column.type
    # Python has no nanoseconds.
    if not pa.types.is_timestamp(kind) or kind.unit == "ns":
        values: list[Any] = column.to_pylist()
        return values
    since = column.to_numpy(zero_copy_only=False).view(f"m8[{kind.unit}]").tolist()
    # NumPy has numbers for what is too far for Python, and takes the least of all for a null.
    if int in set(map(type, since)) or since.count(None) != column.null_count:
        raise OverflowError("a time lies outside the years 1 to 9999")
    epoch = _EPOCH if kind.tz is None else _EPOCH.replace(tzinfo=_UTC)
    times = [None if span is None else epoch + span for span in since]
    if kind.tz is None or kind.tz == "UTC":
        return times
    zone = string_to_tzinfo(kind.tz)
    return [time and time.astimezone(zone) for time in times]


def to_batch(rows: Sequence[Any], schema: pa.Schema, form: Form = DICTS) -> pa.RecordBatch:
    """Convert records of a form.

    Raises `TypeError`, `ValueError` or an Arrow error for what does not fit, where Arrow's own conversion
    takes some silently: strings and lists for rows, fractions for integers, nulls where there may be none.
    """
    columns = []
    for field, values in zip(schema, form.columns(rows, schema), strict=True):
        columns.append(values if isinstance(values, pa.Array) else column_of(values, field))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def column_of(values: Sequence[Any], field: pa.Field) -> pa.Array:
    """Convert the values of a column; raises as `to_batch`."""
    if pa.types.is_integer(field.type):
        check_whole(values, field.name)
    column = pa.array(values, field.type)
    if not field.nullable and column.null_count:
        raise ValueError(f"column {field.name!r} is null and may not be")
    return column


def check_whole(values: Sequence[Any], name: str) -> None:
    """Raise `ValueError` for a fraction in an integer column, which Arrow would cut off."""
    if any(issubclass(kind, float | Decimal | np.floating) for kind in set(map(type, values))):
        for value in values:
            if isinstance(value, float | Decimal | np.floating) and value != int(value):
                raise ValueError(f"column {name!r} is an integer, not {value!r}")


def concat(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Return the batches as one; raises `pa.ArrowInvalid` where that would pass Arrow's 2 GiB a column."""
    return pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], schema=schema)


def schema_text(schema: pa.Schema) -> str:
    """Return a schema's columns and types in one line."""
    return ", ".join(f"{field.name} {field.type}" for field in schema)
