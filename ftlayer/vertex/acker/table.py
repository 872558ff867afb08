from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ftlayer.records.ids import RootRange
from ftlayer.vertex.acker import range_kernels as kernels
from ftlayer.vertex.acker.rotating_map import (
    NEVER,
    U64,
    Entries,
    IdLists,
    Located,
    Lookup,
    Mask,
    Roots,
    RotatingHashMap,
    as_stamp,
    as_u64,
    empty_entries,
    empty_lookup,
    no_zeros,
)

_ROOM = 64
_SPARSE = 16
"""A range with one root of so many left is given up: the hash table takes less memory for them."""


class Sparse(NamedTuple):
    """Roots of ranges that were given up: their entries, and the stamp of each, uint16[n]."""

    entries: Entries
    stamps: npt.NDArray[np.uint16]


class RangeTable:
    """uint64 root → (uint64 XOR, never 0; uint64 location; uint16 stamp) for roots of ranges that do not overlap.

    A root costs 10 bytes while its range has roots left, and an event of a range's next root a few nanoseconds, since
    it lies beside the one before. Finding a range is a binary search. Not safe for concurrent calls.
    """

    def __init__(self) -> None:
        self._directory = np.zeros((kernels.FIELDS, _ROOM), np.uint64)
        self._used = 0
        self._arrays: dict[int, tuple[U64, npt.NDArray[np.uint16]]] = {}

    def __len__(self) -> int:
        return int(self._directory[kernels.LEFT, : self._used].sum())

    @property
    def has_ranges(self) -> bool:
        return self._used > 0

    @property
    def nbytes(self) -> int:
        return 10 * int(self._directory[kernels.COUNT, : self._used].sum()) + self._directory.nbytes

    def overlaps(self, roots: RootRange) -> bool:
        """Whether some of ``roots`` lie in a range that is there, be they in it still or not."""
        firsts, counts = self._directory[[kernels.FIRST, kernels.COUNT], : self._used]
        before = int(np.searchsorted(firsts, np.uint64(roots.first), "right")) - 1
        if before >= 0 and roots.first - int(firsts[before]) < int(counts[before]):
            return True
        behind = before + 1
        return behind < self._used and int(firsts[behind]) - roots.first < roots.count

    def insert(self, roots: RootRange, values: U64, location: int, stamp: np.uint16) -> None:
        """Add a range that overlaps with none; a root whose value is 0 is not there. ``values`` are kept."""
        stamps = np.full(roots.count, stamp, np.uint16)
        left = int(np.count_nonzero(values))
        if not left:
            return
        if self._used == self._directory.shape[1]:
            self._directory = np.concatenate([self._directory, np.zeros_like(self._directory)], axis=1)
        at = int(np.searchsorted(self._directory[kernels.FIRST, : self._used], np.uint64(roots.first)))
        self._directory[:, at + 1 : self._used + 1] = self._directory[:, at : self._used].copy()
        self._directory[:, at] = (
            roots.first,
            roots.count,
            values.ctypes.data,
            stamps.ctypes.data,
            location,
            left,
        )
        self._used += 1
        self._arrays[roots.first] = values, stamps

    def fold_and_take(
        self,
        keys: U64,
        values: U64,
        zeros: U64,
        words: U64,
        missing: npt.NDArray[np.int64],
    ) -> tuple[int, int]:
        taken, missed = kernels.fold_and_take(
            self._directory, self._used, keys, values, zeros, words, missing
        )
        if taken:
            self._drop_empty()
        return int(taken), int(missed)

    def look_up(self, keys: U64) -> Lookup:
        lookup = empty_lookup(keys.size)
        kernels.look_up(self._directory, self._used, keys, False, *lookup)
        return lookup

    def remove(self, keys: U64) -> Lookup:
        lookup = empty_lookup(keys.size)
        if kernels.look_up(self._directory, self._used, keys, True, *lookup):
            self._drop_empty()
        return lookup

    def restamp(self, keys: U64, stamp: np.uint16) -> Mask:
        found = np.empty(keys.size, np.bool_)
        kernels.restamp(self._directory, self._used, keys, stamp, found)
        return found

    def stamped(self, stamp: np.uint16) -> Entries:
        """Return the roots with this stamp, range by range."""
        return self._collect(stamp, any_stamp=False)

    def entries(self) -> Entries:
        return self._collect(np.uint16(0), any_stamp=True)

    def take_sparse(self) -> list[Sparse]:
        """Give up ranges of which little is left; return the roots that were."""
        counts = self._directory[kernels.COUNT, : self._used]
        left = self._directory[kernels.LEFT, : self._used]
        found = []
        for at in np.flatnonzero(left * np.uint64(_SPARSE) < counts).tolist():
            first, location = (int(self._directory[field, at]) for field in (kernels.FIRST, kernels.LOCATION))
            values, stamps = self._arrays[first]
            rows = np.flatnonzero(values)
            entries = Entries(
                rows.astype(np.uint64) + np.uint64(first),
                values[rows],
                rows.astype(np.uint64) + np.uint64(location),
            )
            found.append(Sparse(entries, stamps[rows]))
            self._directory[kernels.LEFT, at] = 0
        if found:
            self._drop_empty()
        return found

    def _collect(self, stamp: np.uint16, *, any_stamp: bool) -> Entries:
        total = kernels.count_stamped(self._directory, self._used, stamp, any_stamp)
        entries = empty_entries(int(total))
        kernels.collect_stamped(self._directory, self._used, stamp, any_stamp, *entries)
        return entries

    def _drop_empty(self) -> None:
        left = self._directory[kernels.LEFT, : self._used]
        if left.all():
            return
        for first in self._directory[kernels.FIRST, : self._used][left == 0].tolist():
            del self._arrays[first]
        kept = self._directory[:, : self._used][:, left != 0]
        self._used = kept.shape[1]
        self._directory[:, : self._used] = kept
        if self._used == 0:
            # What a kernel looks at first.
            self._directory[:, 0] = 0


LEAST_RANGE = 1024
"""So many roots are worth a range: a directory of many small ones would take long to search, and to insert into."""

_NOTHING = np.empty(0, np.uint64)


class AckerTable:
    """Pending roots, each with the XOR of the ids emitted and not yet acknowledged: in a hash table, ranges beside it.

    Batches are uint64[n] arrays; events count in the order of the batch, and a root may occur in it any number of
    times. A root completes when it is registered and its value is 0: once, after which it is unknown. ``bucket`` is a
    number from a `BucketRotation` (default: never expires). ``ids`` are the lists that ``values`` were folded from, for
    the tracker that keeps them, `ExactTracker`. Not thread-safe. Raises `ConfigError` for arrays of another dtype,
    shape or length, and for a root 0 in `register`.

    A root in the hash table costs 47 bytes on average (26 for a place, of which 52 to 61 % are in use), expiry
    included; more in a table of less than some 50,000 roots. One of a range costs 10, until most of the range are done
    and the rest goes into the hash table. Orphans have a table of their own, made when the first one comes, so that an
    entry of the other tables is registered and never at 0. The method is Storm's: the value of a root can be 0 before
    its end with a probability of about the number of its events x 2^-64.
    """

    def __init__(self, least_range: int = LEAST_RANGE) -> None:
        self._least_range = least_range
        self._table = RotatingHashMap()
        self._ranges = RangeTable()
        self._orphans: RotatingHashMap | None = None
        self._zeros = self._words = _NOTHING
        self._missing = np.empty(0, np.int64)
        self._unknown_xors = 0
        self._duplicate_registrations = 0

    def register(
        self,
        roots: U64,
        values: U64,
        *,
        locations: U64 | None = None,
        bucket: int = NEVER,
        ids: IdLists | None = None,
    ) -> Roots:
        """Enter roots with the XOR of all ids emitted for them; return those complete at once.

        A location is a number of the caller's, handed back when the root leaves (default 0). What was held for the root
        counts. A root that is registered already stays as it is, and is counted in `duplicate_registrations`.
        """
        roots = no_zeros(as_u64(roots, "roots"), "roots")
        values = as_u64(values, "values", roots.size)
        if locations is None:
            locations = np.zeros(roots.size, np.uint64)
        else:
            locations = as_u64(locations, "locations", roots.size)
        stamp = as_stamp(bucket)
        if self._orphans is not None and len(self._orphans):
            values = values ^ self._orphans.remove(roots).values
        if self._ranges.has_ranges:
            there = self._ranges.look_up(roots).found
            if there.any():
                self._duplicate_registrations += int(np.count_nonzero(there))
                roots, values, locations = roots[~there], values[~there], locations[~there]
        self._duplicate_registrations += self._table.insert(roots, values, locations, stamp)
        return self._take_complete(roots[values == 0])

    def register_range(
        self,
        roots: RootRange,
        values: U64 | None,
        *,
        location: int = 0,
        bucket: int = NEVER,
        ids: IdLists | None = None,
    ) -> Roots:
        """Do the same for consecutive roots and locations; ``values`` None: the value of each is its own id."""
        each = roots.ids()
        values = each.copy() if values is None else as_u64(values, "values", len(roots)).copy()
        if not self._fits(roots, each):
            locations = np.arange(location, location + len(roots), dtype=np.uint64)
            return self.register(each, values, locations=locations, bucket=bucket)
        if self.orphan_count:
            assert self._orphans is not None
            values ^= self._orphans.remove(each).values
        self._ranges.insert(roots, values, location, as_stamp(bucket))
        done = np.flatnonzero(values == 0).astype(np.uint64)
        return Roots(done + np.uint64(roots.first), done + np.uint64(location))

    def _fits(self, roots: RootRange, each: U64) -> bool:
        """Whether roots can be a range of their own: worth it, and none of them is here."""
        if len(roots) < self._least_range or self._ranges.overlaps(roots):
            return False
        return not len(self._table) or not self._table.look_up(each).found.any()

    def xor(
        self,
        roots: U64,
        values: U64,
        *,
        hold_unregistered: bool = False,
        bucket: int = NEVER,
        ids: IdLists | None = None,
    ) -> Roots:
        """XOR values into pending roots; return those that completed.

        An event of an unknown root is ignored and counted in `unknown_xors`; with ``hold_unregistered`` it is held for
        the root's registration (as an *orphan*, stamped with ``bucket``), save for a root that completed in the batch.
        """
        roots = as_u64(roots, "roots")
        values = as_u64(values, "values", roots.size)
        stamp = as_stamp(bucket)
        self._make_room(roots.size)
        if self._ranges.has_ranges:
            return self._xor_with_ranges(roots, values, stamp, hold_unregistered=hold_unregistered)
        taken, missed = self._table.fold_and_take(roots, values, self._zeros, self._words, self._missing)
        complete = Roots(self._zeros[:taken].copy(), self._words[:taken].copy())
        self._table.shrink_one()
        if missed and hold_unregistered:
            missed -= self._hold(roots, values, self._missing[:missed], complete.roots, stamp)
        self._unknown_xors += missed
        return complete

    def _xor_with_ranges(
        self, roots: U64, values: U64, stamp: np.uint16, *, hold_unregistered: bool
    ) -> Roots:
        taken, missed = self._ranges.fold_and_take(roots, values, self._zeros, self._words, self._missing)
        complete = Roots(self._zeros[:taken].copy(), self._words[:taken].copy())
        if not missed:
            return complete
        others = self._missing[:missed].copy()
        roots, values = roots[others], values[others]
        taken, missed = self._table.fold_and_take(roots, values, self._zeros, self._words, self._missing)
        complete = Roots(
            np.concatenate([complete.roots, self._zeros[:taken]]),
            np.concatenate([complete.locations, self._words[:taken]]),
        )
        self._table.shrink_one()
        if missed and hold_unregistered:
            missed -= self._hold(roots, values, self._missing[:missed], complete.roots, stamp)
        self._unknown_xors += missed
        return complete

    def forget(self, roots: U64) -> Located:
        """Drop pending roots, complete or not; their later events are unknown."""
        roots = as_u64(roots, "roots")
        lookup = self._table.remove(roots)
        self._table.shrink_one()
        if self._ranges.has_ranges:
            lookup = _either(lookup, self._ranges.remove(roots))
        return Located(lookup.found, lookup.words)

    def touch(self, roots: U64, bucket: int) -> Mask:
        roots = as_u64(roots, "roots")
        if not self._ranges.has_ranges:
            return self._table.restamp(roots, as_stamp(bucket))
        found = self._ranges.restamp(roots, as_stamp(bucket))
        if not found.all():
            found[~found] = self._table.restamp(roots[~found], as_stamp(bucket))
        return found

    def expire(self, buckets: Sequence[int], *, keep_as: int | None = None) -> Roots:
        """Return the pending roots in these buckets; drop them, or move them to bucket ``keep_as``.

        Reads two bytes for each place of the tables and bucket, some milliseconds for 10 M roots.
        """
        tables: tuple[RotatingHashMap | RangeTable, ...] = (self._table, self._ranges)
        found = [(table, table.stamped(stamp)) for stamp in _expirable(buckets) for table in tables]
        # Behind the search for all: ``keep_as`` may be one of the buckets.
        for table, entries in found:
            if keep_as is None:
                table.remove(entries.keys)
            else:
                table.restamp(entries.keys, as_stamp(keep_as))
        taken = [entries for _, entries in found]
        self._move_sparse()
        self._table.shrink_one()
        return Roots(
            np.concatenate([_NOTHING, *(entries.keys for entries in taken)]),
            np.concatenate([_NOTHING, *(entries.words for entries in taken)]),
        )

    def drop_orphans(self, buckets: Sequence[int]) -> int:
        """Drop the orphans in these buckets (numbers apart from those of roots); return how many."""
        if self._orphans is None:
            return 0
        dropped = 0
        for stamp in _expirable(buckets):
            keys = self._orphans.stamped(stamp).keys
            self._orphans.remove(keys)
            dropped += keys.size
        self._orphans.shrink_one()
        return dropped

    def locate(self, roots: U64) -> Located:
        lookup = self._look_up(roots)
        return Located(lookup.found, lookup.words)

    def contains(self, roots: U64) -> Mask:
        return self._look_up(roots).found

    def values(self, roots: U64) -> U64:
        return self._look_up(roots).values

    def pending(self) -> Roots:
        entries, ranges = self._table.entries(), self._ranges.entries()
        return Roots(
            np.concatenate([entries.keys, ranges.keys]), np.concatenate([entries.words, ranges.words])
        )

    @property
    def pending_count(self) -> int:
        return len(self._table) + len(self._ranges)

    @property
    def orphan_count(self) -> int:
        return 0 if self._orphans is None else len(self._orphans)

    @property
    def unknown_xors(self) -> int:
        return self._unknown_xors

    @property
    def duplicate_registrations(self) -> int:
        return self._duplicate_registrations

    @property
    def nbytes(self) -> int:
        """Bytes of the places in use and free, expiry bookkeeping included; memory is a few pages more."""
        orphans = 0 if self._orphans is None else self._orphans.nbytes
        return self._table.nbytes + self._ranges.nbytes + orphans

    def _look_up(self, roots: U64) -> Lookup:
        roots = as_u64(roots, "roots")
        lookup = self._table.look_up(roots)
        return _either(lookup, self._ranges.look_up(roots)) if self._ranges.has_ranges else lookup

    def _move_sparse(self) -> None:
        """Move the last roots of ranges into the hash table: a few are not to hold the memory of all."""
        for entries, stamps in self._ranges.take_sparse():
            for stamp in np.unique(stamps):
                some = stamps == stamp
                self._table.insert(entries.keys[some], entries.values[some], entries.words[some], stamp)

    def _take_complete(self, candidates: U64) -> Roots:
        """Take out those registered at 0 (a duplicate registration with 0 says nothing about its root)."""
        if candidates.size == 0:
            return Roots(_NOTHING, _NOTHING)
        lookup = self._table.look_up(candidates)
        candidates = candidates[lookup.found & (lookup.values == 0)]
        removed = self._table.remove(candidates)
        return Roots(candidates[removed.found], removed.words[removed.found])

    def _hold(
        self,
        roots: U64,
        values: U64,
        missing: npt.NDArray[np.int64],
        complete: U64,
        stamp: np.uint16,
    ) -> int:
        """Keep events of unknown roots; return how many (not those that came after the completion)."""
        missing = missing[(roots[missing] != 0) & ~np.isin(roots[missing], complete)]
        if self._orphans is None:
            self._orphans = RotatingHashMap()
        self._orphans.upsert(roots[missing], values[missing], stamp, fold=True)
        return missing.size

    def _make_room(self, events: int) -> None:
        if self._zeros.size < events:
            self._zeros = np.empty(events, np.uint64)
            self._words = np.empty(events, np.uint64)
            self._missing = np.empty(events, np.int64)


def _either(one: Lookup, other: Lookup) -> Lookup:
    return Lookup(one.found | other.found, one.values | other.values, one.words | other.words)


def _expirable(buckets: Sequence[int]) -> list[np.uint16]:
    """Return the buckets as stamps; bucket 0 holds what never expires."""
    return [as_stamp(bucket) for bucket in buckets if bucket != NEVER]


def warm_up() -> None:
    """Compile every kernel (some seconds), or load it (some 10 ms), so that no call of a running vertex has to."""
    table = AckerTable()
    ids = np.arange(1, 3, dtype=np.uint64)
    for _ in range(2):
        table.xor(ids, ids, hold_unregistered=True, bucket=1)
        table.drop_orphans([1])
    table.register(ids, ids, bucket=1)
    table.touch(ids, 2)
    table.expire([2], keep_as=1)
    table.pending()
    table.values(ids)
    table.xor(ids, ids)
    roots = RootRange(10, LEAST_RANGE)
    table.register_range(roots, None, bucket=1)
    table.touch(roots.ids(), 2)
    table.expire([2], keep_as=1)
    table.pending()
    table.forget(roots.ids()[:1])
    table.xor(roots.ids(), roots.ids())
    several = np.arange(1, 100_000, dtype=np.uint64)
    table.register(several, several)
