"""Where a user's partitioner functions send the rows of one output, asked before anything is emitted.

A row for which one of them raises fails the record it comes from, and then no row of that record is to be sent by any
edge: so all functions are asked first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import pyarrow as pa

from ftlayer.functions.failures import RowFailure, failure_of
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.partitioning.partitioners import REFUSED, Custom, Forward, OutgoingRows, Partitioner
from ftlayer.records.ids import I32Array, I64Array
from ftlayer.runtime.task.lineages import BoolArray
from ftlayer.runtime.task.selection import OutEdge
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.operators import Replay


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
        if isinstance(out.edge.partitioner, Custom) and (out.selects or out.edge.routing is not None)
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
        assert isinstance(out.edge.partitioner, Custom)
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
        self._partitioners: dict[int, tuple[Partitioner, int]] = {}
        for edge in graph.edges:
            first = graph.vertex(edge.source).operators[-1]
            if first.uid == replay.of and edge.tag == replay.tag and edge.routing is not None:
                partitioner = cast(Partitioner, edge.partitioner)
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


def _outdated(stored: I32Array, partitioner: Partitioner, *, edited: bool) -> I64Array:
    """Return the rows whose number has to be made anew."""
    if edited and not isinstance(partitioner, Forward):
        return np.arange(len(stored), dtype=np.int64)
    return np.flatnonzero(stored == REFUSED) if isinstance(partitioner, Custom) else np.zeros(0, np.int64)


def _numbers(
    partitioner: Partitioner, payload: pa.RecordBatch, channels: int
) -> tuple[I32Array, list[tuple[int, BaseException]]]:
    """Return what is stored with rows for an edge, and what its function raises."""
    if isinstance(partitioner, Custom):
        return partitioner.route(payload, channels)
    numbers = partitioner.routing(OutgoingRows(payload, np.zeros(payload.num_rows, np.uint64)), channels)
    assert numbers is not None, f"{partitioner} stores nothing, and its edge has a column"
    return numbers, []
