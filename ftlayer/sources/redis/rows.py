"""Entries of a Redis stream as record batches: columns are made by C functions, without Python for each entry."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ftlayer.sources import beside

ID, TIME, FIELDS = "id", "time", "fields"

_BYTES_BY_NAME = pa.map_(pa.string(), pa.binary())


def schema_of(fields: Sequence[str]) -> pa.Schema:
    """Return the schema of entries: id, time of the server, and a text for each of ``fields``, or all as one map."""
    own = [pa.field(ID, pa.string()), pa.field(TIME, beside.STAMP)]
    if not fields:
        return pa.schema([*own, pa.field(FIELDS, _BYTES_BY_NAME)])
    return pa.schema([*own, *(pa.field(name, pa.string()) for name in fields)])


def to_rows(entries: Sequence[Any], schema: pa.Schema) -> pa.RecordBatch:
    """Return entries ``[id, [name, value, name, value, …]]`` as rows.

    A field that an entry lacks is null; bytes that are no UTF-8 become U+FFFD where a text is asked for.
    """
    ids = pa.array(list(map(itemgetter(0), entries)), pa.binary()).cast(pa.string())
    pairs = list(map(itemgetter(1), entries))
    names = schema.names[2:]
    columns = [_as_map(pairs)] if names == [FIELDS] else _by_name(pairs, names)
    return pa.RecordBatch.from_arrays([ids, _times(ids), *columns], schema=schema)


def _times(ids: pa.Array) -> pa.Array:
    """Return when entries came: the milliseconds that their ids begin with."""
    begins = pc.list_element(pc.split_pattern(ids, "-", max_splits=1), 0)
    try:
        milliseconds = begins.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:  # An id has 64 bits without a sign.
        milliseconds = list(map(int, begins.to_pylist()))
    return beside.times(milliseconds, "ms", "Redis", "the time of an id")


def _as_map(pairs: Sequence[Sequence[bytes]]) -> pa.Array:
    flat = list(chain.from_iterable(pairs))
    offsets = np.zeros(len(pairs) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, pairs), np.int32, len(pairs)) // 2, out=offsets[1:])
    return pa.MapArray.from_arrays(
        pa.array(offsets), _texts(flat[::2]), pa.array(flat[1::2], pa.binary()), type=_BYTES_BY_NAME
    )


def _by_name(pairs: Sequence[Sequence[bytes]], names: Sequence[str]) -> list[pa.Array]:
    wanted = [name.encode() for name in names]
    flat = list(chain.from_iterable(pairs))
    # The producer of a stream mostly writes the same fields in the same order.
    width = 2 * len(wanted)
    if set(map(len, pairs)) <= {width} and flat[::2] == wanted * len(pairs):
        return [_texts(flat[2 * place + 1 :: width]) for place in range(len(wanted))]
    by_name = [dict(zip(each[::2], each[1::2], strict=True)) for each in pairs]
    return [_texts([fields.get(name) for fields in by_name]) for name in wanted]


def _texts(values: Sequence[bytes | None]) -> pa.Array:
    try:
        return pa.array(values, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array(
            [None if value is None else value.decode("utf-8", "replace") for value in values], pa.string()
        )
