"""Keeps the layers of a table few: merges them into the base while that is not read, else into one another.

Each call does a bit of the work, and takes a few milliseconds at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ftlayer.functions.keyed import Key
from ftlayer.state.tables.layers import DELETED, Layer, LayeredTable, Sharing, merged, sliced
from ftlayer.state.tables.memory import StateMemory

SLICE = 5_000
"""Entries that are moved into a base in one call: about a millisecond."""

MAX_LAYERS = 6
"""Layers of a table while its base is read. Each of them makes looking a key up slower. Where the input waits for
memory there is one: a key that is written again and again is in each of them."""


class Merger:
    def __init__(self, table: LayeredTable, sharing: Sharing, memory: StateMemory | None = None) -> None:
        """``memory`` is told what comes into bases; layers are measured for it."""
        self._table = table
        self._sharing = sharing
        self._memory = memory
        self._moving: tuple[Layer, Iterator[list[tuple[Key, Any]]]] | None = None
        self._uncounted = 0
        self._joining: tuple[Layer, Layer, Iterator[Layer | None]] | None = None

    def step(self) -> bool:
        """Do a bit of the work; False if there is none."""
        layers = self._table.layers
        if not layers:
            return False
        if not self._sharing.base_readers:
            self._joining = None
            self._into_base(layers[-1])
            return True
        if self._joining is None:
            # The oldest stays alone while it is moved.
            free = layers if self._moving is None else layers[:-1]
            is_full = self._memory is not None and self._memory.is_full
            if len(free) <= (1 if is_full else MAX_LAYERS):
                return False
            self._joining = _smallest(free)
        self._join(*self._joining)
        return True

    def _into_base(self, oldest: Layer) -> None:
        base = self._table.base
        has_store = self._table.store is not None
        if self._moving is None or self._moving[0] is not oldest:
            if not has_store and len(oldest) <= SLICE:
                base.update(oldest.values)
                for key in oldest.deleted:
                    if key not in oldest.values:
                        base.pop(key, None)
                self._done(oldest)
                return
            # Begun anew if the layer was joined with another meanwhile: what was moved is moved again.
            self._moving = oldest, sliced(oldest.changes(), SLICE)
            self._uncounted = oldest.bytes
        part = next(self._moving[1], None)
        if part is None:
            self._count(self._uncounted)
            self._done(oldest)
        else:
            base.update(part)
            self._count(-(-oldest.bytes * len(part) // len(oldest)))
            if not has_store:
                for key in [key for key, value in part if value is DELETED]:
                    del base[key]

    def _count(self, size: int) -> None:
        """So much of the layer has come into the base: not before, for bases may be measured between two slices."""
        size = min(size, self._uncounted)
        self._uncounted -= size
        if self._memory is not None:
            self._memory.grew(size)

    def _done(self, layer: Layer) -> None:
        self._moving = None
        self._table.replace_layers([layer], [])
        if self._memory is not None:
            self._memory.layers -= layer.bytes

    def _join(self, newer: Layer, older: Layer, joining: Iterator[Layer | None]) -> None:
        joined = next(joining)
        if joined is not None:
            self._joining = None
            self._table.replace_layers([newer, older], [joined])
            if self._memory is not None:
                joined.measure()
                self._memory.layers += joined.bytes - newer.bytes - older.bytes


def _smallest(layers: tuple[Layer, ...]) -> tuple[Layer, Layer, Iterator[Layer | None]]:
    """Choose the smallest neighbours."""
    at = min(range(len(layers) - 1), key=lambda place: len(layers[place]) + len(layers[place + 1]))
    newer, older = layers[at], layers[at + 1]
    return newer, older, merged(older, newer, SLICE)
