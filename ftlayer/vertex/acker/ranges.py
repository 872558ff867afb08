"""Pending roots whose ids are consecutive: an XOR and a stamp of each, side by side in memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ftlayer.records.ids import RootRange

from . import range_kernels as kernels
from .rotating_map import U64, Entries, Lookup, Mask, empty_entries, empty_lookup

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
        self, keys: U64, values: U64, zeros: U64, words: U64, missing: npt.NDArray[np.int64]
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
