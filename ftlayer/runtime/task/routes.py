"""Where a user's partitioner functions send the rows of one output, asked before anything is emitted.

A row for which one of them raises fails the record it comes from, and then no row of that record is to be sent by any
edge: so all functions are asked first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ftlayer.functions.failures import RowFailure, failure_of
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.partitioning.partitioners import REFUSED, Custom
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


class SecondAsking:
    """The functions behind a `Replay`'s edges, for stored rows for which they raised at the source."""

    def __init__(self, graph: JobGraph, replay: Replay) -> None:
        self._operator = replay.of
        self._rules = replay.rules
        self._functions: dict[int, tuple[Custom, int]] = {}
        for edge in graph.edges:
            first = graph.vertex(edge.source).operators[-1]
            if first.uid == replay.of and edge.tag == replay.tag and isinstance(edge.partitioner, Custom):
                assert edge.routing is not None
                self._functions[edge.routing] = edge.partitioner, graph.vertex(edge.target).parallelism

    def ask(
        self, payload: pa.RecordBatch, key_hashes: I32Array | None
    ) -> tuple[I32Array | None, tuple[RowFailure, ...]]:
        """Return ``key_hashes`` with the channels that were missing, and what fails again."""
        if key_hashes is None or not self._functions:
            return key_hashes, ()
        columns = key_hashes if key_hashes.ndim == 2 else key_hashes[:, np.newaxis]
        failures: dict[int, RowFailure] = {}
        for column, (function, channels) in self._functions.items():
            rows: I64Array = np.flatnonzero(columns[:, column] == REFUSED)
            if not len(rows):
                continue
            columns = columns.copy()
            columns[rows, column], refused = function.route(payload.take(pa.array(rows)), channels)
            for place, error in refused:
                row = int(rows[place])
                failures.setdefault(row, failure_of(row, self._operator, error, self._rules))
        return columns.reshape(key_hashes.shape), tuple(failures.values())
