"""Where a user's partitioner functions send the rows of one output, asked before anything is emitted.

A row for which one of them raises fails the record it comes from, and then no row of that record is to be sent by any
edge: so all functions are asked first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ftlayer.errors import InvalidTopologyError, ProtocolError
from ftlayer.functions.conversion import schema_text
from ftlayer.functions.failures import failure_of
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.records import partitioning
from ftlayer.records.failures import RowFailure
from ftlayer.records.ids import I32Array, I64Array, U64Array
from ftlayer.records.kernels import native
from ftlayer.records.keyhash import key_column
from ftlayer.runtime.handler import Children
from ftlayer.runtime.protocol.messages import Batch
from ftlayer.runtime.task.actions import Send
from ftlayer.runtime.task.contract import BoolArray
from ftlayer.topology.job_graph import JobEdge, JobGraph, keys_of
from ftlayer.topology.operators import AssignWatermarks, CoProcess, Operator, Replay


def key_schemas(operators: Sequence[Operator], inputs: Sequence[pa.Schema]) -> dict[str, pa.Schema]:
    """Return the key columns of each operator that has a key, by uid, in the key's order.

    ``inputs`` are the schemas of what the first operator takes. A `CoProcess` has those of its first input;
    `InvalidTopologyError` if the second one's have other types, since equal keys would have different groups.
    """
    found: dict[str, pa.Schema] = {}
    for operator in operators:
        schemas = [
            _key_schema(columns, schema)
            for columns, schema in zip(keys_of(operator), inputs, strict=True)
            if columns
        ]
        if isinstance(operator, CoProcess) and schemas and _types(schemas[0]) != _types(schemas[-1]):
            raise InvalidTopologyError(
                f"{operator.uid!r}: the key of input 0 is ({schema_text(schemas[0])}) and that of input 1 is "
                f"({schema_text(schemas[-1])}); equal keys of different types have different key groups: convert one "
                "of them in a map before"
            )
        if schemas:
            found[operator.uid] = schemas[0]
        inputs = (operator.schema,)
    return found


def _key_schema(columns: tuple[str, ...], schema: pa.Schema) -> pa.Schema:
    nothing = pa.RecordBatch.from_pylist([], schema=schema)
    return pa.schema([(name, key_column(nothing, name).type) for name in columns])


def _types(schema: pa.Schema) -> list[pa.DataType]:
    return [field.type for field in schema]


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
        everywhere = isinstance(edge.partitioner, partitioning.Broadcast | partitioning.ReplayEverywhere)
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
        return twin.select(partitioning.StoredRows(self._names(children, twin), routing), self.receivers)

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

    def _outgoing(self, payload: pa.RecordBatch, children: Children) -> partitioning.OutgoingRows:
        names = self._names(children, self._partitioner)
        return partitioning.OutgoingRows(payload, names, self._subtask, self._sent)

    def _names(
        self, children: Children, partitioner: partitioning.Partitioner | partitioning.ReplayPartitioner
    ) -> U64Array:
        """Return the children's names for one that draws channels from them; zeros for others.

        A name costs more than the hash of a short key.
        """
        if isinstance(partitioner, partitioning.Shuffle | partitioning.ReplayAnywhere):
            return children.names(self.edge.number)
        return np.broadcast_to(np.uint64(0), len(children))

    @property
    def _partitioner(self) -> partitioning.Partitioner:
        return cast(partitioning.Partitioner, self.edge.partitioner)

    @property
    def _twin(self) -> partitioning.ReplayPartitioner:
        if self._is_replay:
            return cast(partitioning.ReplayPartitioner, self.edge.partitioner)
        return partitioning.replay_twin(self._partitioner)


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


@dataclass(frozen=True)
class Routes:
    """The functions' answers for n rows.

    Attributes:
        selections: int32[n] by number of the edge: the channel, `REFUSED` where the function raised.
        failures: why it did; the first one of each row.
    """

    selections: Mapping[int, I32Array]
    failures: tuple[RowFailure, ...]

    def keep(self, keep: BoolArray) -> Routes:
        """Return those of some of the rows, of which no function refused any."""
        return Routes({edge: chosen[keep] for edge, chosen in self.selections.items()}, ())


def asked(edges: Sequence[OutEdge]) -> tuple[OutEdge, ...]:
    """Return the edges by which rows go where a function says."""
    return tuple(
        out
        for out in edges
        if isinstance(out.edge.partitioner, partitioning.Custom)
        and (out.selects or out.edge.routing is not None)
    )


def ask(
    edges: Sequence[OutEdge], operator: str, payload: pa.RecordBatch, rules: RetryRules = NO_RULES
) -> Routes:
    """Ask the functions of ``edges`` (see `asked`), once for edges that store their answers together.

    ``operator`` is whose failure it is where one raises, and ``rules`` are its rules.
    """
    failures: dict[int, RowFailure] = {}
    selections: dict[int, I32Array] = {}
    stored: dict[int, I32Array] = {}
    for out in edges:
        assert isinstance(out.edge.partitioner, partitioning.Custom)
        column = out.edge.routing
        if column is not None and column in stored:
            selections[out.edge.number] = stored[column]
            continue
        chosen, refused = out.edge.partitioner.route(payload, out.receivers)
        for row, error in refused:
            failures.setdefault(row, failure_of(row, operator, error, rules))
        selections[out.edge.number] = chosen
        if column is not None:
            stored[column] = chosen
    return Routes(selections, tuple(failures[row] for row in sorted(failures)))


class StoredRouting:
    """What was stored with records for a `Replay`'s edges, as it is to be now.

    Functions are asked again for records for which they raised at the source. For records that were edited since, the
    keys are looked at anew; which subtask of the source had read them stays.
    """

    def __init__(self, graph: JobGraph, replay: Replay) -> None:
        self._operator = replay.of
        self._rules = replay.rules
        self._partitioners: dict[int, tuple[partitioning.Partitioner, int]] = {}
        for edge in graph.edges:
            first = graph.vertex(edge.source).operators[-1]
            if first.uid == replay.of and edge.tag == replay.tag and edge.routing is not None:
                partitioner = cast(partitioning.Partitioner, edge.partitioner)
                self._partitioners[edge.routing] = partitioner, graph.vertex(edge.target).parallelism

    def now(
        self, payload: pa.RecordBatch, key_hashes: I32Array | None, *, edited: bool
    ) -> tuple[I32Array | None, tuple[RowFailure, ...]]:
        """Return ``key_hashes`` as they are to be, and what fails: functions may raise (again)."""
        if key_hashes is None:
            return None, ()
        columns = key_hashes if key_hashes.ndim == 2 else key_hashes[:, np.newaxis]
        failures: dict[int, RowFailure] = {}
        for column, (partitioner, channels) in self._partitioners.items():
            if column >= columns.shape[1]:
                continue  # stored for fewer edges: the emitter says so
            rows = _outdated(columns[:, column], partitioner, edited=edited)
            if not len(rows):
                continue
            columns = columns.copy()
            columns[rows, column], refused = _numbers(partitioner, payload.take(pa.array(rows)), channels)
            for place, error in refused:
                row = int(rows[place])
                failures.setdefault(row, failure_of(row, self._operator, error, self._rules))
        return columns.reshape(key_hashes.shape), tuple(failures.values())


def _outdated(stored: I32Array, partitioner: partitioning.Partitioner, *, edited: bool) -> I64Array:
    if edited and not isinstance(partitioner, partitioning.Forward):
        return np.arange(len(stored), dtype=np.int64)
    return (
        np.flatnonzero(stored == partitioning.REFUSED)
        if isinstance(partitioner, partitioning.Custom)
        else np.zeros(0, np.int64)
    )


def _numbers(
    partitioner: partitioning.Partitioner, payload: pa.RecordBatch, channels: int
) -> tuple[I32Array, list[tuple[int, BaseException]]]:
    if isinstance(partitioner, partitioning.Custom):
        return partitioner.route(payload, channels)
    numbers = partitioner.routing(
        partitioning.OutgoingRows(payload, np.zeros(payload.num_rows, np.uint64)), channels
    )
    assert numbers is not None, f"{partitioner} stores nothing, and its edge has a column"
    return numbers, []
