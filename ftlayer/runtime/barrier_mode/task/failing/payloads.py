"""Single rows as bytes: IPC streams of Arrow that need nothing beside them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from ftlayer.functions.conversion import concat
from ftlayer.records.ipc import as_message, as_stream, has_dictionaries

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def payload_of(row: pa.RecordBatch) -> bytes:
    """Return a row that owns its memory (`ftlayer.records.alone`) as an IPC stream."""
    schema = row.schema
    if has_dictionaries(schema):
        return bytes(as_stream(row))
    # A stream is its messages one behind the other: so it takes half the time of a writer.
    return bytes(schema.serialize()) + bytes(as_message(row, dictionaries=False)) + _END_OF_STREAM


def rows_of(payloads: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of ``payloads``, all of which have ``schema``."""
    return concat([pa.ipc.open_stream(payload).read_next_batch() for payload in payloads], schema)
