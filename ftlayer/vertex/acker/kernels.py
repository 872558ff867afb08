"""The hash table's kernels: open addressing over cache lines, compiled by numba.

A **line** is 64 bytes, four keys and then their four values, so that a lookup compares four keys without
a branch and mostly reads a single cache line. Key 0 is a free place, and the used places of a line are its
first ones. A key lives in its home line or, where that is full, in the next one with room.

The table is split into `SEGMENTS` by the top bits of the hash. A segment is a run of ``lines`` inside a
region of ``stride`` lines, and is resized by itself. Three parallel arrays hold the entries:

- ``pairs``   uint64[8 x lines]: all that a lookup touches.
- ``extras``  uint64[4 x lines], a word of the caller's for each place, read when the entry leaves.
- ``stamps``  uint16[4 x lines], the expiry bucket; 0 in a free place, and in an entry that never expires.

Within a segment the home line rises with the hash (``hash x lines / 2^32``), so any number of lines will
do, and resizing reads and writes memory in order. A deletion pulls back an entry that had been pushed past
the line (Knuth, TAOCP vol. 3, 6.4, algorithm R, with lines for slots), so there are no tombstones.

``directory`` is uint64[3 x SEGMENTS]: of each segment the lines, the most entries allowed, the entries.
``ring`` is scratch of `RING` items: the lines of the keys to come, whose memory has been asked for.

Indices are unsigned, which spares numba's test for negative ones; an unsigned and a plain number make a
float, hence the constants. All kernels live in this one file because numba's disk cache notices a changed
source file, but not a changed file that it calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ftlayer.vertex.acker.compiler import helper, kernel, pointer_to, prefetch

SEGMENT_BITS = 8
SEGMENTS = 1 << SEGMENT_BITS
PLACES = 4
RING = 32

_0, _1, _2, _3, _4, _5, _6, _7, _8 = (np.uint64(number) for number in range(9))
# Keys ahead of the current one whose lines are asked for, in ``pairs`` alone and in all three arrays (more
# requests at a time than the CPU can keep open are lost). Found by trial, and flat around these.
_AHEAD = np.uint64(24)
_AHEAD_IN_ALL = np.uint64(12)
# Keys ahead whose home line has arrived by now, so that it can be looked at.
_NEAR = np.uint64(5)
# Entries at 0 that wait until the rest of them has arrived.
_LEAVING = np.uint64(16)
_LIMIT, _COUNT = (np.uint64(row * SEGMENTS) for row in (1, 2))
_RING_MASK = np.uint64(RING - 1)
_SEGMENT_SHIFT = np.uint64(64 - SEGMENT_BITS)
_LOCAL_SHIFT = np.uint64(32 - SEGMENT_BITS)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
# Odd multipliers of the two rounds: 2^64 / golden ratio, and one from Steele and Vigna's list (2021).
_MULTIPLIER_1 = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_2 = np.uint64(0xD1342543DE82EF95)
_NO_STAMP = np.uint16(0)


@helper
def _hash(key: Any) -> Any:
    """Mix so that keys equal in their high or in their low bits spread over all segments and lines."""
    mixed = key * _MULTIPLIER_1
    mixed ^= mixed >> _HALF
    return mixed * _MULTIPLIER_2


@helper
def _segment(mixed: Any) -> Any:
    return mixed >> _SEGMENT_SHIFT


@helper
def _local(mixed: Any, lines: Any) -> Any:
    """Home line, counted from the segment's first one."""
    return (((mixed >> _LOCAL_SHIFT) & _LOW_WORD) * lines) >> _HALF


@helper
def _home(directory: Any, stride: Any, key: Any) -> Any:
    mixed = _hash(key)
    segment = _segment(mixed)
    return segment * stride + _local(mixed, directory[segment])


@helper
def _match(pairs: Any, line: Any, key: Any) -> Any:
    """Place of ``key`` in the line, or 4; a chain of selects, as a branch would be mispredicted."""
    at = line * _8
    place = _4
    place = _0 if pairs[at] == key else place
    place = _1 if pairs[at + _1] == key else place
    place = _2 if pairs[at + _2] == key else place
    return _3 if pairs[at + _3] == key else place


@helper
def _used(pairs: Any, line: Any) -> Any:
    at = line * _8
    used = _0
    for place in range(PLACES):
        used += np.uint64(pairs[at + np.uint64(place)] != _0)
    return used


@helper
def _next(directory: Any, stride: Any, segment: Any, line: Any) -> Any:
    """The line after this one in its segment, the first after the last."""
    first = segment * stride
    following = line + _1
    return first if following == first + directory[segment] else following


@helper
def _seek(pairs: Any, directory: Any, stride: Any, line: Any, key: Any) -> Any:
    """Look for ``key`` from its home line on: (line, place, found), or the free place where it belongs."""
    while True:
        place = _match(pairs, line, key)
        if place != _4:
            return line, place, True
        if pairs[line * _8 + _3] == _0:
            return line, _used(pairs, line), False
        line = _next(directory, stride, _segment(_hash(key)), line)


@helper
def _move(pairs: Any, extras: Any, stamps: Any, line: Any, place: Any, to_line: Any, to_place: Any) -> None:
    source, target = line * _8 + place, to_line * _8 + to_place
    pairs[target] = pairs[source]
    pairs[target + _4] = pairs[source + _4]
    extras[to_line * _4 + to_place] = extras[line * _4 + place]
    stamps[to_line * _4 + to_place] = stamps[line * _4 + place]


@helper
def _pushed_past(pairs: Any, directory: Any, stride: Any, segment: Any, hole: Any) -> Any:
    """Find an entry behind the line ``hole`` whose home is not behind it: (line, place, found)."""
    line = hole
    while True:
        line = _next(directory, stride, segment, line)
        for number in range(PLACES):
            place = np.uint64(number)
            key = pairs[line * _8 + place]
            if key == _0:
                return line, place, False
            home = _home(directory, stride, key)
            # It stays if its home lies cyclically in (hole, line].
            stays = hole < home <= line if hole <= line else (hole < home or home <= line)
            if not stays:
                return line, place, True


@helper
def _vacate(
    pairs: Any, extras: Any, stamps: Any, directory: Any, stride: Any, segment: Any, line: Any, place: Any
) -> None:
    """Empty a place: its line's last entry goes there, and one pushed past a full line comes back."""
    while True:
        last = _used(pairs, line) - _1
        _move(pairs, extras, stamps, line, last, line, place)  # maybe onto itself: cheaper than a branch
        pairs[line * _8 + last] = _0
        pairs[line * _8 + last + _4] = _0
        stamps[line * _4 + last] = _NO_STAMP
        if last != _3:
            return
        from_line, from_place, found = _pushed_past(pairs, directory, stride, segment, line)
        if not found:
            return
        _move(pairs, extras, stamps, from_line, from_place, line, _3)
        line, place = from_line, from_place


@helper
def _ask_for(pairs: Any, extras: Any, stamps: Any, line: Any, whole: Any) -> None:
    prefetch(pairs, line * _8)
    if whole:
        prefetch(extras, line * _4)
        prefetch(stamps, line * _4)


@helper
def _ask_ahead(
    pairs: Any, extras: Any, stamps: Any, directory: Any, stride: Any, ring: Any, i: Any, key: Any, whole: Any
) -> None:
    """Note the home line of ``key``, item ``i`` of the batch, and ask for its memory."""
    line = _home(directory, stride, key)
    _ask_for(pairs, extras, stamps, line, whole)
    ring[i & _RING_MASK] = line


@helper
def _ask_for_next(pairs: Any, ring: Any, i: Any) -> None:
    """Ask for the line after item ``i``'s home if that is full: one key in ten is there.

    (Of no use to `fold_and_take`, which touches little else meanwhile: the CPU fetches neighbours by itself.)
    """
    line = ring[i & _RING_MASK]
    prefetch(pairs, (line + np.uint64(pairs[line * _8 + _3] != _0)) * _8)


@helper
def _open(table: Any) -> Any:
    """The table's arrays as pointers, and the stride."""
    pairs, extras, stamps, directory, ring, stride = table
    return (
        pointer_to(pairs),
        pointer_to(extras),
        pointer_to(stamps),
        pointer_to(directory),
        pointer_to(ring),
        stride,
    )


@kernel
def insert(table: Any, keys: Any, values: Any, words: Any, stamp: Any, start: Any) -> Any:
    """Add the keys that are new, from position ``start`` on; a key that is there stays as it is.

    Returns (position, segment, keys refused because they were there). The position is short of the end
    when ``segment`` has no room for the key there: resize it and call again from that position.
    """
    refused = 0
    pairs, extras, stamps, directory, ring, stride = _open(table)
    total = np.uint64(keys.size)
    for i in range(start, min(start + _AHEAD_IN_ALL, total)):
        _ask_ahead(pairs, extras, stamps, directory, stride, ring, i, keys[i], True)
    for i in range(start, total):
        key = keys[i]
        home = ring[i & _RING_MASK]
        _ask_for_next(pairs, ring, i + _NEAR)
        ahead = i + _AHEAD_IN_ALL
        if ahead < total:
            _ask_ahead(pairs, extras, stamps, directory, stride, ring, ahead, keys[ahead], True)
        line, place, found = _seek(pairs, directory, stride, home, key)
        if found:
            refused += 1
            continue
        segment = _segment(_hash(key))
        if directory[_COUNT + segment] >= directory[_LIMIT + segment]:
            return i, np.int64(segment), refused
        pairs[line * _8 + place] = key
        pairs[line * _8 + place + _4] = values[i]
        extras[line * _4 + place] = words[i]
        stamps[line * _4 + place] = stamp
        directory[_COUNT + segment] += _1
    return total, -1, refused


@kernel
def upsert(table: Any, keys: Any, values: Any, stamp: Any, fold: Any, start: Any) -> Any:
    """Add or change keys, from position ``start`` on, and stamp them. Returns as `insert`: position, segment.

    A key that is there gets its value replaced, or XORed if ``fold``; a new one gets the value.
    """
    pairs, extras, stamps, directory, ring, stride = _open(table)
    total = np.uint64(keys.size)
    for i in range(start, min(start + _AHEAD_IN_ALL, total)):
        _ask_ahead(pairs, extras, stamps, directory, stride, ring, i, keys[i], True)
    for i in range(start, total):
        key = keys[i]
        home = ring[i & _RING_MASK]
        _ask_for_next(pairs, ring, i + _NEAR)
        ahead = i + _AHEAD_IN_ALL
        if ahead < total:
            _ask_ahead(pairs, extras, stamps, directory, stride, ring, ahead, keys[ahead], True)
        line, place, found = _seek(pairs, directory, stride, home, key)
        at = line * _8 + place
        if found:
            pairs[at + _4] = pairs[at + _4] ^ values[i] if fold else values[i]
        else:
            segment = _segment(_hash(key))
            if directory[_COUNT + segment] >= directory[_LIMIT + segment]:
                return i, np.int64(segment)
            pairs[at] = key
            pairs[at + _4] = values[i]
            extras[line * _4 + place] = _0
            directory[_COUNT + segment] += _1
        stamps[line * _4 + place] = stamp
    return total, -1


@helper
def _take(pairs: Any, extras: Any, stamps: Any, directory: Any, stride: Any, key: Any) -> Any:
    """Take out a key that is there; return its word."""
    mixed = _hash(key)
    segment = _segment(mixed)
    home = segment * stride + _local(mixed, directory[segment])
    line, place, _ = _seek(pairs, directory, stride, home, key)
    word = extras[line * _4 + place]
    _vacate(pairs, extras, stamps, directory, stride, segment, line, place)
    directory[_COUNT + segment] -= _1
    return word


@kernel
def fold_and_take(table: Any, keys: Any, values: Any, zeros: Any, words: Any, missing: Any) -> Any:
    """XOR values into entries, and take out those that come to 0. Returns (taken, events without an entry).

    ``zeros`` and ``words`` receive the former's keys and words in the order in which they got to 0,
    ``missing`` the positions of the latter. No entry may be at 0 when this is called.

    An entry leaves some entries after it came to 0, when the rest of it has arrived from memory.
    """
    pairs, extras, stamps, directory, ring, stride = _open(table)
    reached = _0
    taken = _0
    missed = _0
    total = np.uint64(keys.size)
    for i in range(min(_AHEAD, total)):
        _ask_ahead(pairs, extras, stamps, directory, stride, ring, i, keys[i], False)
    for i in range(total):
        key = keys[i]
        line = ring[i & _RING_MASK]
        ahead = i + _AHEAD
        if ahead < total:
            _ask_ahead(pairs, extras, stamps, directory, stride, ring, ahead, keys[ahead], False)
        place = _match(pairs, line, key)
        if place == _4:
            line, place, _ = _seek(pairs, directory, stride, line, key)
        at = line * _8 + place + _4
        before = pairs[at]
        if before == _0:  # a free place, or at 0 since an earlier event
            missing[missed] = i
            missed += _1
            continue
        after = before ^ values[i]
        pairs[at] = after
        if after == _0:
            prefetch(extras, line * _4)
            prefetch(stamps, line * _4)
            # Where what was pushed past a full line is looked for, to come back.
            prefetch(pairs, (line + np.uint64(pairs[line * _8 + _3] != _0)) * _8)
            zeros[reached] = key
            reached += _1
            if reached == taken + _LEAVING:
                for turn in range(taken, reached):
                    words[turn] = _take(pairs, extras, stamps, directory, stride, zeros[turn])
                taken = reached
    for turn in range(taken, reached):
        words[turn] = _take(pairs, extras, stamps, directory, stride, zeros[turn])
    return reached, missed


@kernel
def remove(table: Any, keys: Any, found: Any, values: Any, words: Any) -> None:
    """Take keys out. Position by position: whether it was there, its value and its word (else 0)."""
    pairs, extras, stamps, directory, ring, stride = _open(table)
    total = np.uint64(keys.size)
    for i in range(min(_AHEAD_IN_ALL, total)):
        _ask_ahead(pairs, extras, stamps, directory, stride, ring, i, keys[i], True)
    for i in range(total):
        key = keys[i]
        home = ring[i & _RING_MASK]
        _ask_for_next(pairs, ring, i + _NEAR)
        ahead = i + _AHEAD_IN_ALL
        if ahead < total:
            _ask_ahead(pairs, extras, stamps, directory, stride, ring, ahead, keys[ahead], True)
        line, place, here = _seek(pairs, directory, stride, home, key)
        if key == _0 or not here:
            found[i] = False
            values[i] = _0
            words[i] = _0
            continue
        found[i] = True
        values[i] = pairs[line * _8 + place + _4]
        words[i] = _take(pairs, extras, stamps, directory, stride, key)


@kernel
def look_up(table: Any, keys: Any, found: Any, values: Any, words: Any) -> None:
    """Read keys. Position by position: whether it is there, its value and its word (else 0)."""
    pairs, extras, _, directory, _, stride = _open(table)
    for i in range(keys.size):
        key = keys[i]
        line, place, here = _seek(pairs, directory, stride, _home(directory, stride, key), key)
        here = here and key != _0
        found[i] = here
        values[i] = pairs[line * _8 + place + _4] if here else _0
        words[i] = extras[line * _4 + place] if here else _0


@kernel
def restamp(table: Any, keys: Any, stamp: Any, found: Any) -> None:
    """Give the keys that are there another stamp; ``found`` says which were."""
    pairs, _, stamps, directory, _, stride = _open(table)
    for i in range(keys.size):
        key = keys[i]
        line, place, here = _seek(pairs, directory, stride, _home(directory, stride, key), key)
        found[i] = here and key != _0
        if found[i]:
            stamps[line * _4 + place] = stamp


@kernel
def count_stamped(table: Any, stamp: Any) -> Any:
    """Count the entries of each segment that carry ``stamp`` (not 0)."""
    _, _, stamps, directory, _, stride = table  # arrays: the loop over a slice is vectorized
    counts = np.zeros(SEGMENTS, np.int64)
    for segment in range(SEGMENTS):
        first = np.int64(segment) * np.int64(stride) * PLACES
        total = 0
        for seen in stamps[first : first + np.int64(directory[segment]) * PLACES]:
            total += seen == stamp
        counts[segment] = total
    return counts


@kernel
def collect_stamped(table: Any, counts: Any, stamp: Any, keys: Any, values: Any, words: Any) -> None:
    """Copy out the entries that carry ``stamp``; ``counts`` says how many there are in each segment."""
    pairs, extras, stamps, directory, _, stride = _open(table)
    filled = 0
    for segment in range(SEGMENTS):
        if counts[segment] == 0:
            continue
        first = np.uint64(segment) * stride * _4
        for slot in range(first, first + directory[segment] * _4):
            if stamps[slot] == stamp:
                at = (slot // _4) * _8 + slot % _4
                keys[filled] = pairs[at]
                values[filled] = pairs[at + _4]
                words[filled] = extras[slot]
                filled += 1


@kernel
def collect_all(table: Any, keys: Any, values: Any, words: Any) -> None:
    pairs, extras, _, directory, _, stride = _open(table)
    filled = 0
    for segment in range(SEGMENTS):
        first = np.uint64(segment) * stride * _4
        for slot in range(first, first + directory[segment] * _4):
            at = (slot // _4) * _8 + slot % _4
            if pairs[at] != _0:
                keys[filled] = pairs[at]
                values[filled] = pairs[at + _4]
                words[filled] = extras[slot]
                filled += 1


@kernel
def resize(table: Any, segment: Any, lines: Any, pairs_copy: Any, extras_copy: Any, stamps_copy: Any) -> None:
    """Give a segment another number of lines. The copies are scratch for the lines that it has.

    The lines between an old and a larger new number must be free; those that a smaller one leaves are.
    """
    old = np.int64(table[3][segment])
    first = np.int64(segment * table[5])
    pairs_copy[: 8 * old] = table[0][8 * first : 8 * (first + old)]
    extras_copy[: 4 * old] = table[1][4 * first : 4 * (first + old)]
    stamps_copy[: 4 * old] = table[2][4 * first : 4 * (first + old)]
    table[0][8 * first : 8 * (first + old)] = _0
    table[2][4 * first : 4 * (first + old)] = _NO_STAMP
    pairs, extras, stamps, directory, _, stride = _open(table)
    directory[segment] = lines
    for old_line in range(np.uint64(old)):
        for turn in range(PLACES):
            old_place = np.uint64(turn)
            key = pairs_copy[old_line * _8 + old_place]
            if key == _0:
                break
            line = _home(directory, stride, key)
            while pairs[line * _8 + _3] != _0:
                line = _next(directory, stride, segment, line)
            place = _used(pairs, line)
            pairs[line * _8 + place] = key
            pairs[line * _8 + place + _4] = pairs_copy[old_line * _8 + old_place + _4]
            extras[line * _4 + place] = extras_copy[old_line * _4 + old_place]
            stamps[line * _4 + place] = stamps_copy[old_line * _4 + old_place]
