"""Keyed state as it was at a freeze, and what of it has changed since an earlier one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ftlayer.checkpoint.snapshots import TableInfo
from ftlayer.functions.keyed import Key
from ftlayer.records.kernels import native
from ftlayer.state.tables.groups import KeyGroups
from ftlayer.state.tables.layers import DELETED, Layer, sliced
from ftlayer.state.tables.timers import Buckets

SLICE = 1_000
"""Entries that are handled in one go, without giving the interpreter to the task's thread."""


@dataclass(frozen=True, slots=True)
class Part:
    """A few entries of a table: keys with their values, and keys that were deleted."""

    keys: list[Key]
    values: list[Any]
    deleted: list[Key]


@dataclass(frozen=True, slots=True)
class TableView:
    """One table at a freeze: its layers then, the newest first, and its base, which stays as long as it is read."""

    info: TableInfo
    groups: KeyGroups
    layers: tuple[Layer, ...]
    base: dict[Key, Any]

    def parts(self) -> Iterator[Part]:
        """Return what is in memory, bit by bit."""
        return newest_of([layer.changes() for layer in self.layers], self.base)


@dataclass(frozen=True, slots=True)
class TimersView:
    """The timers of an operator at a freeze."""

    info: TableInfo
    groups: KeyGroups
    event: Buckets
    processing: Buckets

    def parts(self) -> Iterator[Part]:
        """Return timers: for a key [is of processing time, time, place in the order of setting]."""
        for processing, buckets in ((False, self.event), (True, self.processing)):
            timers = ((key, time_ms) for time_ms, bucket in buckets.items() for key in bucket)
            for number, part in enumerate(sliced(timers, SLICE)):
                first = number * SLICE
                values = [[processing, time_ms, first + place] for place, (_, time_ms) in enumerate(part)]
                yield Part([key for key, _ in part], values, [])


def newest_of(
    newest_first: Sequence[Iterable[tuple[Key, Any]]], base: dict[Key, Any] | None = None
) -> Iterator[Part]:
    """Return entries bit by bit, of each key only the first one.

    ``base`` comes behind the others, has each key once, and does not change meanwhile.
    """
    seen: dict[Key, None] = {}
    last = len(newest_first) - 1 if base is None else len(newest_first)
    for place, pairs in enumerate(newest_first):
        for part in sliced(pairs, SLICE):
            new = [pair for pair in part if pair[0] not in seen] if place else part
            kept = [pair for pair in new if pair[1] is not DELETED]
            deleted = [key for key, value in new if value is DELETED] if len(kept) < len(new) else []
            if place != last:
                seen.update(dict.fromkeys([pair[0] for pair in new]))
            if new:
                yield Part([pair[0] for pair in kept], [pair[1] for pair in kept], deleted)
    at = -1 if base is None else 0
    while base is not None and at >= 0:
        at, keys, values, deleted = native.dict_part(base, at, SLICE, seen, DELETED)
        if keys or deleted:
            yield Part(keys, values, deleted)
