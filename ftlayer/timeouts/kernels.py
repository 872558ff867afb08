"""The hash table's kernels: open addressing with linear probing, compiled by numba.

The table is split into `SEGMENTS` by the top bits of the hash. A segment is a run of ``capacity`` slots
inside a region of ``stride`` slots, and is resized by itself. Three parallel arrays hold the slots:

- ``pairs``     uint64[2 x slots], key and value side by side: all that a lookup touches. Key 0 is a free slot.
- ``extras``    uint64[slots], a word of the caller's, read when an entry leaves.
- ``stamps``    uint16[slots], the expiry bucket; 0 in a free slot, and in an entry that never expires.

Within a segment the home slot grows with the hash (``hash x capacity / 2^32``), so any capacity will do,
and resizing reads and writes memory in order. Deletion shifts the rest of the run back (Knuth, TAOCP
vol. 3, 6.4, algorithm R), so there are no tombstones.

``directory`` is int64[SEGMENTS, 4]: capacity, most entries allowed, entries, and most entries seen.

All kernels live in this one file because numba's disk cache notices a changed source file, but not a
changed file that the source calls.
"""

from __future__ import annotations

import numpy as np

from .compiler import helper, kernel
from .prefetch import prefetch

SEGMENT_BITS = 6
SEGMENTS = 1 << SEGMENT_BITS
CAPACITY, LIMIT, COUNT, PEAK = range(4)

# Entries ahead of the current one whose cache lines are asked for; found by trial (16 to 32 are alike).
_AHEAD = 24
_SEGMENT_SHIFT = np.uint64(64 - SEGMENT_BITS)
_LOCAL_SHIFT = np.uint64(32 - SEGMENT_BITS)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
# Odd multipliers of the two rounds: 2^64 / golden ratio, and one from Steele and Vigna's list (2021).
_MULTIPLIER_1 = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_2 = np.uint64(0xD1342543DE82EF95)
_FREE = np.uint64(0)
_NO_STAMP = np.uint16(0)


@helper
def _hash(key):  # type: ignore[no-untyped-def]
    """Mix so that keys equal in their high or in their low bits spread over all segments and slots."""
    mixed = key * _MULTIPLIER_1
    mixed ^= mixed >> _HALF
    return mixed * _MULTIPLIER_2


@helper
def _segment(mixed):  # type: ignore[no-untyped-def]
    return np.int64(mixed >> _SEGMENT_SHIFT)


@helper
def _home(mixed, capacity):  # type: ignore[no-untyped-def]
    """Slot inside the segment where the probing for this hash begins."""
    return np.int64((((mixed >> _LOCAL_SHIFT) & _LOW_WORD) * np.uint64(capacity)) >> _HALF)


@helper
def _find(pairs, base, capacity, home, key):  # type: ignore[no-untyped-def]
    """Slot inside the segment that holds ``key``, or the free one where it would go."""
    slot = home
    while True:
        seen = pairs[2 * (base + slot)]
        if seen == key or seen == _FREE:
            return slot
        slot += 1
        if slot == capacity:
            slot = 0


@helper
def _prefetch_pair(pairs, directory, stride, key):  # type: ignore[no-untyped-def]
    mixed = _hash(key)
    segment = _segment(mixed)
    prefetch(pairs, 2 * (segment * stride + _home(mixed, directory[segment, CAPACITY])))


@helper
def _prefetch_slot(pairs, extras, stamps, directory, stride, key):  # type: ignore[no-untyped-def]
    mixed = _hash(key)
    segment = _segment(mixed)
    slot = segment * stride + _home(mixed, directory[segment, CAPACITY])
    prefetch(pairs, 2 * slot)
    prefetch(extras, slot)
    prefetch(stamps, slot)


@helper
def _vacate(pairs, extras, stamps, base, capacity, slot):  # type: ignore[no-untyped-def]
    """Empty ``slot`` and move back whatever had been pushed past it."""
    hole = slot
    probe = slot
    while True:
        probe += 1
        if probe == capacity:
            probe = 0
        key = pairs[2 * (base + probe)]
        if key == _FREE:
            break
        home = _home(_hash(key), capacity)
        # An entry stays if its home lies cyclically in (hole, probe].
        stays = hole < home <= probe if hole <= probe else (hole < home or home <= probe)
        if stays:
            continue
        pairs[2 * (base + hole)] = key
        pairs[2 * (base + hole) + 1] = pairs[2 * (base + probe) + 1]
        extras[base + hole] = extras[base + probe]
        stamps[base + hole] = stamps[base + probe]
        hole = probe
    pairs[2 * (base + hole)] = _FREE
    stamps[base + hole] = _NO_STAMP


@kernel
def insert(pairs, extras, stamps, directory, stride, keys, values, words, stamp, start):  # type: ignore[no-untyped-def]
    """Add the keys that are new, from position ``start`` on; a key that is there stays as it is.

    Returns (position, segment, keys refused because they were there). The position is short of the end
    when ``segment`` has no room for the key there: resize it and call again from that position.
    """
    refused = 0
    total = keys.size
    for i in range(start, total):
        if i + _AHEAD < total:
            _prefetch_slot(pairs, extras, stamps, directory, stride, keys[i + _AHEAD])
        key = keys[i]
        mixed = _hash(key)
        segment = _segment(mixed)
        capacity = directory[segment, CAPACITY]
        base = segment * stride
        slot = base + _find(pairs, base, capacity, _home(mixed, capacity), key)
        if pairs[2 * slot] == key:
            refused += 1
            continue
        if directory[segment, COUNT] >= directory[segment, LIMIT]:
            return i, segment, refused
        pairs[2 * slot] = key
        pairs[2 * slot + 1] = values[i]
        extras[slot] = words[i]
        stamps[slot] = stamp
        directory[segment, COUNT] += 1
    return total, -1, refused


@kernel
def upsert(pairs, extras, stamps, directory, stride, keys, values, stamp, fold, start):  # type: ignore[no-untyped-def]
    """Add or change keys, from position ``start`` on, and stamp them. Returns (position, segment) as `insert`.

    A key that is there gets its value replaced, or XORed if ``fold``; a new one gets the value.
    """
    total = keys.size
    for i in range(start, total):
        if i + _AHEAD < total:
            _prefetch_slot(pairs, extras, stamps, directory, stride, keys[i + _AHEAD])
        key = keys[i]
        mixed = _hash(key)
        segment = _segment(mixed)
        capacity = directory[segment, CAPACITY]
        base = segment * stride
        slot = base + _find(pairs, base, capacity, _home(mixed, capacity), key)
        if pairs[2 * slot] == key:
            pairs[2 * slot + 1] = pairs[2 * slot + 1] ^ values[i] if fold else values[i]
        else:
            if directory[segment, COUNT] >= directory[segment, LIMIT]:
                return i, segment
            pairs[2 * slot] = key
            pairs[2 * slot + 1] = values[i]
            extras[slot] = _FREE
            directory[segment, COUNT] += 1
        stamps[slot] = stamp
    return total, -1


@kernel
def fold_until_zero(pairs, directory, stride, keys, values, zeros, missing):  # type: ignore[no-untyped-def]
    """XOR values into entries. Returns (keys that reached 0, events without an entry).

    ``zeros`` receives the former in the order in which they got there, ``missing`` the positions of the
    latter. Entries at 0 stay for the caller to remove, and count as gone for the rest of the batch: no
    entry may be at 0 when this is called.
    """
    total = keys.size
    reached = 0
    missed = 0
    for i in range(total):
        if i + _AHEAD < total:
            _prefetch_pair(pairs, directory, stride, keys[i + _AHEAD])
        key = keys[i]
        mixed = _hash(key)
        segment = _segment(mixed)
        capacity = directory[segment, CAPACITY]
        base = segment * stride
        slot = base + _find(pairs, base, capacity, _home(mixed, capacity), key)
        before = pairs[2 * slot + 1]
        if pairs[2 * slot] == _FREE or before == 0:
            missing[missed] = i
            missed += 1
            continue
        after = before ^ values[i]
        pairs[2 * slot + 1] = after
        zeros[reached] = key
        reached += after == 0
    return reached, missed


@kernel
def remove(pairs, extras, stamps, directory, stride, keys, found, values, words):  # type: ignore[no-untyped-def]
    """Take keys out. Position by position: whether it was there, its value and its word (else 0)."""
    total = keys.size
    removed = 0
    for i in range(total):
        if i + _AHEAD < total:
            _prefetch_slot(pairs, extras, stamps, directory, stride, keys[i + _AHEAD])
        key = keys[i]
        mixed = _hash(key)
        segment = _segment(mixed)
        capacity = directory[segment, CAPACITY]
        base = segment * stride
        slot = _find(pairs, base, capacity, _home(mixed, capacity), key)
        if key == _FREE or pairs[2 * (base + slot)] == _FREE:
            found[i] = False
            values[i] = 0
            words[i] = 0
            continue
        found[i] = True
        values[i] = pairs[2 * (base + slot) + 1]
        words[i] = extras[base + slot]
        _vacate(pairs, extras, stamps, base, capacity, slot)
        directory[segment, COUNT] -= 1
        removed += 1
    return removed


@kernel
def look_up(pairs, extras, directory, stride, keys, found, values, words):  # type: ignore[no-untyped-def]
    """Read keys. Position by position: whether it is there, its value and its word (else 0)."""
    for i in range(keys.size):
        key = keys[i]
        mixed = _hash(key)
        segment = _segment(mixed)
        capacity = directory[segment, CAPACITY]
        base = segment * stride
        slot = base + _find(pairs, base, capacity, _home(mixed, capacity), key)
        here = key != _FREE and pairs[2 * slot] == key
        found[i] = here
        values[i] = pairs[2 * slot + 1] if here else _FREE
        words[i] = extras[slot] if here else _FREE


@kernel
def restamp(pairs, stamps, directory, stride, keys, stamp, found):  # type: ignore[no-untyped-def]
    """Give the keys that are there another stamp; ``found`` says which were."""
    for i in range(keys.size):
        key = keys[i]
        mixed = _hash(key)
        segment = _segment(mixed)
        capacity = directory[segment, CAPACITY]
        base = segment * stride
        slot = base + _find(pairs, base, capacity, _home(mixed, capacity), key)
        found[i] = key != _FREE and pairs[2 * slot] == key
        if found[i]:
            stamps[slot] = stamp


@kernel
def count_stamped(stamps, directory, stride, stamp):  # type: ignore[no-untyped-def]
    """Count the entries of each segment that carry ``stamp`` (not 0)."""
    counts = np.zeros(directory.shape[0], np.int64)
    for segment in range(directory.shape[0]):
        base = segment * stride
        total = 0
        for seen in stamps[base : base + directory[segment, CAPACITY]]:
            total += seen == stamp
        counts[segment] = total
    return counts


@kernel
def collect_stamped(pairs, extras, stamps, directory, stride, counts, stamp, keys, values, words):  # type: ignore[no-untyped-def]
    """Copy out the entries that carry ``stamp``; ``counts`` says how many there are in each segment."""
    filled = 0
    for segment in range(directory.shape[0]):
        if counts[segment] == 0:
            continue
        base = segment * stride
        for slot in range(base, base + directory[segment, CAPACITY]):
            if stamps[slot] == stamp:
                keys[filled] = pairs[2 * slot]
                values[filled] = pairs[2 * slot + 1]
                words[filled] = extras[slot]
                filled += 1


@kernel
def collect_all(pairs, extras, directory, stride, keys, values, words):  # type: ignore[no-untyped-def]
    """Copy out every entry."""
    filled = 0
    for segment in range(directory.shape[0]):
        base = segment * stride
        for slot in range(base, base + directory[segment, CAPACITY]):
            if pairs[2 * slot] != _FREE:
                keys[filled] = pairs[2 * slot]
                values[filled] = pairs[2 * slot + 1]
                words[filled] = extras[slot]
                filled += 1


@kernel
def resize(
    pairs, extras, stamps, directory, stride, segment, capacity, limit, pairs_copy, extras_copy, stamps_copy
):  # type: ignore[no-untyped-def]
    """Give a segment another capacity. The copies are scratch for as many entries as it has.

    The slots between an old and a larger new capacity must be free; those that a smaller one leaves are.
    """
    base = segment * stride
    filled = 0
    for slot in range(base, base + directory[segment, CAPACITY]):
        if pairs[2 * slot] != _FREE:
            pairs_copy[2 * filled] = pairs[2 * slot]
            pairs_copy[2 * filled + 1] = pairs[2 * slot + 1]
            extras_copy[filled] = extras[slot]
            stamps_copy[filled] = stamps[slot]
            filled += 1
            pairs[2 * slot] = _FREE
            stamps[slot] = _NO_STAMP
    directory[segment, CAPACITY] = capacity
    directory[segment, LIMIT] = limit
    for i in range(filled):
        key = pairs_copy[2 * i]
        slot = base + _find(pairs, base, capacity, _home(_hash(key), capacity), key)
        pairs[2 * slot] = key
        pairs[2 * slot + 1] = pairs_copy[2 * i + 1]
        extras[slot] = extras_copy[i]
        stamps[slot] = stamps_copy[i]
