"""Acknowledgements of a task, folded by root, and its failures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ftlayer.errors import JobError
from ftlayer.functions.chains.chain import RowFailure
from ftlayer.handler.exact_ids import IdBook, fold_lists
from ftlayer.handler.record_ids import RecordIds
from ftlayer.records.ids import I64Array, U64Array, xor_fold_by_root
from ftlayer.recovery import lasting_in_text
from ftlayer.vertex.calls import EventIds, Failure


@dataclass(frozen=True, slots=True)
class Events:
    """XOR events: ``values[i]`` for ``roots[i]``, uint64[m]. ``ids`` for a vertex with the exact tracker."""

    roots: U64Array
    values: U64Array
    ids: EventIds | None = None


class XorHandler(Protocol):
    """Collects what to tell the vertex, until it is taken."""

    def settle(self, anchors: RecordIds | None, owed: U64Array, records: I64Array | None = None) -> None:
        """Acknowledge records: each RecordId's value is its id XOR what it owes.

        Args:
            anchors: RecordIds of a batch; None with fault tolerance off.
            owed: uint64[m] aligned with the anchors' roots, over all that was emitted under them.
            records: int64[k], which records of the batch, none of them twice; None for all.
        """

    def fail(self, anchors: RecordIds | None, failures: Iterable[RowFailure]) -> None:
        """Fail all roots of records; ``row`` counts in records of ``anchors``. The first failure of a root stands.

        With fault tolerance off: raises `JobError` with the first of them.
        """

    def events(self) -> Events | None:
        """Take what was settled since the last call, folded by root; None if nothing was."""

    def failures(self) -> tuple[Failure, ...]:
        """Take what failed since the last call."""


class FTXorHandler:
    """`XorHandler` with fault tolerance on."""

    def __init__(self, book: IdBook | None) -> None:
        """``book`` keeps single ids; None: they are not needed."""
        self._book = book
        self._roots: list[U64Array] = []
        self._values: list[U64Array] = []
        self._ids: list[EventIds] = []
        self._failures: dict[int, Failure] = {}

    def settle(self, anchors: RecordIds | None, owed: U64Array, records: I64Array | None = None) -> None:
        """See `XorHandler.settle`."""
        if anchors is None:
            raise ValueError("anchors: with fault tolerance on every record has RecordIds")
        roots, ids = anchors.roots, anchors.ids
        if records is not None:
            places, _ = anchors.entries(records)
            roots, ids, owed = roots[places], ids[places], owed[places]
        if not len(roots):
            return
        self._roots.append(roots)
        self._values.append(ids ^ owed)
        if self._book is not None:
            self._ids.append(self._book.take(ids, own=True))

    def fail(self, anchors: RecordIds | None, failures: Iterable[RowFailure]) -> None:
        """See `XorHandler.fail`."""
        if anchors is None:
            raise ValueError("anchors: with fault tolerance on every record has RecordIds")
        for failure in failures:
            places, _ = anchors.entries(np.array([failure.row], np.int64))
            for root in anchors.roots[places].tolist():
                self._failures.setdefault(root, Failure.of(root, failure))
            if self._book is not None:
                self._book.take(anchors.ids[places], own=True)

    def events(self) -> Events | None:
        """See `XorHandler.events`."""
        if not self._roots:
            return None
        roots, values = self._roots, self._values
        single = len(roots) == 1
        all_roots = roots[0] if single else np.concatenate(roots)
        unique, folded = xor_fold_by_root(all_roots, values[0] if single else np.concatenate(values))
        lists = None
        if self._book is not None:
            group = {root: place for place, root in enumerate(unique.tolist())}
            groups = np.array([group[root] for root in all_roots.tolist()], np.int64)
            lists = fold_lists(self._ids, groups, len(unique))
        self._roots, self._values, self._ids = [], [], []
        return Events(unique, folded, lists)

    def failures(self) -> tuple[Failure, ...]:
        """See `XorHandler.failures`."""
        failed, self._failures = tuple(self._failures.values()), {}
        return failed


class NonFTXorHandler:
    """`XorHandler` where records are not tracked."""

    def __init__(self, remedy: str = "") -> None:
        self._remedy = remedy

    def settle(self, anchors: RecordIds | None, owed: U64Array, records: I64Array | None = None) -> None:
        """Do nothing."""

    def fail(self, anchors: RecordIds | None, failures: Iterable[RowFailure]) -> None:
        """Raise the first failure as a `JobError`, or as the error that no restart mends."""
        for failure in failures:
            error = lasting_in_text(failure.traceback) or JobError(
                f"{failure.operator!r} failed: {failure.reason}{self._remedy}\n{failure.traceback}"
            )
            error.operator = failure.operator
            raise error

    def events(self) -> Events | None:
        """Return None."""
        return None

    def failures(self) -> tuple[Failure, ...]:
        """Return nothing."""
        return ()
