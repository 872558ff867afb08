"""Streams of Flight that carry frames: bytes as ``app_metadata``, in messages without a record batch.

Flight gives a message with a record batch to Arrow's reader before anyone else sees it, and that reader takes what
is claimed (buffers that expand to gigabytes) and can be made to crash (a message without a header where a dictionary
was due). So a stream begins with a schema that has no columns, with which there is nothing for it to read, and
batches travel inside frames, where `ftlayer.records.ipc` looks at them first.

A client ends its stream by a frame (`end_stream`), never by ``done_writing``. Where one thread reads a ``DoExchange``
and another writes, Arrow half-closes it twice if the stream ends while ``done_writing`` runs, and gRPC then aborts
the process ("API misuse of type GRPC_CALL_ERROR_TOO_MANY_OPERATIONS"). With pyarrow 26, every third stream that is
cancelled and half-closed at once shows it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyarrow import flight

from ftlayer.errors import MalformedRequestError

NO_COLUMNS = pa.schema([])
"""The first message of a client's stream."""

_END = pa.py_buffer(b"\0")
"""The frame behind the last one. Every other frame has a head, and so at least two bytes."""


def end_stream(writer: flight.FlightStreamWriter) -> None:
    """Tell the server that no frame comes behind those written; it ends the stream when it has answered them.

    Raises what Flight raises for a stream that is broken.
    """
    writer.write_metadata(_END)


def frames_of(reader: flight.MetadataRecordBatchReader) -> Iterator[pa.Buffer]:
    """Yield the frames of a stream, to its end, as views of what came.

    The end is what `end_stream` wrote, or that the client half-closed the stream.

    Raises `MalformedRequestError` for a stream that carries columns, and what Flight raises for one that breaks.
    """
    # Before the first message is read: it would be read by this schema.
    if len(reader.schema):
        raise MalformedRequestError(
            f"schema: expected one without columns, got {len(reader.schema)}; a stream carries frames as "
            "app_metadata, and record batches are inside them"
        )
    while True:
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            return
        if chunk.data is not None or chunk.app_metadata is None:
            raise MalformedRequestError("message: expected app_metadata alone, got a record batch")
        if chunk.app_metadata == _END:
            return
        yield chunk.app_metadata
