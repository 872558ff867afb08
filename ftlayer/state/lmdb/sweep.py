"""The keys of a table's base in the order in which they lie in a store, found out bit by bit.

A part of the keys is packed and sorted at a time; the sorted parts are merged while they are used, as an external
sort does (Knuth, The Art of Computer Programming 3, 5.4).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import islice

from ftlayer.checkpoint.snapshots import TableInfo
from ftlayer.functions.keyed import Key
from ftlayer.state.lmdb.layout import TABLE, stored_key
from ftlayer.state.tables.groups import KeyGroups
from ftlayer.state.tables.layers import LayeredTable

MOST_KEYS = 64_000
"""Keys of one sweep, the oldest of the base: the more of them, the closer they lie together."""

SORTED = 1_000
"""Keys that are sorted in one call: about a millisecond."""


class Sweep:
    """Those keys that a base has now. None of them may leave it before `in_order` has given it."""

    def __init__(
        self,
        info: TableInfo,
        groups: KeyGroups,
        table: LayeredTable,
        pack: Callable[[KeyGroups, Key], bytes],
    ) -> None:
        """``pack`` returns a key's bytes."""
        self.info = info
        self.groups = groups
        self.table = table
        self._pack = pack
        self._unsorted = iter(list(islice(table.base, MOST_KEYS)))
        self._parts: list[list[tuple[bytes, Key]]] = []
        self.in_order: Iterator[tuple[bytes, Key]] = iter(())

    def sort(self) -> bool:
        """Sort a part of the keys; False: all are sorted, and `in_order` gives them with their stored keys."""
        number = TABLE.pack(self.info.number)
        pack, groups = self._pack, self.groups
        part = [(stored_key(number, pack(groups, key)), key) for key in islice(self._unsorted, SORTED)]
        if part:
            part.sort(key=_stored)
            self._parts.append(part)
            return True
        if self._parts:
            self.in_order = heapq.merge(*self._parts, key=_stored)
            self._parts = []
        return False


def _stored(pair: tuple[bytes, Key]) -> bytes:
    return pair[0]
