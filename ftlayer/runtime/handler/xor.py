"""Acknowledgements of a task, folded by root, and its failures."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np

from ftlayer.common.checks import fast_dataclass
from ftlayer.common.restart import TRACEBACK, lasting_in_text
from ftlayer.errors import JobError
from ftlayer.records.failures import RowFailure
from ftlayer.records.ids import I32Array, I64Array, U64Array, concat_tries, xor_fold_by_root
from ftlayer.vertex.calls import EventIds, Failure
from ftlayer.vertex.persister import IdBook, fold_lists


@fast_dataclass
class RecordIds:
    """The RecordIds of n records: the source record that each derives from, and its own name. Never 0.

    Attributes:
        roots, ids: uint64[m], m = n while every record has one anchor. They are one object where each record is the
            only copy of its root: a copy that is alone keeps its parent's id, and the first id of a root is itself.
        offsets: int32[n + 1], record i has the RecordIds ``offsets[i]`` up to ``offsets[i + 1]``, with
            distinct roots; None where each has one.
        origins: uint64[m], the first root of each; None where these are the roots themselves (no replays).
        tries: uint64[m], how often each was tried (`ftlayer.records.ids`); None where none has failed.
    """

    roots: U64Array
    ids: U64Array
    offsets: I32Array | None = None
    origins: U64Array | None = None
    tries: U64Array | None = None

    def __len__(self) -> int:
        return len(self.roots) if self.offsets is None else len(self.offsets) - 1

    @property
    def record_of(self) -> I64Array:
        """int64[m]: the record that each RecordId belongs to."""
        if self.offsets is None:
            return np.arange(len(self.roots), dtype=np.int64)
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.offsets))

    def entries(self, records: I64Array) -> tuple[I64Array, I32Array | None]:
        """Find the RecordIds of ``records`` (int64[k], any order, repeated or not).

        Returns:
            The place of each in `roots`, int64[j], by records; and the offsets into them, int32[k + 1], or
            None where each record has one.
        """
        if self.offsets is None:
            return records, None
        sizes = np.diff(self.offsets)[records]
        offsets = np.zeros(len(records) + 1, np.int32)
        np.cumsum(sizes, out=offsets[1:])
        first = self.offsets[:-1][records].astype(np.int64)
        return np.repeat(first - offsets[:-1], sizes) + np.arange(offsets[-1], dtype=np.int64), offsets

    def take(self, records: I64Array) -> RecordIds:
        """Return the RecordIds of ``records`` (int64[k]), in that order."""
        places, offsets = self.entries(records)
        origins = None if self.origins is None else self.origins[places]
        tries = None if self.tries is None else self.tries[places]
        roots = self.roots[places]
        return RecordIds(
            roots, self.ids[places] if self.ids is not self.roots else roots, offsets, origins, tries
        )


def concat_record_ids(parts: Sequence[RecordIds]) -> RecordIds:
    """Return the records of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    offsets = None
    if any(part.offsets is not None for part in parts):
        counts = [_counts(part) for part in parts]
        offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(np.concatenate(counts), dtype=np.int32)])
    origins = None
    if any(part.origins is not None for part in parts):
        origins = np.concatenate([origins_of(part) for part in parts])
    roots = np.concatenate([part.roots for part in parts])
    alone = all(part.ids is part.roots for part in parts)
    return RecordIds(
        roots,
        roots if alone else np.concatenate([part.ids for part in parts]),
        offsets,
        origins,
        concat_tries([(part.tries, len(part.ids)) for part in parts]),
    )


def origins_of(lineage: RecordIds) -> U64Array:
    return lineage.roots if lineage.origins is None else lineage.origins


def _counts(lineage: RecordIds) -> I32Array:
    return np.ones(len(lineage), np.int32) if lineage.offsets is None else np.diff(lineage.offsets)


@fast_dataclass
class Events:
    """XOR events: ``values[i]`` for ``roots[i]``, uint64[m]. ``ids`` for a vertex with the exact tracker.

    ``values`` None: the value of each is the root itself.
    """

    roots: U64Array
    values: U64Array | None
    ids: EventIds | None = None


class XorHandler:
    """Collects what to tell the vertex, until it is taken: nothing, with fault tolerance off."""

    def settle(
        self, anchors: RecordIds | None, owed: U64Array | None, records: I64Array | None = None
    ) -> None:
        """Acknowledge records: each RecordId's value is its id XOR what it owes. A value of 0 changes nothing.

        Args:
            anchors: RecordIds of a batch; None with fault tolerance off.
            owed: uint64[m] aligned with the anchors' roots, over all that was emitted under them; None: nothing was.
                Of `Children.owed`, so that it is the anchors' own ids where these were handed on.
            records: int64[k], which records of the batch, none of them twice; None for all.
        """

    @abstractmethod
    def fail(self, anchors: RecordIds | None, failures: Iterable[RowFailure]) -> None:
        """Fail all roots of records; ``row`` counts in records of ``anchors``. The first failure of a root stands.

        With fault tolerance off: raises `JobError` with the first of them.
        """

    def events(self) -> Events | None:
        """Take what was settled since the last call, folded by root; None if nothing was."""
        return None

    def failures(self) -> tuple[Failure, ...]:
        return ()


class FTXorHandler(XorHandler):
    def __init__(self, book: IdBook | None) -> None:
        """``book`` keeps single ids; None: they are not needed."""
        self._book = book
        self._roots: list[U64Array] = []
        self._values: list[U64Array | None] = []
        self._ids: list[EventIds] = []
        self._failures: dict[int, Failure] = {}

    def settle(
        self, anchors: RecordIds | None, owed: U64Array | None, records: I64Array | None = None
    ) -> None:
        if anchors is None:
            raise ValueError("anchors: with fault tolerance on every record has RecordIds")
        if owed is anchors.ids:
            return
        if records is not None:
            places, _ = anchors.entries(records)
            anchors, owed = anchors.take(records), None if owed is None else owed[places]
        if owed is not None:
            # What was handed on to one copy is not to be told of.
            open_ = np.flatnonzero(owed != anchors.ids)
            roots, ids, owed = anchors.roots[open_], anchors.ids[open_], owed[open_]
            values = None if anchors.ids is anchors.roots and not owed.any() else ids ^ owed
        else:
            roots, ids = anchors.roots, anchors.ids
            values = None if ids is roots else ids
        if not len(roots):
            return
        self._roots.append(roots)
        self._values.append(values)
        if self._book is not None:
            self._ids.append(self._book.take(ids, own=True))

    def fail(self, anchors: RecordIds | None, failures: Iterable[RowFailure]) -> None:
        if anchors is None:
            raise ValueError("anchors: with fault tolerance on every record has RecordIds")
        for failure in failures:
            places, _ = anchors.entries(np.array([failure.row], np.int64))
            for root in anchors.roots[places].tolist():
                self._failures.setdefault(root, Failure.of(root, failure))
            if self._book is not None:
                self._book.take(anchors.ids[places], own=True)

    def events(self) -> Events | None:
        if not self._roots:
            return None
        roots = self._roots
        all_roots = roots[0] if len(roots) == 1 else np.concatenate(roots)
        values = joined_values(zip(roots, self._values, strict=True))
        if values is None and self._book is None:
            # Only copies, one of each root: there is nothing to fold.
            self._roots, self._values = [], []
            return Events(all_roots, None)
        unique, folded = xor_fold_by_root(all_roots, all_roots if values is None else values)
        lists = None
        if self._book is not None:
            group = {root: place for place, root in enumerate(unique.tolist())}
            groups = np.array([group[root] for root in all_roots.tolist()], np.int64)
            lists = fold_lists(self._ids, groups, len(unique))
        self._roots, self._values, self._ids = [], [], []
        return Events(unique, folded, lists)

    def failures(self) -> tuple[Failure, ...]:
        failed, self._failures = tuple(self._failures.values()), {}
        return failed


def joined_values(parts: Iterable[tuple[U64Array, U64Array | None]]) -> U64Array | None:
    """Join the values of events, given with their roots; None where each event's value is its root."""
    pairs = list(parts)
    if all(values is None for _, values in pairs):
        return None
    given = [roots if values is None else values for roots, values in pairs]
    return given[0] if len(given) == 1 else np.concatenate(given)


class NonFTXorHandler(XorHandler):
    def __init__(self, remedy: str = "") -> None:
        self._remedy = remedy

    def fail(self, anchors: RecordIds | None, failures: Iterable[RowFailure]) -> None:
        """Raise the first failure as a `JobError`, or as the error that no restart mends."""
        for failure in failures:
            # What was never raised has no line that begins a traceback.
            found = lasting_in_text(f"{TRACEBACK}\n{failure.traceback}")
            said = f"{failure.operator!r} failed: {failure.reason}{self._remedy}\n{failure.traceback}"
            error = JobError(said) if found is None else type(found)(f"{found}{self._remedy}")
            error.operator = failure.operator
            raise error
