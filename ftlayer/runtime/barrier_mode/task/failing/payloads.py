"""Single rows as bytes: IPC streams of Arrow that need nothing beside them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from ftlayer.functions.conversion import concat, schema_text
from ftlayer.records.ipc import as_message, as_stream, has_dictionaries

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class OtherColumnsError(ValueError):
    """A row is not one of the input that it is to go into."""


class RowPacker:
    """Packs rows, one by one; rows of one schema behind each other take a third of the time."""

    def __init__(self) -> None:
        """Begin without a schema."""
        self._schema: pa.Schema | None = None
        self._head: bytes | None = None

    def pack(self, row: pa.RecordBatch) -> bytes:
        """Return a row that owns its memory (`ftlayer.records.alone`) as an IPC stream."""
        schema = row.schema
        if self._schema is None or not schema.equals(self._schema, check_metadata=True):
            self._schema, self._head = schema, _head_of(schema)
        if self._head is None:
            return bytes(as_stream(row))
        # A stream is its messages one behind the other: so it takes half the time of a writer.
        return self._head + bytes(as_message(row, dictionaries=False)) + _END_OF_STREAM


def rows_of(payloads: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of ``payloads``.

    Raises `OtherColumnsError` for one that does not have the columns of ``schema``, `pa.ArrowException`, `OSError` or
    `StopIteration` for one that cannot be read.
    """
    rows = _read_together(payloads, schema) or [_row_of(payload, schema) for payload in payloads]
    return concat(rows, schema)


def _read_together(payloads: Sequence[bytes], schema: pa.Schema) -> list[pa.RecordBatch] | None:
    """Return the rows of many payloads that differ in their rows alone: their messages make one stream."""
    head = None if len(payloads) < 2 else _head_of(schema)
    if head is None or not all(each.startswith(head) and each.endswith(_END_OF_STREAM) for each in payloads):
        return None
    messages = [payload[len(head) : -len(_END_OF_STREAM)] for payload in payloads]
    rows = list(pa.ipc.open_stream(b"".join([head, *messages, _END_OF_STREAM])))
    # A letter that a user has edited may be a stream of several; one without any was refused.
    return rows if len(rows) == len(payloads) else None


def _row_of(payload: bytes, schema: pa.Schema) -> pa.RecordBatch:
    row = pa.ipc.open_stream(payload).read_next_batch()
    if row.schema.names != schema.names or row.schema.types != schema.types:
        raise OtherColumnsError(
            f"it has other columns ({schema_text(row.schema)}) than its input has now ({schema_text(schema)})"
        )
    return pa.RecordBatch.from_arrays(row.columns, schema=schema)


def _head_of(schema: pa.Schema) -> bytes | None:
    """Return the message that begins a stream of rows alone; None if dictionaries come before them."""
    return None if has_dictionaries(schema) else bytes(schema.serialize())
