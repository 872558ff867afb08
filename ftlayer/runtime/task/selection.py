"""The end of an edge in the subtask that sends by it: which channel gets which rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ftlayer.errors import ProtocolError
from ftlayer.handler.children import Children
from ftlayer.partitioning.partitioners import Broadcast, OutgoingRows, Partitioner, Shuffle
from ftlayer.partitioning.replay import (
    ReplayAnywhere,
    ReplayEverywhere,
    ReplayPartitioner,
    StoredRows,
    replay_twin,
)
from ftlayer.records.ids import I32Array, I64Array, U64Array
from ftlayer.records.kernels import native
from ftlayer.runtime.protocol.elements import Batch
from ftlayer.runtime.task.actions import Send
from ftlayer.topology.job_graph import JobEdge, JobGraph
from ftlayer.topology.operators import AssignWatermarks, Replay


class OutEdge:
    """One edge as one subtask sends by it.

    Attributes:
        edge: what it is in the graph.
        channels: those of this subtask, by receiver. A forward edge has one, to the subtask of the same number.
        selects: whether different rows go to different channels, so that a selection is needed.
        receivers: the subtasks that the edge leads to.
        copies_once: whether each row goes to one channel.
        is_timed: whether watermarks are made of its records where it leads to.
    """

    def __init__(self, graph: JobGraph, edge: JobEdge, subtask: int) -> None:
        mine = (channel for channel in graph.channels(edge) if channel.sender == subtask)
        self.edge = edge
        self.channels = tuple(sorted(mine, key=lambda channel: channel.receiver))
        everywhere = isinstance(edge.partitioner, Broadcast | ReplayEverywhere)
        self.selects = len(self.channels) > 1 and not everywhere
        self.copies_once = len(self.channels) == 1 or self.selects
        self._is_replay = isinstance(graph.vertex(edge.source).operators[0], Replay)
        self.receivers = graph.vertex(edge.target).parallelism
        self.is_timed = any(
            isinstance(each, AssignWatermarks) for each in graph.vertex(edge.target).operators
        )
        self._subtask = subtask
        self._sent = 0

    def select(self, payload: pa.RecordBatch, children: Children) -> I32Array | None:
        """Ask the partitioner for the selection; None if it takes none."""
        if not self.selects:
            return None
        return self._partitioner.select(self._outgoing(payload, children), self.receivers)

    def routing(self, payload: pa.RecordBatch, children: Children) -> I32Array:
        """Return what is stored with each row for the partitioner's twin: int32[n]."""
        numbers = self._partitioner.routing(self._outgoing(payload, children), self.receivers)
        if numbers is None:
            raise ProtocolError(
                f"edge {self.edge.number} has a routing column, and {self._partitioner} stores nothing"
            )
        return numbers

    def select_stored(self, children: Children, routing: I32Array | None) -> I32Array | None:
        """Ask the partitioner's twin for the selection, ``routing`` being what is stored; None if it takes none."""
        if not self.selects:
            return None
        twin = self._twin
        return twin.select(StoredRows(self._names(children, twin), routing), self.receivers)

    def send(
        self, payload: pa.RecordBatch, children: Children, times: I64Array | None, selection: I32Array | None
    ) -> Iterator[Send]:
        """Make the batches: each channel's rows by ``selection`` (int32[n]), all rows to each without one.

        Raises ValueError unless there are as many children as rows.
        """
        edge = self.edge
        if len(children) != payload.num_rows:
            raise ValueError(
                f"{payload.num_rows} rows have {len(children)} children's ids on edge {edge.number}"
            )
        self._sent += payload.num_rows
        if selection is None:
            for channel in self.channels:
                lineage = children.copies(edge.number, edge.target, channel.receiver)
                yield Send(channel, Batch(payload, lineage, times))
            return
        lineage = children.copies(edge.number, edge.target, selection)
        whole = Batch(payload, lineage, times)
        for channel, rows in zip(self.channels, split_rows(selection, self.receivers), strict=True):
            if len(rows):
                yield Send(channel, whole if len(rows) == whole.num_rows else taken(whole, rows))

    def _outgoing(self, payload: pa.RecordBatch, children: Children) -> OutgoingRows:
        names = self._names(children, self._partitioner)
        return OutgoingRows(payload, names, self._subtask, self._sent)

    def _names(self, children: Children, partitioner: Partitioner | ReplayPartitioner) -> U64Array:
        """Return the children's names for one that draws channels from them; zeros for others.

        A name costs more than the hash of a short key.
        """
        if isinstance(partitioner, Shuffle | ReplayAnywhere):
            return children.names(self.edge.number)
        return np.broadcast_to(np.uint64(0), len(children))

    @property
    def _partitioner(self) -> Partitioner:
        return cast(Partitioner, self.edge.partitioner)

    @property
    def _twin(self) -> ReplayPartitioner:
        if self._is_replay:
            return cast(ReplayPartitioner, self.edge.partitioner)
        return replay_twin(self._partitioner)


def split_rows(selection: I32Array, channels: int) -> list[I64Array]:
    """Return the rows of each channel, in their order. Broadcasts need no selection.

    Raises IndexError for a selection that is no channel.
    """
    order, ends = np.empty(len(selection), np.int64), np.empty(channels, np.int64)
    native.split_rows(selection, order, ends)
    bounds = [0, *ends.tolist()]
    return [order[start:end] for start, end in pairwise(bounds)]


def taken(batch: Batch, rows: I64Array) -> Batch:
    return Batch(
        pc.take(batch.payload, pa.array(rows), boundscheck=False),
        None if batch.lineage is None else batch.lineage.take(rows),
        None if batch.times is None else batch.times[rows],
        batch.split,
    )
