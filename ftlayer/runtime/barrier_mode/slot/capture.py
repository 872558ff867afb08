"""Records in flight that belong to a checkpoint, and how they are written and read again.

A piece of them begins with the schema of their edge, so that a graph whose stream has other columns by now
refuses them instead of misreading them. Each part, the schema too, is led by its length as a little-endian
uint64 and filled up to a multiple of 8 bytes: what is read is aligned as `ElementCodec` wants it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from ftlayer.checkpoint.snapshots import ChannelState
from ftlayer.checkpoint.storage.contract import PieceWriter
from ftlayer.errors import CheckpointDamagedError, IncompatibleCheckpointError
from ftlayer.runtime.protocol.channel_frames import ElementCodec, rows_in
from ftlayer.runtime.protocol.elements import Batch
from ftlayer.topology.job_graph import Channel, JobEdge

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class CapturedChannel:
    """What a barrier has overtaken on one channel: batches as they are, or frames that were encoded before.

    ``outgoing``: it had not left the sender yet. There is at least one record in it.
    """

    edge: JobEdge
    channel: Channel
    outgoing: bool
    parts: tuple[Batch | bytes, ...]
    codec: ElementCodec

    @property
    def records(self) -> int:
        """Number of records."""
        return sum(part.num_rows if isinstance(part, Batch) else rows_in(part) for part in self.parts)

    def write(self, writer: PieceWriter) -> ChannelState:
        """Encode and write it; in any thread. Raises as `PieceWriter.write`."""
        return ChannelState(
            source=self.edge.source,
            tag=self.edge.tag,
            target=self.edge.target,
            input=self.edge.input,
            sender=self.channel.sender,
            receiver=self.channel.receiver,
            outgoing=self.outgoing,
            frames=writer.write(self._chunks()),
            count=self.records,
            edge=self.edge.number,
        )

    def _chunks(self) -> Iterator[bytes]:
        yield _part(self.edge.schema.serialize().to_pybytes())
        for part in self.parts:
            yield _part(self.codec.encode(self.channel, part) if isinstance(part, Batch) else part)


def read_batches(data: bytes, edge: JobEdge, codec: ElementCodec) -> list[Batch]:
    """Return the batches that `CapturedChannel.write` wrote, as records of ``edge``.

    Raises:
        IncompatibleCheckpointError: the records have not the columns that the edge carries by now.
        CheckpointDamagedError: the bytes are no such thing.
        CodecError: one of the frames is malformed.
    """
    parts = _parts(pa.py_buffer(data))
    schema = next(parts, None)
    if schema is None:
        raise CheckpointDamagedError("a piece of records in flight is empty")
    try:
        written = pa.ipc.read_schema(schema)
        fits = written.names == edge.schema.names and written.types == edge.schema.types
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CheckpointDamagedError(f"a piece of records in flight has no schema ({error})") from error
    if not fits:
        raise IncompatibleCheckpointError(
            f"records in flight from {edge.source!r} to {edge.target!r} have the columns {_described(written)}, "
            f"and the stream has {_described(edge.schema)} now; restore from a savepoint, which holds no "
            "records in flight"
        )
    return [codec.decode_for(edge.number, frame) for frame in parts]


def _part(data: bytes) -> bytes:
    return b"".join((_LENGTH.pack(len(data)), data, bytes(-len(data) % 8)))


def _parts(buffer: pa.Buffer) -> Iterator[pa.Buffer]:
    at = 0
    while at < buffer.size:
        if at + _LENGTH.size > buffer.size:
            raise CheckpointDamagedError("a piece of records in flight is cut off")
        (length,) = _LENGTH.unpack_from(buffer, at)
        at += _LENGTH.size
        if at + length > buffer.size:
            raise CheckpointDamagedError("a piece of records in flight is cut off")
        yield buffer.slice(at, length)
        at += length + -length % 8


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
