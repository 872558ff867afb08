"""Rows as bodies of messages and requests: a column as it is, or a JSON object of all columns."""

from __future__ import annotations

import base64
import datetime as dt
import json

import pyarrow as pa

from ftlayer.errors import ConfigError


def bodies_of(batch: pa.RecordBatch, body: str | None, option: str) -> list[bytes]:
    """Return a body for each row: the column ``body``, a null as no bytes; None: a JSON object of all columns.

    There bytes are in base64 and times in ISO 8601. Raises `ConfigError`, which names the ``option``, for a column that
    is missing or neither a text nor bytes, and `ValueError` for a number that JSON does not have.
    """
    if body is None:
        return [json.dumps(row, default=_as_json, allow_nan=False).encode() for row in batch.to_pylist()]
    column = column_of(batch, body, option)
    if not (pa.types.is_string(column.type) or pa.types.is_binary(column.type)):
        raise ConfigError(f"{option}: column {body!r} is {column.type}, expected a text or bytes")
    values = column.cast(pa.binary()).to_pylist()
    return [b"" if value is None else value for value in values]


def texts_of(batch: pa.RecordBatch, name: str, option: str) -> list[str | None]:
    """Return a column's values as texts. Raises `ConfigError` if it is missing."""
    values = column_of(batch, name, option).to_pylist()
    return [None if value is None else str(value) for value in values]


def column_of(batch: pa.RecordBatch, name: str, option: str) -> pa.Array:
    """Return a column. Raises `ConfigError`, which names the ``option``, if it is missing."""
    if name not in batch.schema.names:
        raise ConfigError(
            f"{option}: rows have no column {name!r}; they have {', '.join(batch.schema.names)}"
        )
    return batch.column(name)


def _as_json(value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    return str(value)
