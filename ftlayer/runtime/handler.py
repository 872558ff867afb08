"""The handler of a task: its persister, its anchors and its XORs, or nothing of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ftlayer.common.checks import fast_dataclass
from ftlayer.common.rules.restart import TRACEBACK, lasting_in_text
from ftlayer.errors import JobError
from ftlayer.records.failures import RowFailure
from ftlayer.records.ids import (
    I32Array,
    I64Array,
    U64Array,
    child_ids,
    concat_tries,
    join_ids,
    operator_key,
    tries_or_first,
    xor_fold_by_root,
)
from ftlayer.records.kernels import native
from ftlayer.vertex.calls import EventIds, Failure
from ftlayer.vertex.persister import FTPersister, IdBook, Persister, fold_lists


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
        if self.offsets is None:
            return np.arange(len(self.roots), dtype=np.int64)
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.offsets))

    def entries(self, records: I64Array) -> tuple[I64Array, I32Array | None]:
        """Find the RecordIds of ``records`` (int64[k], any order, repeated or not).

        Returns the place of each in `roots`, int64[j], by records; and the offsets into them, int32[k + 1], or None
        where each record has one.
        """
        if self.offsets is None:
            return records, None
        sizes = np.diff(self.offsets)[records]
        offsets = np.zeros(len(records) + 1, np.int32)
        np.cumsum(sizes, out=offsets[1:])
        first = self.offsets[:-1][records].astype(np.int64)
        return np.repeat(first - offsets[:-1], sizes) + np.arange(offsets[-1], dtype=np.int64), offsets

    def take(self, records: I64Array) -> RecordIds:
        places, offsets = self.entries(records)
        origins = None if self.origins is None else self.origins[places]
        tries = None if self.tries is None else self.tries[places]
        roots = self.roots[places]
        return RecordIds(
            roots, self.ids[places] if self.ids is not self.roots else roots, offsets, origins, tries
        )


def concat_record_ids(parts: Sequence[RecordIds]) -> RecordIds:
    if len(parts) == 1:
        return parts[0]
    offsets = None
    if any(part.offsets is not None for part in parts):
        counts = [
            np.ones(len(part), np.int32) if part.offsets is None else np.diff(part.offsets) for part in parts
        ]
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
    """Join the values of events, given with their roots; None: the value of each is the root itself."""
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


NOTHING_OWED: U64Array = np.zeros(0, np.uint64)
"""Nothing is owed with fault tolerance off."""

_Numbers = TypeVar("_Numbers", U64Array, I64Array)

_NO_CHANNEL = 2**64 - 1
"""In place of a channel, for a record that has none yet."""


class Children(Protocol):
    """n records about to be emitted; tells their RecordIds copy by copy.

    A record has one RecordId for each distinct root it derives from: as many as its parent, or as both its parents
    have together.
    """

    def __len__(self) -> int: ...

    def names(self, edge: int) -> U64Array:
        """Return a number that tells each record from the others before it has a channel: uint64[n]."""

    def copies(self, edge: int, owner: str, channel: int | I32Array) -> RecordIds | None:
        """Derive the RecordIds of one copy of each record, and note that they are owed; None with fault tolerance off.

        Call it once for each copy: twice with the same edge and channel would cancel out. ``owner`` is the chain that
        acknowledges these copies, ``channel`` the receiving channel, one for all or int32[n].
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
            self.places, self.pair_of, self.single = self.places[own], self.pair_of[own], False


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

    def copies(self, edge: int, owner: str, channel: int | I32Array) -> None: ...


def _names(site: Site, edge: int, parents: U64Array, ordinals: U64Array) -> U64Array:
    return child_ids(parents, operator=site.operator, edge=edge, ordinals=ordinals, channel=_NO_CHANNEL)


def _by_record_id(values: _Numbers, offsets: I32Array | None) -> _Numbers:
    return values if offsets is None else np.repeat(values, np.diff(offsets)).astype(values.dtype, copy=False)


def _channels(channel: int | I32Array, offsets: I32Array | None) -> int | U64Array:
    if not isinstance(channel, np.ndarray):
        return channel
    return _by_record_id(channel.astype(np.uint64), offsets)


def _shared(side: _Side, other: _Side) -> npt.NDArray[np.bool_]:
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
        self, left: RecordIds | None, left_rows: I64Array, right: RecordIds | None, right_rows: I64Array
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
        self, left: RecordIds | None, left_rows: I64Array, right: RecordIds | None, right_rows: I64Array
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
        self, left: RecordIds | None, left_rows: I64Array, right: RecordIds | None, right_rows: I64Array
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
        """Make the handler of one subtask of the chain ``uid``, which is unique in the graph.

        Args:
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
    """Records are not tracked: nothing is persisted, nothing has RecordIds, a failure fails the task."""

    def __init__(self, remedy: str = "") -> None:
        """``remedy`` is said with a failure."""
        self.persister = Persister()
        self.anchor = NonFTAnchorHandler()
        self.xor = NonFTXorHandler(remedy)
