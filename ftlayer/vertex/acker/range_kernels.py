"""The kernels of ranges of roots: arrays side by side, found by the range a root lies in; compiled by numba.

``directory`` is uint64[`FIELDS` x room], of which the first ``used`` columns count, sorted by `FIRST`: a range's first
root, how many roots it has, the addresses of its words (uint64[count], the XOR of each root, 0 once it has left) and of
its stamps (uint16[count], the bucket of each), the location of its first root, and how many roots are left.

Events of a batch come range by range, mostly, so the range of the event before is looked at first, and the others are
searched for only where a root does not lie in it. All kernels are in this one file, as numba's disk cache asks for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ftlayer.vertex.acker.compiler import helper, kernel, u16_at, u64_at

FIRST, COUNT, WORDS, STAMPS, LOCATION, LEFT = range(6)
FIELDS = 6

_0, _1 = np.uint64(0), np.uint64(1)


@helper
def _range_of(directory: Any, used: Any, root: Any) -> Any:
    """Return the last range that does not begin behind ``root``, 0 if all do."""
    low, high = 0, used
    while high - low > 1:
        middle = (low + high) >> 1
        if directory[FIRST, middle] <= root:
            low = middle
        else:
            high = middle
    return low


@kernel
def fold_and_take(
    directory: Any, used: Any, keys: Any, values: Any, zeros: Any, words: Any, missing: Any
) -> Any:
    """XOR values into roots, and take out those that come to 0. Returns (taken, events without a root).

    ``zeros`` and ``words`` receive the former's ids and locations in the order in which they got to 0, ``missing`` the
    positions of the latter.
    """
    at = 0
    first, count, location = directory[FIRST, 0], directory[COUNT, 0], directory[LOCATION, 0]
    xors = u64_at(directory[WORDS, 0])
    taken = 0
    missed = 0
    for i in range(keys.size):
        offset = keys[i] - first  # far above every count where the root is before the range
        if offset >= count:
            at = _range_of(directory, used, keys[i])
            first, count, location = directory[FIRST, at], directory[COUNT, at], directory[LOCATION, at]
            xors = u64_at(directory[WORDS, at])
            offset = keys[i] - first
            if offset >= count:
                missing[missed] = i
                missed += 1
                continue
        before = xors[offset]
        if before == _0:
            missing[missed] = i
            missed += 1
            continue
        after = before ^ values[i]
        xors[offset] = after
        if after == _0:
            directory[LEFT, at] -= _1
            zeros[taken] = keys[i]
            words[taken] = location + offset
            taken += 1
    return taken, missed


@kernel
def look_up(directory: Any, used: Any, keys: Any, take: Any, found: Any, values: Any, words: Any) -> Any:
    """Read roots, and take them out if ``take``. Position by position: whether it is there, its XOR, its location.

    The latter are 0 for one that is not there. Returns how many were.
    """
    here = 0
    for i in range(keys.size):
        at = _range_of(directory, used, keys[i])
        offset = keys[i] - directory[FIRST, at]
        found[i] = False
        values[i] = _0
        words[i] = _0
        if offset < directory[COUNT, at]:
            xors = u64_at(directory[WORDS, at])
            if xors[offset] != _0:
                found[i] = True
                values[i] = xors[offset]
                words[i] = directory[LOCATION, at] + offset
                here += 1
                if take:
                    xors[offset] = _0
                    directory[LEFT, at] -= _1
    return here


@kernel
def restamp(directory: Any, used: Any, keys: Any, stamp: Any, found: Any) -> None:
    """Give the roots that are there another stamp; ``found`` says which were."""
    for i in range(keys.size):
        at = _range_of(directory, used, keys[i])
        offset = keys[i] - directory[FIRST, at]
        found[i] = offset < directory[COUNT, at] and u64_at(directory[WORDS, at])[offset] != _0
        if found[i]:
            u16_at(directory[STAMPS, at])[offset] = stamp


@kernel
def count_stamped(directory: Any, used: Any, stamp: Any, any_stamp: Any) -> Any:
    total = np.int64(0)
    for at in range(used):
        if any_stamp:
            total += np.int64(directory[LEFT, at])
            continue
        xors, stamps = u64_at(directory[WORDS, at]), u16_at(directory[STAMPS, at])
        for offset in range(directory[COUNT, at]):
            total += stamps[offset] == stamp and xors[offset] != _0
    return total


@kernel
def collect_stamped(
    directory: Any, used: Any, stamp: Any, any_stamp: Any, keys: Any, values: Any, words: Any
) -> None:
    """Copy out the roots that carry ``stamp``, or all: their ids, XORs and locations."""
    filled = 0
    for at in range(used):
        xors, stamps = u64_at(directory[WORDS, at]), u16_at(directory[STAMPS, at])
        for offset in range(directory[COUNT, at]):
            if xors[offset] != _0 and (any_stamp or stamps[offset] == stamp):
                keys[filled] = directory[FIRST, at] + offset
                values[filled] = xors[offset]
                words[filled] = directory[LOCATION, at] + offset
                filled += 1
