"""Rows as messages of Kafka, with the columns that Spark's own sink has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ftlayer.errors import SinkError
from ftlayer.failures import RowsRejected

HEADERS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))

SCHEMA = pa.schema(
    [
        pa.field("value", pa.binary()),
        pa.field("key", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("timestamp", pa.timestamp("ms", "UTC")),
        pa.field("headers", HEADERS),
    ]
)
"""Of staged rows. A column that is not given is null."""

ANY_PARTITION = -1
"""librdkafka's: the partitioner chooses."""

OVERHEAD_BYTES = 100
"""Of a message beside key, value and headers, at most."""


class Produced(NamedTuple):
    """Arguments of ``Producer.produce``, for one row."""

    topic: str
    value: bytes | None
    key: bytes | None
    partition: int
    timestamp: int
    headers: list[tuple[str, bytes | None]] | None


def to_messages(batch: pa.RecordBatch, topic: str | None, most_bytes: int, first: int = 0) -> pa.RecordBatch:
    """Return rows with the columns of `SCHEMA`, ready to be staged. ``topic`` None: rows have a column of it.

    Raises `SinkError` for a column that a message has not, or of another type. Raises `RowsRejected`, which counts rows
    from ``first``, for a row without a topic, with a negative partition, or of more than ``most_bytes``.
    """
    strange = [name for name in batch.schema.names if name not in SCHEMA.names]
    if strange:
        raise SinkError(
            f"column {strange[0]!r} is none of a message's, which are {', '.join(SCHEMA.names)}: make it a part of "
            "value, or leave it out of the rows"
        )
    if "value" not in batch.schema.names:
        raise SinkError(f"the rows have no column 'value', just {', '.join(batch.schema.names)}")
    columns = [
        _cast(batch, field) if field.name in batch.schema.names else pa.nulls(batch.num_rows, field.type)
        for field in SCHEMA
    ]
    if topic is not None:
        columns[SCHEMA.get_field_index("topic")] = pa.repeat(pa.scalar(topic), batch.num_rows)
    found = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    refused = _refused(found, most_bytes, first)
    if refused:
        raise RowsRejected(refused)
    return found


def produced(batch: pa.RecordBatch) -> Iterator[Produced]:
    """Return what is to be produced for rows of `SCHEMA`."""
    partitions = batch.column("partition").fill_null(ANY_PARTITION).to_pylist()
    # 0: the time at which it is produced.
    stamps = batch.column("timestamp").cast(pa.int64()).fill_null(0).to_pylist()
    headers = batch.column("headers")
    return map(
        Produced,
        batch.column("topic").to_pylist(),
        batch.column("value").to_pylist(),
        batch.column("key").to_pylist(),
        partitions,
        stamps,
        [None] * batch.num_rows if headers.null_count == len(headers) else map(_pairs, headers.to_pylist()),
    )


def _pairs(headers: list[dict[str, Any]] | None) -> list[tuple[str, bytes | None]] | None:
    return None if headers is None else [(each["key"], each["value"]) for each in headers]


def _cast(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    column = batch.column(batch.schema.get_field_index(field.name))
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    is_bytes = pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)
    fits = is_text or is_bytes if pa.types.is_binary(field.type) else True
    try:
        if not fits:
            raise pa.ArrowTypeError(f"a message's {field.name} is a text or bytes")
        # A time is cut to milliseconds, as Kafka has it.
        return column.cast(field.type, safe=not pa.types.is_timestamp(field.type))
    except pa.ArrowException as error:
        raise SinkError(
            f"column {field.name!r} is {column.type}, and cannot be {field.type}: {error}"
        ) from error


def _refused(batch: pa.RecordBatch, most_bytes: int, first: int) -> dict[int, Exception | str]:
    """Return why rows can never be produced."""
    found: dict[int, Exception | str] = {}
    for row in np.flatnonzero(batch.column("topic").is_null().to_numpy(zero_copy_only=False)):
        found[first + int(row)] = "it has no topic: give the sink one, or the row"
    negative = pc.less(batch.column("partition"), 0).fill_null(False)
    for row in np.flatnonzero(negative.to_numpy(zero_copy_only=False)):
        found[first + int(row)] = f"its partition is {batch.column('partition')[int(row)]}"
    sizes = _sizes(batch)
    for row in np.flatnonzero(sizes > most_bytes):
        found[first + int(row)] = (
            f"it has {sizes[row]:,} bytes, and message.max.bytes allows {most_bytes:,}: give config "
            "{'message.max.bytes': …}, if the topic takes them"
        )
    return found


def _sizes(batch: pa.RecordBatch) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return about how many bytes each message has, or a little more."""
    sizes = np.full(batch.num_rows, OVERHEAD_BYTES, np.int64)
    for name in ("value", "key"):
        sizes += pc.binary_length(batch.column(name)).fill_null(0).to_numpy(zero_copy_only=False)
    headers = batch.column("headers")
    if headers.null_count < len(headers):
        for row, pairs in enumerate(headers.to_pylist()):
            sizes[row] += sum(
                len(each["key"].encode()) + len(each["value"] or b"") + 10 for each in pairs or ()
            )
    return sizes
