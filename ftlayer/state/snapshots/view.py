"""Keyed state as it was at a freeze, and what of it has changed since an earlier one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ftlayer.checkpoint.snapshots import TableInfo
from ftlayer.functions.keyed import Key
from ftlayer.state.tables.groups import KeyGroups
from ftlayer.state.tables.layers import DELETED, Layer, sliced
from ftlayer.state.tables.timers import Buckets

SLICE = 1_000
"""Entries that are handled in one go, without giving the interpreter to the task's thread."""

Part = list[tuple[Key, Any]]


@dataclass(frozen=True, slots=True)
class TableView:
    """One table at a freeze: its layers then, the newest first, and its base, which stays as long as it is read."""

    info: TableInfo
    groups: KeyGroups
    layers: tuple[Layer, ...]
    base: dict[Key, Any]

    def parts(self, *, deletions: bool) -> Iterator[Part]:
        """Return what is in memory, in short lists; ``deletions``: with DELETED for keys a store may still have."""
        for part in newest_of([*(layer.changes() for layer in self.layers), self.base.items()]):
            yield part if deletions else [pair for pair in part if pair[1] is not DELETED]


@dataclass(frozen=True, slots=True)
class TimersView:
    """The timers of an operator at a freeze."""

    info: TableInfo
    groups: KeyGroups
    event: Buckets
    processing: Buckets

    def parts(self) -> Iterator[Part]:
        """Return timers as pairs of key and [is of processing time, time, place in the order of setting]."""
        for processing, buckets in ((False, self.event), (True, self.processing)):
            timers = ((key, time_ms) for time_ms, bucket in buckets.items() for key in bucket)
            for number, part in enumerate(sliced(timers, SLICE)):
                first = number * SLICE
                yield [
                    (key, [processing, time_ms, first + place]) for place, (key, time_ms) in enumerate(part)
                ]


def newest_of(newest_first: Sequence[Iterable[tuple[Key, Any]]]) -> Iterator[Part]:
    """Return pairs in short lists, of each key only the first one."""
    seen: dict[Key, None] = {}
    last = len(newest_first) - 1
    for place, pairs in enumerate(newest_first):
        for part in sliced(pairs, SLICE):
            new = [pair for pair in part if pair[0] not in seen] if place else part
            if new:
                yield new
            if place != last:
                seen.update(dict.fromkeys([pair[0] for pair in new]))
