"""Single rows as bytes: IPC streams of Arrow that need nothing beside them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from ftlayer.functions.conversion import concat, schema_text
from ftlayer.records.ipc import as_message, as_stream, has_dictionaries

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class OtherColumnsError(ValueError):
    """A row is not one of the input that it is to go into."""


def payload_of(row: pa.RecordBatch) -> bytes:
    """Return a row that owns its memory (`ftlayer.records.alone`) as an IPC stream."""
    schema = row.schema
    if has_dictionaries(schema):
        return bytes(as_stream(row))
    # A stream is its messages one behind the other: so it takes half the time of a writer.
    return bytes(schema.serialize()) + bytes(as_message(row, dictionaries=False)) + _END_OF_STREAM


def rows_of(payloads: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of ``payloads``.

    Raises `OtherColumnsError` for one that does not have the columns of ``schema``, `pa.ArrowException`, `OSError` or
    `StopIteration` for one that cannot be read.
    """
    return concat([_row_of(payload, schema) for payload in payloads], schema)


def _row_of(payload: bytes, schema: pa.Schema) -> pa.RecordBatch:
    row = pa.ipc.open_stream(payload).read_next_batch()
    if row.schema.names != schema.names or row.schema.types != schema.types:
        raise OtherColumnsError(
            f"it has other columns ({schema_text(row.schema)}) than its input has now ({schema_text(schema)})"
        )
    return pa.RecordBatch.from_arrays(row.columns, schema=schema)
