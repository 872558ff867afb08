"""The handler of a task: its persister, its anchors and its XORs, or nothing of them."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ftlayer.records.ids import I64Array, U64Array, operator_key
from ftlayer.records.kernels import native
from ftlayer.runtime.handler.children import (
    Derived,
    FTDerived,
    FTPairs,
    OnlyCopies,
    Pairs,
    Site,
    UntrackedChildren,
)
from ftlayer.runtime.handler.xor import FTXorHandler, NonFTXorHandler, RecordIds, XorHandler
from ftlayer.vertex.calls import EventIds
from ftlayer.vertex.persister import FTPersister, IdBook, Persister

# Ids of what a task emits, derived from the ids of what it was given (the anchors), a batch at a time.
#
# Every copy (one a receiving channel of every edge) has an id of its own. The parent owes it: what the parent
# acknowledges in the end is its own id XOR the ids of all copies of its children. So each id is XORed twice into
# its root, once by the parent and once by the receiver.
#
# A copy that is its parent's only one keeps the parent's id. What the parent acknowledges is 0 then, and is not sent:
# the root goes on waiting for the id, which is the copy's from now on. At any time one record that is not
# acknowledged has the id. Were there another copy, its own id would be owed by an event that may come late: an
# acknowledgement of the kept id would then look like the end of the parent, and complete the root too early. So this
# is for only copies alone.


class AnchorHandler(Protocol):
    """Makes the RecordIds of what comes out of a task."""

    def derive(
        self, anchors: RecordIds | None, parents: I64Array, tag: str = "", *, once: bool = False
    ) -> Derived:
        """Begin to emit children: one record for each of ``parents``, which are records of ``anchors``.

        Args:
            anchors: of the batch that is processed; None with fault tolerance off. Calls in a row with this
                very object are one invocation, in which the ordinals of a parent's children go on.
            parents: int64[k], in any order, repeated or not.
            tag: the output they go to; each has ordinals of its own.
            once: `Children.copies` is called once for these children, and there are no others of the same invocation.
        """

    def pair(
        self,
        left: RecordIds | None,
        left_rows: I64Array,
        right: RecordIds | None,
        right_rows: I64Array,
    ) -> Pairs:
        """Begin to emit pairs: record ``left_rows[i]`` of ``left`` with ``right_rows[i]`` of ``right``.

        A pair has one RecordId for each distinct root of its two records. A root that both have is owed by
        the left one: neither may have been acknowledged yet.
        """

    def of_roots(self, roots: U64Array | None, n: int, *, once: bool = False) -> Derived:
        """Begin to emit ``n`` new roots: children of anchors with ``roots`` as ids. ``once`` as in `derive`."""

    def event_ids(self, roots: U64Array | None) -> EventIds | None:
        """Take the single ids of all copies of new roots, in the order of ``roots``; None unless exact."""


class FTAnchorHandler:
    def __init__(self, uid: str, book: IdBook | None) -> None:
        """``uid`` is the emitting chain's; ``book`` keeps single ids, None: they are not needed."""
        self._site = Site(operator_key(uid), book)
        self._book = book
        self._anchors: RecordIds | None = None
        self._counts: dict[str, U64Array] = {}
        self._pairs = 0

    def derive(
        self, anchors: RecordIds | None, parents: I64Array, tag: str = "", *, once: bool = False
    ) -> Derived:
        anchors = _tracked(anchors)
        if once and self._book is None and _distinct(parents):
            return OnlyCopies(self._site, anchors, None if len(parents) == len(anchors) else parents)
        if anchors is not self._anchors:
            self._anchors = anchors
            self._counts = {}
        counts = self._counts.get(tag)
        if counts is None:
            counts = self._counts[tag] = np.zeros(len(anchors), np.uint64)
        ordinals = np.empty(len(parents), np.uint64)
        native.child_ordinals(parents, counts, ordinals)
        return FTDerived(self._site, anchors, parents, ordinals)

    def pair(
        self,
        left: RecordIds | None,
        left_rows: I64Array,
        right: RecordIds | None,
        right_rows: I64Array,
    ) -> Pairs:
        # A number no other pair of this task has: the same two records may be paired again at any time.
        first, self._pairs = self._pairs, self._pairs + len(left_rows)
        return FTPairs(self._site, _tracked(left), left_rows, _tracked(right), right_rows, first)

    def of_roots(self, roots: U64Array | None, n: int, *, once: bool = False) -> Derived:
        if roots is None:
            raise ValueError("roots: with fault tolerance on every new record has a root")
        anchors = RecordIds(roots, roots)
        if once and self._book is None:
            return OnlyCopies(self._site, anchors)
        return FTDerived(self._site, anchors, np.arange(n), np.zeros(n, np.uint64))

    def event_ids(self, roots: U64Array | None) -> EventIds | None:
        if self._book is None or roots is None:
            return None
        return self._book.take(roots, own=False)


class NonFTAnchorHandler:
    def __init__(self) -> None:
        self._count = 0

    def derive(
        self, anchors: RecordIds | None, parents: I64Array, tag: str = "", *, once: bool = False
    ) -> Derived:
        return self._children(len(parents))

    def pair(
        self,
        left: RecordIds | None,
        left_rows: I64Array,
        right: RecordIds | None,
        right_rows: I64Array,
    ) -> Pairs:
        return self._children(len(left_rows))

    def of_roots(self, roots: U64Array | None, n: int, *, once: bool = False) -> Derived:
        return self._children(n)

    def event_ids(self, roots: U64Array | None) -> EventIds | None:
        return None

    def _children(self, n: int) -> UntrackedChildren:
        first, self._count = self._count, self._count + n
        return UntrackedChildren(first, n)


def _distinct(parents: I64Array) -> bool:
    """Whether they ascend without repetition. (Others are taken for repeated ones: chains keep the order.)"""
    return bool((parents[1:] > parents[:-1]).all())


def _tracked(anchors: RecordIds | None) -> RecordIds:
    if anchors is None:
        raise ValueError("anchors: with fault tolerance on every record has RecordIds")
    return anchors


class Handler:
    """The fault tolerance of one task. Its parts know of each other; no two tasks share a handler.

    Attributes:
        persister: gives source records their roots and puts them into the form the vertex takes.
        anchor: derives the ids of what comes out from the ids of what went in.
        xor: collects what is to be acknowledged, and what failed.
    """

    persister: Persister
    anchor: AnchorHandler
    xor: XorHandler


class FTHandler(Handler):
    def __init__(
        self, uid: str, *, job: str, run: str, shard: int = 0, shards: int = 1, exact: bool = False
    ) -> None:
        """Make the handler of one subtask of the chain ``uid``.

        Args:
            uid: unique in the graph; goes into the ids of everything the chain emits.
            job: stable name of the job (or query); goes into root ids.
            run: names this process's part in a run of the job; goes into root ids. A task that is started again
                counts its records from 0 again, so that two starts under one name would give one id twice.
            shard, shards: which shard of the vertex keeps the job's streams; the top bits of root ids.
            exact: the vertex keeps single ids, so make `EventIds` (slow).
        """
        book = IdBook() if exact else None
        self.persister = FTPersister(job, run, shard, shards)
        self.anchor = FTAnchorHandler(uid, book)
        self.xor = FTXorHandler(book)


class NonFTHandler(Handler):
    """Records are not tracked: nothing is persisted, nothing has RecordIds, a failure fails the task.

    ``remedy`` is said with the failure.
    """

    def __init__(self, remedy: str = "") -> None:
        self.persister = Persister()
        self.anchor = NonFTAnchorHandler()
        self.xor = NonFTXorHandler(remedy)
