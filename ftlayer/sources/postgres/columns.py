"""PostgreSQL's types as Arrow's, and values that came as texts as columns."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ftlayer.checks import shown
from ftlayer.errors import SourceError

Texts = Sequence[str | None]

_PLAIN: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "oid": pa.int64(),
    "xid8": pa.int64(),
    "real": pa.float32(),
    "double precision": pa.float64(),
    "bytea": pa.binary(),
    "date": pa.date32(),
}
_STAMP = re.compile(r"timestamp(?:\((\d)\))? with(out)? time zone")
_NUMERIC = re.compile(r"numeric\((\d+),(\d+)\)")

MOST_DIGITS = 38
"""Of Spark's decimals."""


def type_of(named: str) -> pa.DataType:
    """Return the Arrow type for a type as PostgreSQL's ``format_type`` names it.

    What has no counterpart is a text as PostgreSQL writes it: numbers without a precision, arrays, JSON, UUIDs,
    intervals, enumerations.
    """
    if named in _PLAIN:
        return _PLAIN[named]
    if stamp := _STAMP.fullmatch(named):
        return pa.timestamp("us") if stamp[2] else pa.timestamp("us", "UTC")
    if (numeric := _NUMERIC.fullmatch(named)) and int(numeric[1]) <= MOST_DIGITS:
        return pa.decimal128(int(numeric[1]), int(numeric[2]))
    return pa.string()


def to_column(texts: Texts, field: pa.Field) -> pa.Array:
    """Return values that came as texts as a column. Raises `SourceError` that names column and value."""
    found = pa.array(texts, pa.string())
    try:
        return _converted(found, field.type)
    except (pa.ArrowException, ValueError) as error:
        bad = next((text for text in texts if not _is_fine(text, field.type)), None)
        raise SourceError(
            f"column {field.name!r}: the value {shown(bad)} is no {field.type}: read the column as a text, "
            f"as_text=[{field.name!r}]"
        ) from error


def _is_fine(text: str | None, kind: pa.DataType) -> bool:
    try:
        _converted(pa.array([text], pa.string()), kind)
    except (pa.ArrowException, ValueError):
        return False
    return True


def _converted(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_string(kind):
        return texts
    if pa.types.is_boolean(kind):
        # Replication sends t and f, a cast to text true and false.
        return pc.starts_with(texts, "t")
    if pa.types.is_binary(kind):
        # \x and hexadecimal digits.
        return pa.array(
            [None if text is None else bytes.fromhex(text[2:]) for text in texts.to_pylist()], kind
        )
    if pa.types.is_floating(kind):
        # Arrow does not read "Infinity".
        values = [np.nan if text is None else float(text) for text in texts.to_pylist()]
        return pa.array(np.array(values), mask=np.asarray(pc.is_null(texts))).cast(kind, safe=False)
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        # 2026-01-02 03:04:05.678+00, as the session is in UTC.
        wrong = pc.invert(pc.ends_with(texts, "+00"))
        if pc.any(wrong).as_py():
            raise ValueError("a time that is not in UTC")
        return pc.utf8_slice_codeunits(texts, 0, -3).cast(pa.timestamp("us")).cast(kind)
    return texts.cast(kind)
