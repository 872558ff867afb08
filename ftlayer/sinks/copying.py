"""Record batches as what PostgreSQL's COPY takes (CSV): columns that Arrow can write as they are, others as text."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyarrow import csv

from ftlayer.sinks.fitting import is_any

SUFFIX = "_ftlayer_staging"
"""Of the staging table's name, behind the target's."""
MESSAGE_COLUMN = "ftlayer_message"
"""Of the staging table: whose rows they are."""
ROW_COLUMN = "ftlayer_row"
"""Of the staging table: the number of a row in its message, from 0."""

_PLAIN = ("integer", "floating", "decimal", "boolean", "string", "large_string", "date", "time", "timestamp")
"""Types that Arrow writes as PostgreSQL reads them."""

_OPTIONS = csv.WriteOptions(include_header=False, quoting_style="needed")


def to_csv(batch: pa.RecordBatch, message: str, first: int, types: dict[str, str]) -> bytes:
    """Return rows behind the name of their message and their numbers from ``first`` on, for COPY … (FORMAT csv).

    ``types``: of the target's columns, as PostgreSQL names them.
    """
    columns = [pa.repeat(message, batch.num_rows), pa.array(range(first, first + batch.num_rows), pa.int64())]
    columns += [_copyable(batch.column(name), types[name]) for name in batch.schema.names]
    table = pa.Table.from_arrays(columns, names=[MESSAGE_COLUMN, ROW_COLUMN, *batch.schema.names])
    out = io.BytesIO()
    csv.write_csv(table, out, _OPTIONS)
    return out.getvalue()


def _copyable(column: pa.Array, target: str) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        return _copyable(column.dictionary_decode(), target)
    if pa.types.is_string_view(column.type):
        return column.cast(pa.string())
    if is_any(column.type, *_PLAIN):
        return column
    text: Callable[[Any], str] = _array_literal if target.endswith("[]") else _text
    if target in ("json", "jsonb"):
        text = _json
    values = column.to_pylist(maps_as_pydicts="lossy")
    return pa.array([None if value is None else text(value) for value in values], pa.string())


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, timedelta):
        return f"{value // timedelta(microseconds=1)} microseconds"
    if isinstance(value, (dict, list)):
        return _json(value)
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    return str(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_json_leaf)


def _json_leaf(value: Any) -> Any:
    # A number that has no exact float stays a text.
    return str(value) if isinstance(value, Decimal) else _text(value)


def _array_literal(value: Any) -> str:
    """Return ``{1,"two",NULL}``: every element but numbers and arrays in quotes."""
    if not isinstance(value, list):
        return _text(value)
    return "{" + ",".join(map(_element, value)) + "}"


def _element(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, list):
        return _array_literal(value)
    escaped = _text(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
