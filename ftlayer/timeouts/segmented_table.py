"""A hash table of 64-bit keys that is resized segment by segment."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ftlayer.errors import ConfigError, MachineError

from . import kernels
from .arena import Arena

U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

NEVER = 0
"""The stamp of entries that no bucket's expiry takes."""

MAX_STAMP = 2**16 - 1

_SMALLEST_CAPACITY = 64
# Growing by a quarter keeps 60 to 75 % of the slots in use, at four moves (in memory order) per entry.
_GROWTH = 1.25
_MAX_LOAD = 0.75
# A segment shrinks when it could do with this share of its slots, so that a steady swing never resizes it.
_SHRINK_BELOW = 0.4
# Slots reserved (as address space) at first; a table that outgrows them is moved as a whole.
_RESERVED_SLOTS = 1 << 27
_LEAST_RESERVED_SLOTS = 1 << 20
# A region of a power of two would put the same slot of all segments into the same sets of the caches.
_REGION_GRAIN = 256


class Entries(NamedTuple):
    """Rows that belong together: ``keys``, ``values`` and ``words``, uint64[n] each."""

    keys: U64
    values: U64
    words: U64


class Lookup(NamedTuple):
    """What was found for each key asked for: ``found`` bool[n]; value and word uint64[n], 0 if absent."""

    found: Mask
    values: U64
    words: U64


def as_u64(values: npt.ArrayLike, what: str, length: int | None = None) -> U64:
    """Return ``values`` as a contiguous uint64[n]; `ConfigError` for another dtype, shape or length."""
    array = np.asarray(values)
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.uint64)
    if array.dtype != np.uint64 or array.ndim != 1:
        raise ConfigError(
            f"{what}: expected a one-dimensional uint64 array, got {array.dtype} of shape {array.shape}; "
            "convert it with numpy.asarray(..., dtype=numpy.uint64)"
        )
    if length is not None and array.size != length:
        raise ConfigError(f"{what}: expected {length} items, one for each key, got {array.size}")
    return np.ascontiguousarray(array)


def no_zeros(keys: U64, what: str) -> U64:
    """Return ``keys``; `ConfigError` if one of them is 0, which is never an id."""
    if not keys.all():
        position = int(np.flatnonzero(keys == 0)[0])
        raise ConfigError(f"{what}: item {position} is 0, and 0 is never an id")
    return keys


def as_stamp(bucket: int) -> np.uint16:
    """Return ``bucket`` as the table keeps it; `ConfigError` if it is out of range."""
    if not 0 <= bucket <= MAX_STAMP:
        raise ConfigError(f"bucket {bucket}: expected 0 (never expires) to {MAX_STAMP}")
    return np.uint16(bucket)


class SegmentedTable:
    """uint64 key → (uint64 value, uint64 word, uint16 stamp), a batch of keys per call.

    26 bytes a slot. A call that adds n keys resizes the segments that it fills; segments grow at
    different moments, so a small batch pays for few of them. One segment at most shrinks per call of
    `shrink_one`. Keys are never 0. Not safe for concurrent calls: the kernels run without the GIL.
    """

    def __init__(self) -> None:
        self._levels = [0] * kernels.SEGMENTS
        self._directory = np.zeros((kernels.SEGMENTS, 4), np.int64)
        self._scratch = _Scratch(0)
        self._next_to_shrink = 0
        self._reserve(_RESERVED_SLOTS, _LEAST_RESERVED_SLOTS)
        for segment in range(kernels.SEGMENTS):
            self._directory[segment, kernels.CAPACITY] = _capacity(segment, 0)
            self._directory[segment, kernels.LIMIT] = _limit(_capacity(segment, 0))

    def __len__(self) -> int:
        return int(self._directory[:, kernels.COUNT].sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, free ones too, and of the scratch space for resizing."""
        slots = int(self._directory[:, kernels.CAPACITY].sum())
        return slots * 26 + self._scratch.nbytes

    def insert(self, keys: U64, values: U64, words: U64, stamp: np.uint16) -> int:
        """Add the keys that are new; return how many were there already (and stay as they are)."""
        position, refused = 0, 0
        while True:
            position, segment, already = kernels.insert(
                *self._slots, self._directory, self._stride, keys, values, words, stamp, position
            )
            refused += already
            if segment < 0:
                self._note_peaks()
                return refused
            self._resize(segment, self._levels[segment] + 1)

    def upsert(self, keys: U64, values: U64, stamp: np.uint16, *, fold: bool) -> None:
        """Add keys, or replace (``fold``: XOR into) the value of those that are there; stamp them all."""
        position = 0
        while True:
            position, segment = kernels.upsert(
                *self._slots, self._directory, self._stride, keys, values, stamp, fold, position
            )
            if segment < 0:
                self._note_peaks()
                return
            self._resize(segment, self._levels[segment] + 1)

    def fold_until_zero(
        self, keys: U64, values: U64, zeros: U64, missing: npt.NDArray[np.int64]
    ) -> tuple[int, int]:
        """See `kernels.fold_until_zero`; ``zeros`` and ``missing`` have room for n items."""
        reached, missed = kernels.fold_until_zero(
            self._pairs, self._directory, self._stride, keys, values, zeros, missing
        )
        return int(reached), int(missed)

    def remove(self, keys: U64) -> Lookup:
        """Take keys out; a key twice in the batch is found once."""
        lookup = _empty_lookup(keys.size)
        kernels.remove(*self._slots, self._directory, self._stride, keys, *lookup)
        return lookup

    def look_up(self, keys: U64) -> Lookup:
        """Read keys."""
        lookup = _empty_lookup(keys.size)
        kernels.look_up(self._pairs, self._extras, self._directory, self._stride, keys, *lookup)
        return lookup

    def restamp(self, keys: U64, stamp: np.uint16) -> Mask:
        """Give the keys that are there another stamp; return which were."""
        found = np.empty(keys.size, np.bool_)
        kernels.restamp(self._pairs, self._stamps, self._directory, self._stride, keys, stamp, found)
        return found

    def stamped(self, stamp: np.uint16) -> Entries:
        """Return the entries with this stamp (not 0), in no particular order."""
        counts = kernels.count_stamped(self._stamps, self._directory, self._stride, stamp)
        entries = _empty_entries(int(counts.sum()))
        kernels.collect_stamped(*self._slots, self._directory, self._stride, counts, stamp, *entries)
        return entries

    def entries(self) -> Entries:
        """Return a copy of all entries, in no particular order."""
        entries = _empty_entries(len(self))
        kernels.collect_all(self._pairs, self._extras, self._directory, self._stride, *entries)
        return entries

    def shrink_one(self) -> None:
        """Look at the next segment in turn, and give back slots it has not needed since the last look."""
        segment = self._next_to_shrink
        self._next_to_shrink = (segment + 1) % kernels.SEGMENTS
        row = self._directory[segment]
        needed = max(int(row[kernels.PEAK]), int(row[kernels.COUNT]))
        row[kernels.PEAK] = 0
        if needed < _SHRINK_BELOW * row[kernels.LIMIT] and self._levels[segment] > 0:
            level = self._levels[segment]
            while level > 0 and _limit(_capacity(segment, level - 1)) > needed / _MAX_LOAD:
                level -= 1
            self._resize(segment, level)

    def longest_run(self) -> int:
        """Return the length of the longest run of used slots: no probe sequence is longer."""
        longest = 0
        for segment in range(kernels.SEGMENTS):
            base = segment * self._stride
            keys = self._pairs[2 * base : 2 * (base + int(self._directory[segment, kernels.CAPACITY])) : 2]
            free = np.flatnonzero(keys == 0)
            gaps = np.diff(np.concatenate([free, free[:1] + keys.size]))
            longest = max(longest, int(gaps.max()) - 1)
        return longest

    def _note_peaks(self) -> None:
        peaks = self._directory[:, kernels.PEAK]
        np.maximum(peaks, self._directory[:, kernels.COUNT], out=peaks)

    def _resize(self, segment: int, level: int) -> None:
        old, new = int(self._directory[segment, kernels.CAPACITY]), _capacity(segment, level)
        if new > self._stride:
            self._move_to_larger_regions()
        base = segment * self._stride
        if new > old:
            for arena in self._arenas:
                scale = arena.array.size // self._extras.size
                arena.use_huge_pages(base * scale, (base + new) * scale)
        count = int(self._directory[segment, kernels.COUNT])
        if self._scratch.room < count:
            self._scratch = _Scratch(int(count * _GROWTH) + 1)
        kernels.resize(
            *self._slots, self._directory, self._stride, segment, new, _limit(new), *self._scratch.arrays
        )
        self._levels[segment] = level
        if new < old:
            for arena in self._arenas:
                scale = arena.array.size // self._extras.size
                arena.release((base + new) * scale, (base + old) * scale)
            self._scratch = _Scratch(0)

    def _reserve(self, slots: int, least: int) -> None:
        """Take address space for ``slots``, or where it is limited for fewer, but not below ``least``."""
        while True:
            stride = slots // kernels.SEGMENTS // _REGION_GRAIN * _REGION_GRAIN + _REGION_GRAIN
            length = stride * kernels.SEGMENTS
            try:
                arenas = (Arena(2 * length, np.uint64), Arena(length, np.uint64), Arena(length, np.uint16))
                break
            except OSError as error:
                if slots // 2 < least:
                    raise MachineError(
                        f"cannot reserve {26 * length >> 20} MiB of address space for a table of roots "
                        f"({error}); raise the limit (ulimit -v) or lower max_pending"
                    ) from error
                slots //= 2
        self._arenas = arenas
        self._pairs, self._extras, self._stamps = self._slots = tuple(arena.array for arena in arenas)
        self._stride = stride

    def _move_to_larger_regions(self) -> None:
        old_slots, old_stride = self._slots, self._stride
        slots = 2 * old_stride * kernels.SEGMENTS
        self._reserve(slots, slots)
        for segment in range(kernels.SEGMENTS):
            used = int(self._directory[segment, kernels.CAPACITY])
            for scale, old, new in zip((2, 1, 1), old_slots, self._slots, strict=True):
                start = segment * self._stride * scale
                was = segment * old_stride * scale
                new[start : start + used * scale] = old[was : was + used * scale]


class _Scratch:
    """Room for the entries of one segment while it is resized."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.arrays = np.empty(2 * room, np.uint64), np.empty(room, np.uint64), np.empty(room, np.uint16)
        self.nbytes = sum(array.nbytes for array in self.arrays)


def _capacity(segment: int, level: int) -> int:
    """Slots of a segment at a level of growth; segments are out of phase, so they don't grow together."""
    return int(_SMALLEST_CAPACITY * math.pow(_GROWTH, level + segment / kernels.SEGMENTS))


def _limit(capacity: int) -> int:
    return int(capacity * _MAX_LOAD)


def _empty_lookup(length: int) -> Lookup:
    return Lookup(np.empty(length, np.bool_), np.empty(length, np.uint64), np.empty(length, np.uint64))


def _empty_entries(length: int) -> Entries:
    return Entries(*(np.empty(length, np.uint64) for _ in range(3)))
