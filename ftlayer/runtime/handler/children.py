"""Records that are about to be emitted, and the RecordIds of their copies.

A record has one RecordId for each distinct root it derives from: as many as its parent, or as both its parents
have together.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ftlayer.common.checks import fast_dataclass
from ftlayer.records.ids import I32Array, I64Array, U64Array, child_ids, join_ids, tries_or_first
from ftlayer.records.kernels import native
from ftlayer.runtime.handler.xor import RecordIds
from ftlayer.vertex.persister import IdBook

NOTHING_OWED: U64Array = np.zeros(0, np.uint64)
"""Nothing is owed with fault tolerance off."""

_Numbers = TypeVar("_Numbers", U64Array, I64Array)

_NO_CHANNEL = 2**64 - 1
"""In place of a channel, for a record that has none yet."""


class Children(Protocol):
    """n records about to be emitted; tells their RecordIds copy by copy."""

    def __len__(self) -> int: ...

    def names(self, edge: int) -> U64Array:
        """Return a number that tells each record from the others before it has a channel: uint64[n]."""

    def copies(self, edge: int, owner: str, channel: int | I32Array) -> RecordIds | None:
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
    @property
    def owed(self) -> U64Array:
        """uint64[m] aligned with the anchors' roots: the XOR of all copies so far; empty when off.

        The anchors' own ids (that very array) where each was handed on to one copy: nothing is to be acknowledged.
        """


class Pairs(Children, Protocol):
    @property
    def owed_left(self) -> U64Array:
        """As `Derived.owed`, for the left anchors: a pair's copies under the roots of its left record."""

    @property
    def owed_right(self) -> U64Array:
        """For the right anchors: a pair's copies under the roots that its right record has alone."""


@fast_dataclass
class Site:
    """Where ids are derived: the `operator_key` of the emitting chain; ``book`` keeps single ids if need be."""

    operator: int
    book: IdBook | None

    def owe(self, owed: U64Array, parents: U64Array, places: I64Array, ids: U64Array, owner: str) -> None:
        """Note that ``parents`` (uint64[j]), which stand at ``places`` of ``owed``, have emitted ``ids``."""
        native.xor_at(owed, places, ids)
        if self.book is not None:
            self.book.note(parents, ids, owner)


class OnlyCopies:
    """`Derived` with fault tolerance on, of children each of which is the only copy of its parent: it has its id."""

    def __init__(self, site: Site, anchors: RecordIds, parents: I64Array | None = None) -> None:
        """Child i is that of record ``parents[i]`` (none of them twice), None: of record i."""
        self._site = site
        self._children = anchors if parents is None else anchors.take(parents)
        self.owed: U64Array = anchors.ids
        if parents is not None:
            places, _ = anchors.entries(parents)
            self.owed = np.zeros(len(anchors.ids), np.uint64)
            self.owed[places] = self._children.ids

    def __len__(self) -> int:
        return len(self._children)

    def names(self, edge: int) -> U64Array:
        ids, offsets = self._children.ids, self._children.offsets
        parents = ids if offsets is None else ids[offsets[:-1]]
        return _names(self._site, edge, parents, np.zeros(len(parents), np.uint64))

    def copies(self, edge: int, owner: str, channel: int | I32Array) -> RecordIds:
        return self._children


class FTDerived:
    def __init__(self, site: Site, anchors: RecordIds, parents: I64Array, ordinals: U64Array) -> None:
        """``ordinals[i]`` (uint64[n]) counts child i among the children of its parent, ``parents[i]``."""
        self._site = site
        self._places, self._offsets = anchors.entries(parents)
        self._ordinals = _by_record_id(ordinals, self._offsets)
        self._parents = anchors.ids[self._places]
        self._roots = anchors.roots[self._places]
        self._origins = None if anchors.origins is None else anchors.origins[self._places]
        self._tries = None if anchors.tries is None else anchors.tries[self._places]
        self._records = len(parents)
        self.owed: U64Array = np.zeros(len(anchors.ids), np.uint64)

    def __len__(self) -> int:
        return self._records

    def names(self, edge: int) -> U64Array:
        first = slice(None) if self._offsets is None else self._offsets[:-1]
        return _names(self._site, edge, self._parents[first], self._ordinals[first])

    def copies(self, edge: int, owner: str, channel: int | I32Array) -> RecordIds:
        ids = child_ids(
            self._parents,
            operator=self._site.operator,
            edge=edge,
            ordinals=self._ordinals,
            channel=_channels(channel, self._offsets),
        )
        self._site.owe(self.owed, self._parents, self._places, ids, owner)
        return RecordIds(self._roots, ids, self._offsets, self._origins, self._tries)


class _Side:
    """One side of n pairs: the RecordIds that pairs have from it."""

    def __init__(self, number: int, anchors: RecordIds, rows: I64Array) -> None:
        places, offsets = anchors.entries(rows)
        first = places if offsets is None else places[offsets[:-1]]
        pairs = np.arange(len(rows), dtype=np.int64)
        self.number = number
        self.anchors = anchors
        self.single = offsets is None
        self.places = places
        self.pair_of = _by_record_id(pairs, offsets)
        self.names = anchors.ids[first]
        self.owed: U64Array = np.zeros(len(anchors.ids), np.uint64)

    @property
    def roots(self) -> U64Array:
        return self.anchors.roots[self.places]

    @property
    def origins(self) -> U64Array:
        origins = self.anchors.roots if self.anchors.origins is None else self.anchors.origins
        return origins[self.places]

    @property
    def tries(self) -> U64Array:
        return tries_or_first(self.anchors.tries, len(self.anchors.ids))[self.places]

    def without_roots_of(self, other: _Side) -> None:
        """Leave out RecordIds whose root the other record of the pair has too."""
        own = ~_shared(self, other)
        if not own.all():
            self.places, self.pair_of = self.places[own], self.pair_of[own]
            self.single = False


class FTPairs:
    def __init__(
        self,
        site: Site,
        left: RecordIds,
        left_rows: I64Array,
        right: RecordIds,
        right_rows: I64Array,
        first_ordinal: int,
    ) -> None:
        """``first_ordinal`` and the numbers after it are no other pairs' of this chain's subtask."""
        self._site = site
        self._left, self._right = _Side(0, left, left_rows), _Side(1, right, right_rows)
        self._right.without_roots_of(self._left)
        n = len(left_rows)
        self._ordinals = np.arange(first_ordinal, first_ordinal + n, dtype=np.uint64)
        pair_of = np.concatenate([self._left.pair_of, self._right.pair_of])
        self._order = np.argsort(pair_of, kind="stable")
        self._offsets: I32Array | None = np.zeros(n + 1, np.int32)
        np.cumsum(np.bincount(pair_of, minlength=n), out=self._offsets[1:])
        if len(pair_of) == n:
            self._offsets = None
        self._roots = self._in_order(self._left.roots, self._right.roots)
        replays = left.origins is not None or right.origins is not None
        self._origins = self._in_order(self._left.origins, self._right.origins) if replays else None
        tried = left.tries is not None or right.tries is not None
        self._tries = self._in_order(self._left.tries, self._right.tries) if tried else None

    def __len__(self) -> int:
        return len(self._ordinals)

    @property
    def owed_left(self) -> U64Array:
        return self._left.owed

    @property
    def owed_right(self) -> U64Array:
        return self._right.owed

    def names(self, edge: int) -> U64Array:
        return join_ids(
            self._left.names,
            self._right.names,
            side=0,
            operator=self._site.operator,
            edge=edge,
            ordinals=self._ordinals,
            channel=_NO_CHANNEL,
        )

    def copies(self, edge: int, owner: str, channel: int | I32Array) -> RecordIds:
        left = self._side_ids(self._left, edge, owner, channel)
        right = self._side_ids(self._right, edge, owner, channel)
        ids = self._in_order(left, right)
        return RecordIds(self._roots, ids, self._offsets, self._origins, self._tries)

    def _side_ids(self, side: _Side, edge: int, owner: str, channel: int | I32Array) -> U64Array:
        parents = side.anchors.ids[side.places]
        # Of the other record, its first id stands for it: the root that is derived for may be none of its own.
        left = parents if side is self._left else self._left.names[side.pair_of]
        right = parents if side is self._right else self._right.names[side.pair_of]
        ids = join_ids(
            left,
            right,
            side=side.number,
            operator=self._site.operator,
            edge=edge,
            ordinals=self._ordinals[side.pair_of],
            channel=channel.astype(np.uint64)[side.pair_of] if isinstance(channel, np.ndarray) else channel,
        )
        self._site.owe(side.owed, parents, side.places, ids, owner)
        return ids

    def _in_order(self, left: U64Array, right: U64Array) -> U64Array:
        """Put both sides' values in the order of the pairs, the left side's first in each."""
        both: U64Array = np.concatenate([left, right])[self._order]
        return both


class UntrackedChildren:
    """`Derived` and `Pairs` with fault tolerance off. ``first`` counts the records before these."""

    owed: U64Array = NOTHING_OWED
    owed_left: U64Array = NOTHING_OWED
    owed_right: U64Array = NOTHING_OWED

    def __init__(self, first: int, n: int) -> None:
        self._first, self._n = first, n

    def __len__(self) -> int:
        return self._n

    def names(self, edge: int) -> U64Array:
        return np.arange(self._first, self._first + self._n, dtype=np.uint64)

    def copies(self, edge: int, owner: str, channel: int | I32Array) -> None:
        """Return None."""


def _names(site: Site, edge: int, parents: U64Array, ordinals: U64Array) -> U64Array:
    return child_ids(parents, operator=site.operator, edge=edge, ordinals=ordinals, channel=_NO_CHANNEL)


def _by_record_id(values: _Numbers, offsets: I32Array | None) -> _Numbers:
    return values if offsets is None else np.repeat(values, np.diff(offsets)).astype(values.dtype, copy=False)


def _channels(channel: int | I32Array, offsets: I32Array | None) -> int | U64Array:
    if not isinstance(channel, np.ndarray):
        return channel
    return _by_record_id(channel.astype(np.uint64), offsets)


def _shared(side: _Side, other: _Side) -> npt.NDArray[np.bool_]:
    """Return for each RecordId of ``side`` whether the other record of its pair has the root too."""
    if side.single and other.single:
        same: npt.NDArray[np.bool_] = side.roots == other.roots
        return same
    pair_of = np.concatenate([other.pair_of, side.pair_of])
    roots = np.concatenate([other.roots, side.roots])
    # A record's roots are distinct, so equal neighbours are one of each; the sort is stable, `other`'s is first.
    order = np.lexsort((roots, pair_of))
    again = np.zeros(len(order), np.bool_)
    same_pair = pair_of[order[1:]] == pair_of[order[:-1]]
    again[order[1:]] = same_pair & (roots[order[1:]] == roots[order[:-1]])
    return again[len(other.pair_of) :]
