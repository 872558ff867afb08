"""Stored rows in the shape that their source has today.

The source may have gained columns: stored rows have null there. A column may have changed to a type that holds what the
old one held; a value that it cannot hold fails its row, and no other. Everything else is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import types

from ftlayer.errors import CodecError
from ftlayer.functions.conversion import cast_by_value, kind_of, raw_type


def row_digests(batch: pa.RecordBatch) -> list[bytes]:
    """Return 16 bytes a row that stand for its content; equal rows have equal ones, NaN equals NaN.

    Text and times are taken as bytes and numbers: what Python cannot hold is what fails.
    """
    columns = [column.view(raw_type(column.type)).to_pylist() for column in batch.columns]
    return [
        hashlib.blake2b(repr(row).encode(), digest_size=16).digest() for row in zip(*columns, strict=True)
    ]


MAX_SHOWN = 100
"""Characters that a message shows of a value, and of what Arrow says about it."""

_WAY_OUT = (
    "read the source with its former schema until query.drain(timeout) returns True, and change it then (a stand-in "
    "will do for a column that the source has no more: withColumn(name, lit(None).cast(its former type)))"
)

_BECOMES = {
    "boolean": {"number", "text"},
    "number": {"text"},
    "text": {"number", "bytes", "date", "timestamp without a zone"},
    "bytes": {"text"},
    "date": {"text", "timestamp without a zone"},
    "timestamp": {"text"},
    "timestamp without a zone": {"text", "date"},
}
"""What a kind of type may become beside itself. What is not here would mean another thing (an int as a boolean, or
as a time), however well Arrow casts it."""


@dataclass(frozen=True)
class FittedRows:
    """``columns`` in the order of the schema; ``misfits`` says by row what does not fit: the row is null there."""

    columns: list[pa.Array]
    misfits: dict[int, str]


def fit_rows(stored: pa.RecordBatch, schema: pa.Schema) -> FittedRows:
    """Bring stored rows to ``schema``, the source's columns today.

    Raises `CodecError` when no row can be: a column is gone, one that has come may not be null, or a type has become
    one of another kind.
    """
    check_none_gone(stored.schema, schema)
    columns = []
    misfits: dict[int, str] = {}
    for field in schema:
        if field.name in stored.schema.names:
            fitted = _fit_column(stored.column(field.name), field, misfits)
            columns.append(_without_missing(stored.column(field.name), fitted, field, misfits))
        elif field.nullable:
            # As in Spark's own file formats: rows from before a column was there have none.
            columns.append(pa.nulls(stored.num_rows, field.type))
        else:
            raise _refused(stored.schema, field, "it may not be null, and they have no such column")
    return FittedRows(columns, misfits)


def check_none_gone(stored: pa.Schema, schema: pa.Schema) -> None:
    """Raise `CodecError` if stored rows have a column that the source has no more."""
    gone = [name for name in stored.names if name not in schema.names]
    if gone:
        raise CodecError(
            f"stored records have a column {gone[0]!r} ({stored.field(gone[0]).type}) and do not fit the source, "
            f"which has no such column now ({', '.join(schema.names)}); {_WAY_OUT}"
        )


def _fit_column(column: pa.Array, field: pa.Field, misfits: dict[int, str]) -> pa.Array:
    if column.type == field.type:
        return column
    if not may_become(column.type, field.type):
        raise CodecError(
            f"stored records do not fit column {field.name!r} of the source as it is now: {column.type} is not "
            f"read as {field.type}; {_WAY_OUT}"
        )
    try:
        fitted = cast_by_value(column, field.type)
    except pa.ArrowException:
        fitted = _cast_one_by_one(column, field, misfits)
    return _without_changed(column, fitted, field, misfits)


def _cast_one_by_one(column: pa.Array, field: pa.Field, misfits: dict[int, str]) -> pa.Array:
    parts = []
    for row in range(len(column)):
        # Not a slice: Arrow casts what is around it in a list too.
        value = column.take(pa.array([row]))
        try:
            parts.append(cast_by_value(value, field.type))
        except pa.ArrowException as error:
            misfits.setdefault(row, _misfit(value, field, str(error)))
            parts.append(pa.nulls(1, field.type))
    return pa.concat_arrays(parts)


def _without_changed(
    column: pa.Array, fitted: pa.Array, field: pa.Field, misfits: dict[int, str]
) -> pa.Array:
    """Take out values that the type does not hold as they were. Text is parsed: what it reads as is what it meant.

    Arrow reads hexadecimal digits too, which Spark does not, and takes a number that is too large for infinity.
    """
    if kind_of(column.type) == "text":
        compute, odd, text = pa.compute, None, column.cast(pa.large_string())
        if types.is_integer(field.type):
            odd = compute.match_substring(text, "x", ignore_case=True)
        elif types.is_floating(field.type):
            infinite = compute.is_inf(fitted.cast(pa.float64()))
            odd = compute.and_(
                infinite, compute.invert(compute.match_substring(text, "inf", ignore_case=True))
            )
        return (
            fitted if odd is None else _without(odd, "it is no such number", column, fitted, field, misfits)
        )
    back = row_digests(pa.record_batch([cast_by_value(fitted, column.type, safe=False)], ["value"]))
    was = row_digests(pa.record_batch([column], ["value"]))
    valid = fitted.is_valid().to_pylist()
    changed = [there and one != other for there, one, other in zip(valid, was, back, strict=True)]
    return _without(changed, "it would be changed", column, fitted, field, misfits)


def _without_missing(
    column: pa.Array, fitted: pa.Array, field: pa.Field, misfits: dict[int, str]
) -> pa.Array:
    """Take out rows with a null where the schema has none: Spark would read it as 0."""
    if not _has_missing(fitted, field):
        return fitted
    missing = [
        row not in misfits and _has_missing(fitted.take(pa.array([row])), field) for row in range(len(fitted))
    ]
    return _without(missing, "it may not be null", column, fitted, field, misfits)


def _has_missing(values: pa.Array, field: pa.Field) -> bool:
    if values.null_count and not field.nullable:
        return True
    kind, values = field.type, values.drop_null()
    if types.is_struct(kind):
        return any(_has_missing(values.field(at), each) for at, each in enumerate(kind))
    if types.is_map(kind):
        return _has_missing(values.items, kind.item_field)
    return isinstance(kind, pa.ListType | pa.LargeListType) and _has_missing(
        values.flatten(), kind.value_field
    )


def _without(
    wrong: Sequence[bool] | pa.Array,
    why: str,
    column: pa.Array,
    fitted: pa.Array,
    field: pa.Field,
    misfits: dict[int, str],
) -> pa.Array:
    odd = pa.array(wrong, pa.bool_()).fill_null(False)
    if not odd.true_count:
        return fitted
    for row in pa.compute.indices_nonzero(odd).to_pylist():
        misfits.setdefault(row, _misfit(column.slice(row, 1), field, why))
    return pa.compute.if_else(odd, pa.scalar(None, field.type), fitted)


def may_become(old: pa.DataType, new: pa.DataType) -> bool:
    """Whether values of type ``old`` may be read as ``new``; single ones may still not fit."""
    if old == new:
        return True
    kind = kind_of(old)
    if kind:
        return kind_of(new) == kind or kind_of(new) in _BECOMES.get(kind, set())
    if types.is_struct(old) and types.is_struct(new):
        names = [field.name for field in old]
        return names == [field.name for field in new] and all(
            may_become(old.field(name).type, new.field(name).type) for name in names
        )
    if (types.is_list(old) or types.is_large_list(old)) and (types.is_list(new) or types.is_large_list(new)):
        return may_become(old.value_type, new.value_type)
    if types.is_map(old) and types.is_map(new):
        return may_become(old.key_type, new.key_type) and may_become(old.item_type, new.item_type)
    return False


def _refused(stored: pa.Schema, field: pa.Field, why: str) -> CodecError:
    return CodecError(
        f"stored records of {stored.names} do not fit column {field.name!r} ({field.type}) of the source as it is "
        f"now: {why}; {_WAY_OUT}"
    )


def _misfit(value: pa.Array, field: pa.Field, why: str) -> str:
    return (
        f"CodecError: column {field.name!r} of the source is {field.type} now, and the stored record has "
        f"{_cut(str(value[0]))!r} ({value.type}): {_cut(why)}; requeue it when a schema that it fits is read"
    )


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
