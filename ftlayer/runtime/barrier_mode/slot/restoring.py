"""Records that were in flight when a checkpoint was taken, put where they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from ftlayer.checkpoint.pieces import Piece
from ftlayer.checkpoint.snapshots import InFlight, Restore
from ftlayer.errors import IncompatibleCheckpointError
from ftlayer.partitioning.key_groups import HashByKeyGroup
from ftlayer.partitioning.partitioners import OutgoingRows
from ftlayer.runtime.barrier_mode.slot.capture import read_batches
from ftlayer.runtime.protocol.channel_frames import ElementCodec
from ftlayer.runtime.protocol.elements import Batch
from ftlayer.runtime.slot.outputs import RemoteOutput
from ftlayer.runtime.slot.seat import Seating
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph

KEEP_GROUPS = "groups"


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
    """Return the rows of a batch that belong to a subtask."""
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
    return Batch(batch.payload.filter(pa.array(mine)), None, times)


def _no_such(channel: Channel, part: InFlight) -> IncompatibleCheckpointError:
    state = part.state
    return IncompatibleCheckpointError(
        f"records in flight from {state.source!r} to {state.target!r} belong to {channel}, which is none of this "
        "slot's channels"
    )
