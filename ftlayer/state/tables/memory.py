"""How much state larger than memory keeps there: what is moved to disk when, and when the input waits for that.

Bytes are those of `ftlayer.state.tables.footprint`. What lies in bases is counted from above while it grows, and
measured when that count is too high: a key that is written again and again counts each time until then, and slices of
a layer count as much as they have entries.
"""

from __future__ import annotations

from collections.abc import Callable

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.config import MIB
from ftlayer.state.tables.footprint import footprint
from ftlayer.state.tables.layers import LayeredTable

MAX_BYTES = 64 * MIB
"""What bases keep in memory. Moved down to it from a quarter above it."""

FRONT_PART = 2
"""A front that holds the so many-th part of that becomes a layer, where it can be moved on to disk."""

MOST = 3
"""With so many times `MAX_BYTES` in fronts, layers and bases the input waits. A snapshot may still read the bases
then, or the disk may be slower than the functions."""

LOOK = 8
"""When the so many-th part of a front's entries may have changed in place, a few of them tell whether it has grown."""

FEW = 32
"""So many."""


KEPT_BYTES = {"heap": 512 * MIB, "lmdb": 2 * MAX_BYTES}
"""By backend, the bytes of layers that are kept for the next incremental snapshot, or wait for the changelog. Values
that are the current ones too count, though they cost no memory beside the state."""


def max_kept(config: CheckpointConfig) -> int:
    """Return the bytes of `KEPT_BYTES`."""
    return KEPT_BYTES[config.backend]


class StateMemory:
    """The bytes in memory of one backend, and what is to become of them.

    Attributes:
        front, layers, bases: bytes there; of bases, as many at most.
    """

    def __init__(self, most: int) -> None:
        """``most``: what bases may keep."""
        self._most = most
        self._exact = True
        self._has_grown = False
        self._moving = False
        self.front = 0
        self.layers = 0
        self.bases = 0

    @property
    def is_full(self) -> bool:
        return self.front + self.layers + self.bases > MOST * self._most

    @property
    def is_front_large(self) -> bool:
        """Whether fronts are to become layers, if those can be moved on."""
        return self.front > self._most // FRONT_PART or self.is_full

    def grew(self, size: int) -> None:
        """So much more lies in bases; some of it may have replaced other values."""
        self.bases += size
        self._exact, self._has_grown = False, True

    def moved(self, size: int) -> None:
        """So much of the bases was moved to disk."""
        self.bases = max(0, self.bases - size)
        # A value that has grown in place counts more now than it did when it came.
        self._exact = False

    def excess(self, measure: Callable[[], int]) -> int:
        """Return how many bytes of bases are to be moved to disk; ``measure`` returns what really lies there.

        It reads all bases, so it is called when they have grown and seem to be over, and when they seem to be down;
        not for each slice that is moved in between.
        """
        seems_down = self._moving and self.bases <= self._most
        if (self._has_grown and self._is_over()) or (not self._exact and seems_down):
            self.bases, self._exact, self._has_grown = measure(), True, False
        self._moving = self._is_over() or (self._moving and self.bases > self._most)
        return self.bases - self._most if self._moving else 0

    def emptied(self) -> None:
        """Nothing lies in bases."""
        self.bases, self._exact, self._has_grown = 0, True, False

    def _is_over(self) -> bool:
        return 4 * self.bases > 5 * self._most


class FrontGauge:
    """Measures the front of one table: what is new at once; all of it when as many records came as it has entries.

    In between a few entries tell whether values grow in place: if so it is measured then.

    Attributes:
        bytes: what it holds, as far as it is known.
    """

    def __init__(self, table: LayeredTable) -> None:
        self._table = table
        self._entries = 0
        self._changed = 0
        self._looked_at = 0
        self._looks = 0
        self.bytes = 0

    def look(self, handled: int) -> None:
        """The task has handled so many records since the last time; each may have changed an entry in place."""
        entries = dict.__len__(self._table)
        grown = entries - self._entries
        self._entries = entries
        self._changed += max(handled, grown)
        if grown > 0 and self._changed < entries:
            self.bytes += footprint(*self._table.newest(grown))
        if self._changed >= entries or self._seems_larger(entries):
            self.bytes = self._table.front_bytes()
            self._changed = self._looked_at = 0

    def _seems_larger(self, entries: int) -> bool:
        if LOOK * (self._changed - self._looked_at) < entries:
            return False
        self._looked_at = self._changed
        self._looks += 1
        few = self._table.some(FEW, self._looks)
        return footprint(*few) * entries > 2 * len(few[0]) * self.bytes

    def frozen(self) -> None:
        self._entries = self._changed = self._looked_at = self.bytes = 0
