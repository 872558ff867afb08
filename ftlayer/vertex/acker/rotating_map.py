"""The rotating hash map: 64-bit keys in buckets by their age, in one hash table that is resized segment by segment."""

from __future__ import annotations

import math
import mmap
import resource
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ftlayer.errors import ConfigError, MachineError
from ftlayer.vertex.acker import kernels

U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

NEVER = 0
"""The stamp of entries that no bucket's expiry takes."""

MAX_STAMP = 2**16 - 1

# While the table fits the CPU's inner caches, mispredicted branches are what a lookup costs: more room,
# fewer full lines, and few steps of growth. Ends at some 50,000 keys.
_SMALLEST_LINES = 8
_DOUBLINGS = 4
_MAX_LOAD_WHILE_SMALL = 0.4
# Up to 61 % of the places, 9 of 10 keys are in their home line. Steps of 15 % keep 52 to 61 % in use,
# 47 bytes a key on average, and cost seven moves (in memory order) for each entry of a growing table.
_MAX_LOAD = 0.61
_GROWTH = 1.15
# Wide enough for the chance by which segments of some 10,000 entries and more differ in their number.
_GROW_AHEAD_FROM = 0.98
# A segment shrinks when it could do with this share of its places, so that a steady swing never resizes it.
_SHRINK_BELOW = 0.4
# Lines reserved (as address space) at first; a table that outgrows them is moved as a whole.
RESERVED_LINES = 1 << 25
_LEAST_RESERVED_LINES = 1 << 18
# Where address space is limited, a table begins with this share of what is free: stores, threads and the compiler of
# kernels need room, too.
_SHARE = 64
# A region of a power of two would put the same line of all segments into the same sets of the caches.
_REGION_GRAIN = 64
_BYTES_PER_LINE = 64 + 32 + 8
_PAGE = mmap.PAGESIZE
# Linux: don't count untouched pages against the commit limit. Python names the constant from 3.13 on.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if hasattr(mmap, "MADV_DODUMP") else 0)


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
    """Return ``values`` as uint64[n]; `ConfigError` for another dtype, shape or length.

    An array that is read-only (Arrow's are), strided or unaligned is copied: to numba it is another type,
    and the kernels would be compiled once more, in the middle of a call.
    """
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
    return array if array.flags.carray else array.copy()


def no_zeros(keys: U64, what: str) -> U64:
    if np.count_nonzero(keys) != keys.size:
        position = int(np.flatnonzero(keys == 0)[0])
        raise ConfigError(f"{what}: item {position} is 0, and 0 is never an id")
    return keys


def as_stamp(bucket: int) -> np.uint16:
    """Return ``bucket`` as the table keeps it; `ConfigError` if it is out of range."""
    if not 0 <= bucket <= MAX_STAMP:
        raise ConfigError(f"bucket {bucket}: expected 0 (never expires) to {MAX_STAMP}")
    return np.uint16(bucket)


class Roots(NamedTuple):
    """Roots and the location each was registered with, uint64[n] both."""

    roots: U64
    locations: U64


class Located(NamedTuple):
    """For each root asked for: whether it was pending, bool[n], and its location, uint64[n] (0 if not)."""

    pending: Mask
    locations: U64


@dataclass(frozen=True)
class IdLists:
    """The ids behind folded values, for a tracker that keeps them: one list for each event.

    ``ids`` is uint64[m]; list ``i`` is ``ids[offsets[i]:offsets[i + 1]]``, with ``offsets`` int64[n + 1]
    (Arrow's layout of lists). ``owners``, if given, names for each id the operator that is to acknowledge
    it; an empty name says that this event acknowledges the id itself.
    """

    ids: U64
    offsets: npt.NDArray[np.int64]
    owners: Sequence[str] | None = None

    def __post_init__(self) -> None:
        as_u64(self.ids, "ids")
        offsets = self.offsets
        if (
            offsets.size == 0
            or offsets[0] != 0
            or offsets[-1] != self.ids.size
            or (np.diff(offsets) < 0).any()
        ):
            raise ConfigError(
                f"offsets: expected int64[n + 1] rising from 0 to {self.ids.size}, got {offsets}"
            )
        if self.owners is not None and len(self.owners) != self.ids.size:
            raise ConfigError(
                f"owners: expected {self.ids.size} names, one for each id, got {len(self.owners)}"
            )


def fold_ids(lists: IdLists) -> U64:
    """Return the XOR of each list, uint64[n] (0 for an empty one): what a tracker takes as values."""
    running = np.concatenate([np.zeros(1, np.uint64), np.bitwise_xor.accumulate(lists.ids)])
    folded: U64 = running[lists.offsets[1:]] ^ running[lists.offsets[:-1]]
    return folded


class Arena:
    """One anonymous mapping seen as a zeroed array of ``rows`` times ``width`` items of ``dtype``.

    Reserving is free; a page costs memory from its first write until `release`. Raises `OSError` where the
    address space (or its limit) is too small.
    """

    def __init__(self, rows: int, width: int, dtype: npt.DTypeLike) -> None:
        self.width = width
        self._row_bytes = np.dtype(dtype).itemsize * width
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._mapping = mmap.mmap(-1, rows * self._row_bytes, flags=flags)
        self.array: npt.NDArray[Any] = np.frombuffer(self._mapping, dtype=dtype, count=rows * width)

    def release(self, start: int, stop: int) -> None:
        """Give back the memory of the pages wholly within rows ``start`` to ``stop``, all zero by now."""
        advice = getattr(mmap, "MADV_DONTNEED", None)
        first = -(-start * self._row_bytes // _PAGE) * _PAGE
        last = stop * self._row_bytes // _PAGE * _PAGE
        if advice is not None and last > first:
            self._mapping.madvise(advice, first, last - first)


class RotatingHashMap:
    """uint64 key → (uint64 value, uint64 word, uint16 stamp), a batch of keys per call.

    An entry's stamp names the bucket it is in: the newest one when it is put, and again when it is stamped anew
    (`restamp`), which writes a number and moves nothing. When the oldest bucket's turn has come, its entries are
    taken out together (`stamped`, `remove`), and its number is free for the newest, as `BucketRotation` says.

    A call that adds n keys resizes the segments that it fills; segments grow at different moments, so a small batch
    pays for few of them. Keys are never 0. Not safe for concurrent calls: the kernels run without the GIL. Raises
    `MachineError` where the address space is limited to less than a small table takes.
    """

    def __init__(self) -> None:
        self._levels = [0] * kernels.SEGMENTS
        self._directory = np.zeros(3 * kernels.SEGMENTS, np.uint64)
        self._lines, self._limits, self._counts = self._directory.reshape(3, -1)
        self._peaks = np.zeros(kernels.SEGMENTS, np.uint64)
        self._ring = np.zeros(kernels.RING, np.uint64)
        self._scratch = _Scratch(0)
        self._next_to_shrink = 0
        self._reserve(RESERVED_LINES, _LEAST_RESERVED_LINES)
        for segment in range(kernels.SEGMENTS):
            self._lines[segment] = _lines_at(segment, 0)
            self._limits[segment] = _limit(_lines_at(segment, 0))

    def __len__(self) -> int:
        return int(self._counts.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all places, free ones too, and of the scratch space for resizing."""
        return int(self._lines.sum()) * _BYTES_PER_LINE + self._scratch.nbytes

    def insert(self, keys: U64, values: U64, words: U64, stamp: np.uint16) -> int:
        """Add the keys that are new; return how many were there already (and stay as they are)."""
        position, segment, refused = 0, 0, 0
        while segment >= 0:
            position, segment, already = kernels.insert(
                self._table, keys, values, words, stamp, np.uint64(position)
            )
            refused += already
            if segment >= 0:
                self._resize(segment, self._levels[segment] + 1)
        self._prepare_for_more()
        return refused

    def upsert(self, keys: U64, values: U64, stamp: np.uint16, *, fold: bool) -> None:
        """Add keys, or replace (``fold``: XOR into) the value of those that are there; stamp them all."""
        position, segment = 0, 0
        while segment >= 0:
            position, segment = kernels.upsert(self._table, keys, values, stamp, fold, np.uint64(position))
            if segment >= 0:
                self._resize(segment, self._levels[segment] + 1)
        self._prepare_for_more()

    def fold_and_take(
        self, keys: U64, values: U64, zeros: U64, words: U64, missing: npt.NDArray[np.int64]
    ) -> tuple[int, int]:
        taken, missed = kernels.fold_and_take(self._table, keys, values, zeros, words, missing)
        return int(taken), int(missed)

    def remove(self, keys: U64) -> Lookup:
        """Take keys out; a key twice in the batch is found once."""
        lookup = empty_lookup(keys.size)
        kernels.remove(self._table, keys, *lookup)
        return lookup

    def look_up(self, keys: U64) -> Lookup:
        lookup = empty_lookup(keys.size)
        kernels.look_up(self._table, keys, *lookup)
        return lookup

    def restamp(self, keys: U64, stamp: np.uint16) -> Mask:
        """Give the keys that are there another stamp; return which were."""
        found = np.empty(keys.size, np.bool_)
        kernels.restamp(self._table, keys, stamp, found)
        return found

    def stamped(self, stamp: np.uint16) -> Entries:
        """Return the entries with this stamp (not 0), in no particular order."""
        counts = kernels.count_stamped(self._table, stamp)
        entries = empty_entries(int(counts.sum()))
        kernels.collect_stamped(self._table, counts, stamp, *entries)
        return entries

    def entries(self) -> Entries:
        entries = empty_entries(len(self))
        kernels.collect_all(self._table, *entries)
        return entries

    def shrink_one(self) -> None:
        """Look at the next segment in turn, and give back places it has not needed since the last look."""
        segment = self._next_to_shrink
        self._next_to_shrink = (segment + 1) % kernels.SEGMENTS
        needed = max(int(self._peaks[segment]), int(self._counts[segment]))
        self._peaks[segment] = 0
        level = self._levels[segment]
        if level > 0 and needed < _SHRINK_BELOW * int(self._limits[segment]):
            while level > 0 and _limit(_lines_at(segment, level - 1)) > needed / _MAX_LOAD:
                level -= 1
            self._resize(segment, level)

    def _prepare_for_more(self) -> None:
        """Note the peaks; grow the one segment closest to its limit, so that several hardly have to in one batch."""
        np.maximum(self._peaks, self._counts, out=self._peaks)
        fullness = self._counts / self._limits
        fullest = int(fullness.argmax())
        if fullness[fullest] > _GROW_AHEAD_FROM:
            self._resize(fullest, self._levels[fullest] + 1)

    def _resize(self, segment: int, level: int) -> None:
        old, new = int(self._lines[segment]), _lines_at(segment, level)
        if new > self._stride:
            self._move_to_larger_regions()
        if self._scratch.lines < old:
            self._scratch = _Scratch(int(old * _GROWTH) + 1)
        number = np.uint64(segment)
        kernels.resize(self._table, number, np.uint64(new), *self._scratch.arrays)
        self._limits[segment] = _limit(new)
        self._levels[segment] = level
        if new < old:
            first = int(segment * self._stride)
            for arena in self._arenas:
                arena.release(first + new, first + old)
            if self._scratch.lines > 2 * int(self._lines.max()):
                self._scratch = _Scratch(0)

    def _reserve(self, lines: int, least: int) -> None:
        is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        while True:
            stride = (lines // kernels.SEGMENTS // _REGION_GRAIN + 1) * _REGION_GRAIN + 1
            total = stride * kernels.SEGMENTS
            try:
                if is_limited and lines > least:
                    Arena(_SHARE * total, _BYTES_PER_LINE, np.uint8)  # is there so much?
                self._arenas = (
                    Arena(total, 8, np.uint64),
                    Arena(total, kernels.PLACES, np.uint64),
                    Arena(total, kernels.PLACES, np.uint16),
                )
                break
            except OSError as error:
                if lines // 2 < least:
                    raise MachineError(
                        f"cannot reserve {total * _BYTES_PER_LINE >> 20} MiB of address space for a table of "
                        f"pending roots ({error}); raise its limit (ulimit -v) or lower max_pending"
                    ) from error
                lines //= 2
        self._stride = np.uint64(stride)
        pairs, extras, stamps = (arena.array for arena in self._arenas)
        self._table = (pairs, extras, stamps, self._directory, self._ring, self._stride)

    def _move_to_larger_regions(self) -> None:
        old_arenas, old_stride = self._arenas, int(self._stride)
        lines = 2 * old_stride * kernels.SEGMENTS
        self._reserve(lines, lines)
        for segment in range(kernels.SEGMENTS):
            used = int(self._lines[segment])
            source, target = segment * old_stride, segment * int(self._stride)
            for old, new in zip(old_arenas, self._arenas, strict=True):
                width = old.width
                new.array[target * width : (target + used) * width] = old.array[
                    source * width : (source + used) * width
                ]


class _Scratch:
    def __init__(self, lines: int) -> None:
        self.lines = lines
        self.arrays = (
            np.empty(8 * lines, np.uint64),
            np.empty(4 * lines, np.uint64),
            np.empty(4 * lines, np.uint16),
        )
        self.nbytes = sum(array.nbytes for array in self.arrays)


def _lines_at(segment: int, level: int) -> int:
    """Lines of a segment at a level of growth; segments are out of phase, so they don't grow together."""
    phase = segment / kernels.SEGMENTS
    if level < _DOUBLINGS:
        return int(_SMALLEST_LINES * 2 ** (level + phase))
    return int(_SMALLEST_LINES * 2**_DOUBLINGS * math.pow(_GROWTH, level - _DOUBLINGS + phase))


def _limit(lines: int) -> int:
    load = _MAX_LOAD_WHILE_SMALL if lines < _SMALLEST_LINES * 2**_DOUBLINGS else _MAX_LOAD
    return int(lines * kernels.PLACES * load)


def empty_lookup(length: int) -> Lookup:
    return Lookup(np.empty(length, np.bool_), np.empty(length, np.uint64), np.empty(length, np.uint64))


def empty_entries(length: int) -> Entries:
    return Entries(*(np.empty(length, np.uint64) for _ in range(3)))


@dataclass
class _OpenBucket:
    number: int
    interval: int


class BucketRotation:
    """The buckets of one timeout, by an explicit clock in milliseconds.

    It owns the bucket numbers ``first_bucket`` to ``first_bucket + buckets - 1`` of a table, which rotations of several
    timeouts may share. Time is cut into intervals of ``timeout / (buckets - 1)``, a bucket for each; one expires
    ``timeout`` after its interval's end.

    A clock that goes back is taken to stand still. Guaranteed: an entry stamped by ``bucket_at`` at time t is not
    expired by an ``advance`` before ``t + timeout``. If `advance` is called before `bucket_at` with the same time (as a
    rule), it is by the first one with ``now >= t + timeout x (1 + 1 / (buckets - 1))``.

    Raises `ConfigError` for fewer than two buckets, a timeout below ``buckets - 1`` ms, or numbers out of range.
    """

    def __init__(self, timeout_ms: int, buckets: int = 3, *, first_bucket: int = 1) -> None:
        if buckets < 2:
            raise ConfigError(f"buckets: expected at least 2, got {buckets}")
        if timeout_ms < buckets - 1:
            raise ConfigError(
                f"timeout_ms: expected at least {buckets - 1} with {buckets} buckets, got {timeout_ms}"
            )
        if first_bucket < 1 or first_bucket + buckets - 1 > MAX_STAMP:
            raise ConfigError(
                f"first_bucket: {first_bucket} with {buckets} buckets is not within 1 to {MAX_STAMP}"
            )
        self.timeout_ms = timeout_ms
        self.buckets = buckets
        self.first_bucket = first_bucket
        self._now = 0
        self._open: deque[_OpenBucket] = deque()
        self._free = deque(range(first_bucket, first_bucket + buckets))

    def bucket_at(self, now_ms: int) -> int:
        interval = self._interval(now_ms)
        if self._open and (self._open[-1].interval == interval or not self._free):
            # Without a free number (`advance` was not called for long) the newest bucket lives longer instead.
            self._open[-1].interval = interval
        else:
            self._open.append(_OpenBucket(self._free.popleft(), interval))
        return self._open[-1].number

    def advance(self, now_ms: int) -> list[int]:
        """Return the expired buckets, oldest first; take their entries out before the next `bucket_at` reuses them."""
        interval = self._interval(now_ms)
        expired = []
        while self._open and self._open[0].interval + self.buckets <= interval:
            expired.append(self._open.popleft().number)
        self._free.extend(expired)
        return expired

    def next_expiry_ms(self) -> int | None:
        """Return the first time at which `advance` has something to expire; None when nothing is stamped."""
        if not self._open:
            return None
        return -(-(self._open[0].interval + self.buckets) * self.timeout_ms // (self.buckets - 1))

    def _interval(self, now_ms: int) -> int:
        self._now = max(self._now, now_ms)
        return self._now * (self.buckets - 1) // self.timeout_ms


class BucketRotations:
    """One `BucketRotation` for each distinct timeout over one table, with bucket numbers of its own."""

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._rotations: dict[int, BucketRotation] = {}

    def __len__(self) -> int:
        return len(self._rotations)

    def bucket(self, timeout_ms: int, mono_ms: int) -> int:
        rotation = self._rotations.get(timeout_ms)
        if rotation is None:
            rotation = self._rotations[timeout_ms] = self._new(timeout_ms)
        return rotation.bucket_at(mono_ms)

    def expired(self, mono_ms: int) -> list[int]:
        """Return the buckets that have expired; take their entries out before the next `bucket`."""
        return [bucket for rotation in self._rotations.values() for bucket in rotation.advance(mono_ms)]

    def next_ms(self) -> int | None:
        """Return when `expired` has something to return; None when nothing is in any bucket."""
        times = (rotation.next_expiry_ms() for rotation in self._rotations.values())
        return min((time for time in times if time is not None), default=None)

    def _new(self, timeout_ms: int) -> BucketRotation:
        used = {rotation.first_bucket for rotation in self._rotations.values()}
        for first in range(1, MAX_STAMP - self._buckets + 2, self._buckets):
            if first not in used:
                return BucketRotation(timeout_ms, self._buckets, first_bucket=first)
        # Timeouts that streams had once stay empty: their numbers are free.
        for old, rotation in self._rotations.items():
            if rotation.next_expiry_ms() is None:
                del self._rotations[old]
                return BucketRotation(timeout_ms, self._buckets, first_bucket=rotation.first_bucket)
        raise ConfigError(
            f"{len(self._rotations)} different timeouts are in use at once; give streams the same ones"
        )
