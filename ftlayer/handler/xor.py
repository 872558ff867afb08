"""Acknowledgements of a task, folded by root, and its failures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ftlayer.functions.chain import RowFailure
from ftlayer.handler.exact_ids import IdBook
from ftlayer.handler.lineage import Lineage
from ftlayer.layer.calls import EventIds, Failure
from ftlayer.records.ids import I64Array, U64Array


@dataclass(frozen=True, slots=True)
class Events:
    """XOR events: ``values[i]`` for ``roots[i]``, uint64[m]. ``ids`` for a vertex with the exact tracker."""

    roots: U64Array
    values: U64Array
    ids: EventIds | None = None


class XorHandler(Protocol):
    """Collects what to tell the vertex, until it is taken."""

    def settle(self, anchors: Lineage | None, owed: U64Array, records: I64Array | None = None) -> None:
        """Acknowledge records: each RecordId's value is its id XOR what it owes.

        Args:
            anchors: RecordIds of a batch; None with fault tolerance off.
            owed: uint64[m] aligned with the anchors' roots, over all that was emitted under them.
            records: int64[k], which records of the batch, none of them twice; None for all.
        """

    def fail(self, anchors: Lineage | None, failures: Iterable[RowFailure]) -> None:
        """Fail all roots of records; ``row`` counts in records of ``anchors``. The first failure of a root stands.

        With fault tolerance off: raises `QueryError` with the first of them.
        """

    def events(self) -> Events | None:
        """Take what was settled since the last call, folded by root; None if nothing was."""

    def failures(self) -> tuple[Failure, ...]:
        """Take what failed since the last call."""
