"""Records in flight that belong to a checkpoint: how they are written and read again, and put where they were.

A piece of them begins with the schema of their edge, so that a graph whose stream has other columns by now
refuses them instead of misreading them. Each part, the schema too, is led by its length as a little-endian
uint64 and filled up to a multiple of 8 bytes: what is read is aligned as `ElementCodec` wants it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ftlayer.checkpoint.snapshots import ChannelState, InFlight, Piece, Restore, Scope
from ftlayer.checkpoint.storage.writer import PieceWriter
from ftlayer.errors import CheckpointDamagedError, IncompatibleCheckpointError
from ftlayer.functions.conversion import schema_text
from ftlayer.records.partitioning import HashByKeyGroup, OutgoingRows
from ftlayer.runtime.protocol.channel_frames import VERSION, ElementCodec, rows_in, version_of
from ftlayer.runtime.protocol.messages import Batch
from ftlayer.runtime.slot.rules.outgoing import RemoteOutput
from ftlayer.runtime.slot.rules.subtask import Seating
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph

KEEP_GROUPS = "groups"
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
        return sum(part.num_rows if isinstance(part, Batch) else rows_in(part) for part in self.parts)

    def write(self, writer: PieceWriter, subtask: str) -> ChannelState:
        """Encode and write it for a subtask's snapshot; in any thread. Raises as `PieceWriter.write`."""
        return ChannelState(
            source=self.edge.source,
            tag=self.edge.tag,
            target=self.edge.target,
            input=self.edge.input,
            sender=self.channel.sender,
            receiver=self.channel.receiver,
            outgoing=self.outgoing,
            frames=writer.write(self._chunks(), Scope.EXCLUSIVE, subtask),
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
        IncompatibleCheckpointError: the records have not the columns that the edge carries by now, or are written as
            another version of ftlayer's slots send them.
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
            f"records in flight from {edge.source!r} to {edge.target!r} have the columns {schema_text(written)}, "
            f"and the stream has {schema_text(edge.schema)} now; restore from a savepoint, which holds no "
            "records in flight"
        )
    frames = list(parts)
    versions = {version_of(frame) for frame in frames}
    if versions - {VERSION}:
        raise IncompatibleCheckpointError(
            f"records in flight from {edge.source!r} to {edge.target!r} are frames of version {max(versions)}, and "
            f"this ftlayer reads version {VERSION} alone: restore with the version that wrote the checkpoint and take "
            "a savepoint there, which holds no records in flight"
        )
    return [codec.decode_for(edge.number, frame) for frame in frames]


def put_in_flight(
    graph: JobGraph, seating: Seating, codec: ElementCodec, restore: Restore, read: Callable[[Piece], bytes]
) -> None:
    """Put them into inboxes and outputs that are empty yet. They use no credit: their senders know nothing of them.

    To be done before the tasks start, and before anything comes. What had left its sender comes first on each channel,
    on those between tasks of one slot too. ``read`` returns the bytes of a piece.

    Raises what ``read`` raises, and

        IncompatibleCheckpointError: the graph is another one, where these records are concerned.
        CheckpointDamagedError, CodecError: the bytes are not what was written.
    """
    for subtask in restore.subtasks:
        for part in subtask.in_flight:
            channel = Channel(part.edge, part.sender, subtask.subtask)
            receiver = seating.receivers.get(channel)
            if receiver is None or receiver.key != (subtask.uid, subtask.subtask):
                raise _no_such(channel, part)
            for batch in _batches(graph, codec, part, read):
                kept = _kept(graph, batch, graph.edges[part.edge], subtask.subtask, part.keep)
                if kept.num_rows:
                    receiver.inbox.restore(channel, kept)
    for subtask in restore.subtasks:
        seat = seating.seats.get((subtask.uid, subtask.subtask))
        for part in subtask.outgoing:
            channel = Channel(part.edge, subtask.subtask, part.state.receiver)
            output = None if seat is None else seat.outputs.get(channel)
            if output is None:
                raise _no_such(channel, part)
            for batch in _batches(graph, codec, part, read):
                output.send(batch, 0)
            if isinstance(output, RemoteOutput):
                output.flush()


def _batches(
    graph: JobGraph, codec: ElementCodec, part: InFlight, read: Callable[[Piece], bytes]
) -> Iterator[Batch]:
    return iter(read_batches(read(part.state.frames), graph.edges[part.edge], codec))


def _kept(graph: JobGraph, batch: Batch, edge: JobEdge, subtask: int, keep: str) -> Batch:
    if keep != KEEP_GROUPS:
        return batch
    if not isinstance(edge.partitioner, HashByKeyGroup):
        raise IncompatibleCheckpointError(
            f"records in flight from {edge.source!r} to {edge.target!r} were to be dealt out by key, and the "
            "stream between the two is not partitioned by key; restore at the parallelism of the checkpoint"
        )
    rows = OutgoingRows(batch.payload, np.empty(0, np.uint64))
    mine = edge.partitioner.select(rows, graph.vertex(edge.target).parallelism) == subtask
    times = None if batch.times is None else batch.times[mine]
    return Batch(batch.payload.filter(pa.array(mine)), None, times, batch.split)


def _no_such(channel: Channel, part: InFlight) -> IncompatibleCheckpointError:
    state = part.state
    return IncompatibleCheckpointError(
        f"records in flight from {state.source!r} to {state.target!r} belong to {channel}, which is none of this "
        "slot's channels"
    )


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
