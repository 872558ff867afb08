"""Ids of what a task emits, derived from the ids of what it was given (the anchors), a batch at a time.

Every copy (one a receiving channel of every edge) has an id of its own. The parent owes it: what the parent
acknowledges in the end is its own id XOR the ids of all copies of its children. So each id is XORed twice into
its root, once by the parent and once by the receiver.
"""

from __future__ import annotations

from typing import Protocol

from ftlayer.handler.exact_ids import IdBook
from ftlayer.handler.lineage import Lineage
from ftlayer.layer.calls import EventIds
from ftlayer.records.ids import I32Array, I64Array, U64Array


class Children(Protocol):
    """n records about to be emitted; tells their RecordIds edge by edge."""

    def __len__(self) -> int: ...

    def names(self, edge: int) -> U64Array:
        """Return a number that tells each record from the others before it has a channel: uint64[n]."""

    def copies(self, edge: int, owner: str, channel: int | I32Array) -> Lineage | None:
        """Derive the RecordIds of one copy of each record, and note that they are owed.

        Call it once for each copy: twice with the same edge and channel would cancel out.

        Args:
            edge: number of the edge.
            owner: the chain that acknowledges these copies.
            channel: the receiving channel, one for all or int32[n].

        Returns:
            The RecordIds, None with fault tolerance off.
        """


class Derived(Children, Protocol):
    """Children of one batch of anchors."""

    @property
    def owed(self) -> U64Array:
        """uint64[m] aligned with the anchors' roots: the XOR of all copies so far; empty when off."""


class Pairs(Children, Protocol):
    """Children of two anchors each."""

    @property
    def owed_left(self) -> U64Array:
        """As `Derived.owed`, for the left anchors: a pair's copies under the roots of its left record."""

    @property
    def owed_right(self) -> U64Array:
        """For the right anchors: a pair's copies under the roots that its right record has alone."""


class AnchorHandler(Protocol):
    """Makes the RecordIds of what comes out of a task."""

    def derive(self, anchors: Lineage | None, parents: I64Array, tag: str = "") -> Derived:
        """Begin to emit children: one record for each of ``parents``, which are records of ``anchors``.

        Args:
            anchors: of the batch that is processed; None with fault tolerance off. Calls in a row with this
                very object are one invocation, in which the ordinals of a parent's children go on.
            parents: int64[k], in any order, repeated or not.
            tag: the output they go to; each has ordinals of its own.
        """

    def pair(
        self,
        left: Lineage | None,
        left_rows: I64Array,
        right: Lineage | None,
        right_rows: I64Array,
    ) -> Pairs:
        """Begin to emit pairs: record ``left_rows[i]`` of ``left`` with ``right_rows[i]`` of ``right``.

        A pair has one RecordId for each distinct root of its two records. A root that both have is owed by
        the left one: neither may have been acknowledged yet.
        """

    def of_roots(self, roots: U64Array | None, n: int) -> Derived:
        """Begin to emit ``n`` new roots. Their anchors are ``roots`` with their `initial_record_ids`."""

    def event_ids(self, roots: U64Array | None) -> EventIds | None:
        """Take the single ids of all copies of new roots, in the order of ``roots``; None unless exact."""
