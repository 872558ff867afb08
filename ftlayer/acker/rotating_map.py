"""A map whose entries expire when they have not been put for a number of rotations."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ftlayer.errors import ConfigError

from .segmented_table import U64, Lookup, Mask, SegmentedTable, as_stamp, as_u64, no_zeros


def _ignore(keys: U64, values: U64) -> None:
    """Do nothing with the expired entries."""


class RotatingHashMap:
    """uint64 key → uint64 value, in ``buckets`` buckets by the age of the last `put` or `touch`.

    `rotate` opens a new bucket, empties the oldest one and hands its entries to ``expired`` as
    (keys, values), uint64[n] each. So an entry expires with the ``buckets``-th rotation after its last
    put; when rotations come every ``timeout / (buckets - 1)``, that is after ``timeout`` at the earliest
    and ``timeout x (1 + 1 / (buckets - 1))`` at the latest. (`ExpirySchedule` says when they are due.)

    All buckets share one hash table, and an entry knows its bucket: `put` and `touch` move a key by
    writing a number. A rotation reads two bytes for each slot. Keys are never 0. Not thread-safe.

    Raises `ConfigError` for fewer than two buckets, and for arrays that are not uint64[n].
    """

    def __init__(self, buckets: int = 3, expired: Callable[[U64, U64], None] = _ignore) -> None:
        if not 2 <= buckets <= 2**15:
            raise ConfigError(f"buckets: expected 2 to {2**15}, got {buckets}")
        self._table = SegmentedTable()
        self._expired = expired
        self._stamps = deque(as_stamp(number) for number in range(1, buckets + 1))

    @property
    def _newest(self) -> np.uint16:
        return self._stamps[-1]

    def __len__(self) -> int:
        return len(self._table)

    def put(self, keys: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Set keys to values and move them to the newest bucket; of a key given twice the last one counts."""
        keys = no_zeros(as_u64(keys, "keys"), "keys")
        self._table.upsert(keys, as_u64(values, "values", keys.size), self._newest, fold=False)

    def touch(self, keys: npt.ArrayLike) -> Mask:
        """Move the keys that are there to the newest bucket; return which were, bool[n]."""
        return self._table.restamp(as_u64(keys, "keys"), self._newest)

    def get(self, keys: npt.ArrayLike) -> tuple[Mask, U64]:
        """Return which keys are there, bool[n], and their values, uint64[n] (0 for one that is not)."""
        found, values, _ = self._table.look_up(as_u64(keys, "keys"))
        return found, values

    def contains(self, keys: npt.ArrayLike) -> Mask:
        """Return which keys are there, bool[n]."""
        return self._table.look_up(as_u64(keys, "keys")).found

    def remove(self, keys: npt.ArrayLike) -> Lookup:
        """Take keys out; return which were there and their values. A key given twice is found once."""
        lookup = self._table.remove(as_u64(keys, "keys"))
        self._table.shrink_one()
        return lookup

    def rotate(self) -> int:
        """Expire the oldest bucket and open a new one; return how many entries expired.

        The entries are out of the map when the expired function is called, so it may put them again.
        """
        oldest = self._stamps.popleft()
        entries = self._table.stamped(oldest)
        self._table.remove(entries.keys)
        self._table.shrink_one()
        self._stamps.append(oldest)
        self._expired(entries.keys, entries.values)
        return entries.keys.size
