"""What keeps layers few and memory small between two batches, for a part of the time that batches take."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import thread_time
from typing import Any, Protocol

from ftlayer.checkpoint.snapshots import TableInfo
from ftlayer.functions.keyed import Key
from ftlayer.state.snapshots.frozen import StoreView
from ftlayer.state.snapshots.view import TableView
from ftlayer.state.tables import memory
from ftlayer.state.tables.footprint import footprint
from ftlayer.state.tables.groups import KeyGroups
from ftlayer.state.tables.layers import Layer, LayeredTable, Sharing, Store
from ftlayer.state.tables.memory import FrontGauge, StateMemory
from ftlayer.state.tables.merging import Merger

_MERGING = 0.25
"""Part of the processor's time that merging takes at most. To use a key takes ten times as long as to merge it."""

_MOST_MOVING = 3.0
"""Time that is taken for moving at most, as a multiple of what the task has used since the last time …"""

_WAITING_S = 0.02
"""… and while its input waits for that."""


class Spilling(Protocol):
    """What keeps the stores below the tables, and moves into them what is too much for memory."""

    def store(self, info: TableInfo, groups: KeyGroups) -> Store:
        """Return the store of a new table."""

    def view(self, tables: Sequence[TableView]) -> StoreView:
        """Return what is in the stores, for a snapshot; called in its thread."""

    def is_empty(self) -> bool:
        """Whether nothing was ever moved into a store."""

    def move(self, tables: Sequence[tuple[TableInfo, KeyGroups, LayeredTable]]) -> int:
        """Move some entries of bases into the stores, or prepare for it: a few milliseconds.

        Returns the bytes of memory that they took up. Called while neither is read.
        """

    def close(self) -> None:
        """Remove the stores."""


class StateUpkeep:
    """Merges layers, and moves what is too much for memory into the stores below the tables, if there are any."""

    def __init__(
        self,
        tables: Sequence[tuple[TableInfo, KeyGroups, LayeredTable]],
        sharing: Sharing,
        spilling: Spilling | None,
    ) -> None:
        """``tables`` are all that there are, those that are still to come too."""
        self._tables = tables
        self._sharing = sharing
        self._spilling = spilling
        self._memory: StateMemory | None = None if spilling is None else StateMemory(memory.MAX_BYTES)
        self._mergers: list[Merger] = []
        self._gauges: list[FrontGauge] = []

    def made(self, table: LayeredTable) -> None:
        """Look after another table."""
        self._mergers.append(Merger(table, self._sharing, self._memory))
        if self._memory is not None:
            self._gauges.append(FrontGauge(table))

    @property
    def is_full(self) -> bool:
        """Whether memory holds so much that no input is to be taken before `merge_and_spill` has made room."""
        return self._memory is not None and self._memory.is_full

    @property
    def measures(self) -> bool:
        """Whether it has to know the bytes of layers."""
        return self._memory is not None

    def pushed(self, layers: Collection[Layer]) -> None:
        """All fronts have become these layers, which are measured."""
        if self._memory is not None:
            self._memory.layers += sum(layer.bytes for layer in layers)
            self._memory.front = 0
        for gauge in self._gauges:
            gauge.frozen()

    def filled(self, keys: Collection[Key], values: Collection[Any]) -> None:
        """These are in a base now, while the backend is filled: what is too much for memory is moved into stores."""
        if self._memory is not None:
            self._memory.grew(footprint(keys, values))
            self._spill(None)

    def merge_and_spill(self, used_s: float) -> None:
        """Do a part of what there is to do, by the time that the task has used since the last call.

        Where the input waits for it, as much as can be done in a few milliseconds.
        """
        least_s = _WAITING_S if self.is_full else 0.0
        self._merge(max(_MERGING * used_s, least_s))
        if not self._sharing.base_readers:
            self._spill(thread_time(), used_s, least_s)

    def is_front_large(self, handled: int) -> bool:
        """Whether fronts take up so much that they are better layers now; ``handled``: records since the last call."""
        if self._memory is None:
            return False
        for gauge in self._gauges:
            gauge.look(handled)
        self._memory.front = sum(gauge.bytes for gauge in self._gauges)
        # While a base is read nothing can be moved on: more layers would only have to be joined.
        return not self._sharing.base_readers and self._memory.is_front_large

    def _merge(self, most_s: float) -> None:
        """Merge for a part of the time that the task has used, so that layers stay few whatever a batch is."""
        until_s = thread_time() + most_s
        for merger in self._mergers:
            while merger.step() and thread_time() < until_s:
                pass

    def _spill(self, from_s: float | None, used_s: float = 0.0, least_s: float = 0.0) -> None:
        """Move what is too much, the more of it the longer; ``from_s`` None: all of it.

        How long is told by ``used_s``, so that what comes is moved at last, whatever a batch is.
        """
        if self._memory is None or self._spilling is None:
            return
        pressure: float | None = None
        while excess := self._memory.excess(self._bytes_of_bases):
            if pressure is None:
                pressure = excess / memory.MAX_BYTES
            if not any(table.base for _, _, table in self._tables):
                self._memory.emptied()
                return
            self._memory.moved(self._spilling.move(self._tables))
            if from_s is not None:
                most_s = max(used_s * min(pressure, _MOST_MOVING), least_s)
                if thread_time() - from_s >= most_s:
                    return

    def _bytes_of_bases(self) -> int:
        return sum(footprint(table.base.keys(), table.base.values()) for _, _, table in self._tables)
