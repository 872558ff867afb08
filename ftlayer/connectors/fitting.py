"""Rows as a table has its columns: found by name, made its types where nothing can be lost, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import pyarrow as pa

from ftlayer.common.failures import RowsRejected
from ftlayer.config import MIB
from ftlayer.errors import FTLayerError, SinkError, SinkTargetError

Result = TypeVar("Result")

TEXT = ("string", "large_string", "string_view")
BINARY = ("binary", "large_binary", "binary_view")
LISTS = ("list", "large_list")

CHUNK_BYTES = 128 * MIB
"""Rows of one ``write`` that are in memory, or in a file, at a time: about so many bytes of Arrow's."""


def is_any(kind: pa.DataType, *families: str) -> bool:
    """Whether a type is of one of these families, as `pyarrow.types` calls them: ``"large_string"``."""
    return any(getattr(pa.types, f"is_{family}")(kind) for family in families)


def check_fits(rows: pa.Schema, table: pa.Schema, place: str) -> None:
    """Raise `SinkError` unless each column of the rows has one in the table that can hold it.

    A column that the rows lack is null, if it may be.
    """
    columns = {field.name: field for field in table}
    if len(set(rows.names)) != len(rows.names):
        raise SinkTargetError(
            f"{place}: two columns of the rows have the same name ({', '.join(rows.names)})"
        )
    for field in rows:
        target = columns.get(field.name)
        if target is None:
            raise SinkTargetError(
                f"{place} has no column {field.name!r} (it has {', '.join(columns)}); add it, or leave it out of the "
                "rows"
            )
        if not is_held_by(field.type, target.type):
            raise SinkTargetError(
                f"{place}: column {field.name!r} is {target.type} there, and {field.type} in the rows; make it that "
                "in a function before"
            )
    lacking = [field.name for field in table if not field.nullable and field.name not in rows.names]
    if lacking:
        raise SinkTargetError(
            f"{place}: the rows lack {', '.join(map(repr, lacking))}, which may not be null there"
        )


def fitted(rows: pa.Table, table: pa.Schema, place: str, first: int) -> pa.Table:
    """Return rows that pass `check_fits` with the table's columns, in its order and types.

    Raises `RowsRejected`, which counts from ``first``, for rows with a value that its column cannot hold, or with a
    text that is no UTF-8: readers of the file would fail by it.
    """
    columns, refused = [], dict[int, str]()
    for field in table:
        if field.name not in rows.schema.names:
            columns.append(pa.chunked_array([pa.nulls(rows.num_rows, field.type)], field.type))
            continue
        column = rows.column(field.name)
        try:
            columns.append(_as(column, field.type))
        except pa.ArrowException as error:

            def why(start: int, end: int) -> str:
                try:
                    _as(column.slice(start, end - start), field.type)  # noqa: B023
                except pa.ArrowInvalid:
                    return f"column {field.name!r}, {field.type}, cannot hold its value"  # noqa: B023
                return ""

            found = halved(rows.num_rows, why) if isinstance(error, pa.ArrowInvalid) else {}
            if not found:
                raise SinkError(
                    f"{place}: column {field.name!r} cannot hold the values of the rows: {type(error).__name__}"
                ) from error
            refused = {first + row: said for row, said in found.items()} | refused
    if refused:
        raise RowsRejected(dict(sorted(refused.items())))
    return pa.Table.from_arrays(columns, schema=table)


def _as(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)

    def cast(column: pa.ChunkedArray) -> pa.ChunkedArray:
        column = column if column.type == kind else column.cast(kind)
        column.validate(full=True)
        return column

    try:
        return cast(column)
    except pa.ArrowInvalid:
        # See `copied`.
        return cast(
            pa.chunked_array([pa.concat_arrays([chunk, chunk.slice(0, 0)]) for chunk in column.chunks])
        )


MISFITS = (pa.ArrowInvalid, ValueError, ArithmeticError, RecursionError)
"""What Arrow and Python raise for a value: a time that Python lacks, bytes that are no text, NaN in JSON."""


def whole_or_refused(rows: int, first: int, work: Callable[[int, int], Result]) -> Result:
    """Do ``work`` for rows from 0 up to ``rows``.

    Raises `RowsRejected`, which counts from ``first``, for rows whose values make it fail, found by halving.
    """
    try:
        return work(0, rows)
    except FTLayerError:
        raise
    except MISFITS:

        def why(start: int, end: int) -> str:
            try:
                work(start, end)
            except RowsRejected:  # It names them itself, once the others are out.
                return ""
            except FTLayerError:
                raise
            except MISFITS as error:
                return f"it has a value that cannot be written ({type(error).__name__})"
            return ""

        if why(0, 0):  # Then it is not the rows'.
            raise
        refused = {first + row: said for row, said in halved(rows, why).items()}
        if not refused:
            raise
        raise RowsRejected(refused) from None


def halved(rows: int, refused: Callable[[int, int], str]) -> dict[int, str]:
    """Return the rows that are refused alone, and why: by halves of those that are refused together, in order."""
    found: dict[int, str] = {}
    todo = [(0, rows)]
    while todo:
        start, end = todo.pop()
        why = refused(start, end)
        if why and end - start > 1:
            middle = (start + end) // 2
            todo += [(middle, end), (start, middle)]
        elif why:
            found[start] = why
    return found


def refuse_nulls(rows: pa.Table, table: pa.Schema, first: int) -> None:
    """Raise `RowsRejected`, which counts from ``first``, for rows that are null where the table takes no null."""
    refused: dict[int, str] = {}
    for field in table:
        if field.nullable or field.name not in rows.schema.names or not rows.column(field.name).null_count:
            continue
        for number, is_null in enumerate(rows.column(field.name).is_null().to_pylist()):
            if is_null:
                refused.setdefault(first + number, f"{field.name!r} is null, and may not be in the table")
    if refused:
        raise RowsRejected(refused)


def chunked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Return rows in tables of about `CHUNK_BYTES`; none if there are no rows."""
    gathered: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        gathered.append(batch)
        size += batch.nbytes
        if size >= CHUNK_BYTES:
            yield pa.Table.from_batches(gathered)
            gathered, size = [], 0
    if gathered:
        yield pa.Table.from_batches(gathered)


def as_column(kind: pa.DataType) -> pa.DataType:
    """Return the type of a table's column that is made for a type of rows: times are microseconds, and in UTC."""
    if pa.types.is_dictionary(kind):
        return as_column(kind.value_type)
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if is_any(kind, *TEXT):
        return pa.string()
    if is_any(kind, *BINARY):
        return pa.binary()
    if pa.types.is_struct(kind):
        fields = (kind.field(at) for at in range(kind.num_fields))
        return pa.struct([(field.name, as_column(field.type)) for field in fields])
    if pa.types.is_map(kind):
        return pa.map_(as_column(kind.key_type), as_column(kind.item_type))
    if is_any(kind, *LISTS):
        return pa.list_(as_column(kind.value_type))
    return kind


def is_held_by(kind: pa.DataType, target: pa.DataType) -> bool:
    """Whether each value of a type is one of another's, but for times that are too fine (these are found by value)."""
    if kind == target or pa.types.is_null(kind):
        return True
    if pa.types.is_dictionary(kind):
        return is_held_by(kind.value_type, target)
    if is_any(kind, *TEXT):
        return is_any(target, *TEXT)
    if is_any(kind, *BINARY):
        return is_any(target, *BINARY)
    if pa.types.is_integer(kind):
        return pa.types.is_integer(target) and _is_within(kind, target)
    if pa.types.is_floating(kind):
        return bool(pa.types.is_floating(target) and kind.bit_width <= target.bit_width)
    if pa.types.is_decimal(kind):
        whole = kind.precision - kind.scale
        return bool(
            pa.types.is_decimal(target)
            and kind.scale <= target.scale
            and whole <= target.precision - target.scale
        )
    if pa.types.is_timestamp(kind):
        return bool(pa.types.is_timestamp(target) and (kind.tz is None) == (target.tz is None))
    if pa.types.is_time(kind):
        return bool(pa.types.is_time(target))
    return _is_nested_in(kind, target)


def _is_nested_in(kind: pa.DataType, target: pa.DataType) -> bool:
    if pa.types.is_struct(kind) and pa.types.is_struct(target):
        fields, targets = ([one.field(at) for at in range(one.num_fields)] for one in (kind, target))
        return [one.name for one in fields] == [one.name for one in targets] and all(
            is_held_by(one.type, other.type) for one, other in zip(fields, targets, strict=True)
        )
    if pa.types.is_map(kind) and pa.types.is_map(target):
        return is_held_by(kind.key_type, target.key_type) and is_held_by(kind.item_type, target.item_type)
    if is_any(kind, *LISTS) and is_any(target, *LISTS):
        return is_held_by(kind.value_type, target.value_type)
    return False


def _is_within(kind: pa.DataType, target: pa.DataType) -> bool:
    if pa.types.is_signed_integer(kind):
        return bool(pa.types.is_signed_integer(target) and kind.bit_width <= target.bit_width)
    sign = int(pa.types.is_signed_integer(target))
    return bool(kind.bit_width <= target.bit_width - sign)
