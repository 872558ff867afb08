"""Rows as entries of a Redis stream: names and values of their fields, packed one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import pyarrow as pa

from ftlayer.errors import SinkError
from ftlayer.failures import RowsRejected

Pairs = list[bytes]
"""Name, value, name, value, …"""

MAX_FIELDS = 1_000
"""Of an entry: a script hands all to one command, and Lua has room for some thousand arguments."""


def to_entries(batch: pa.RecordBatch, first: int = 0) -> list[bytes]:
    """Return each row as one packed array of names and values.

    A text or bytes are a field as they are, numbers and times as Arrow writes them, a null is none; the entries of a
    map are fields of their own. Raises `SinkError` for a column that has no text (a list, a struct). Raises
    `RowsRejected`, which counts rows from ``first``, for rows without any field, of which Redis has no entries, and for
    those with more than `MAX_FIELDS`.
    """
    columns = [
        _pairs_of(name, column) for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    entries = [[each for pairs in row for each in pairs] for row in zip(*columns, strict=True)]
    refused = {
        first + place: f"it has {len(row) // 2} fields that are not null, an entry has 1 to {MAX_FIELDS}"
        for place, row in enumerate(entries)
        if not 0 < len(row) <= 2 * MAX_FIELDS
    }
    if refused:
        raise RowsRejected(refused)
    # Lua's reader knows texts only.
    pack = msgpack.Packer(use_bin_type=False).pack
    return [pack(entry) for entry in entries]


def _pairs_of(name: str, column: pa.Array) -> list[Pairs]:
    """Return the fields of a column, for each row."""
    if pa.types.is_map(column.type):
        values = column.to_pylist()
        return [
            [_bytes(each) for pair in row or () for each in pair if pair[1] is not None] for row in values
        ]
    named = name.encode()
    return [[] if value is None else [named, value] for value in _as_bytes(name, column)]


def _as_bytes(name: str, column: pa.Array) -> Sequence[bytes | None]:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        plain = column if _is_bytes(column.type) else column.cast(pa.string())
        values: list[bytes | None] = plain.cast(pa.binary()).to_pylist()
    except pa.ArrowException as error:
        raise SinkError(
            f"column {name!r} is {column.type}, which has no text in Redis: make it one in a function before ({error})"
        ) from error
    return values


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
