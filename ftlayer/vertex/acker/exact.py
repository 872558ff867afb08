"""The tracker that remembers every id: for tests, and to find out what a stuck root waits for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ftlayer.errors import ConfigError
from ftlayer.records.ids import Explanation, OwedId, RootRange
from ftlayer.vertex.acker.rotating_map import (
    NEVER,
    U64,
    IdLists,
    Located,
    Mask,
    Roots,
    as_stamp,
    as_u64,
    fold_ids,
    no_zeros,
)


@dataclass
class _Entry:
    registered: bool = False
    location: int = 0
    bucket: int = NEVER
    folded: int = 0
    ids_known: bool = True
    owed: dict[int, OwedId] = field(default_factory=dict)

    def is_complete(self) -> bool:
        return self.registered and (not self.owed if self.ids_known else self.folded == 0)


class ExactTracker:
    """Pending roots with the set of ids each waits for: as `AckerTable`, and some hundred times slower.

    With ``ids`` in every event of a root, the root completes when each id was seen twice. A root that got
    an event without ``ids`` is judged by its XOR alone, as the table does it.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._unknown_xors = 0
        self._duplicate_registrations = 0

    def register(
        self,
        roots: U64,
        values: U64,
        *,
        locations: U64 | None = None,
        bucket: int = NEVER,
        ids: IdLists | None = None,
    ) -> Roots:
        roots, values = no_zeros(as_u64(roots, "roots"), "roots"), as_u64(values, "values", len(roots))
        given = [0] * len(roots) if locations is None else as_u64(locations, "locations", len(roots)).tolist()
        as_stamp(bucket)
        lists = _lists(ids, values)
        complete: list[tuple[int, int]] = []
        registered = []
        for root, value, location, owed in zip(roots.tolist(), values.tolist(), given, lists, strict=True):
            entry = self._entries.setdefault(root, _Entry())
            if entry.registered:
                self._duplicate_registrations += 1
                continue
            registered.append(root)
            entry.registered, entry.location, entry.bucket = True, location, bucket
            self._fold(entry, value, owed)
        for root in registered:
            self._complete_if_due(root, complete)
        return _roots(complete)

    def register_range(
        self,
        roots: RootRange,
        values: U64 | None,
        *,
        location: int = 0,
        bucket: int = NEVER,
        ids: IdLists | None = None,
    ) -> Roots:
        each = roots.ids()
        locations = np.arange(location, location + len(roots), dtype=np.uint64)
        values = each if values is None else values
        return self.register(each, values, locations=locations, bucket=bucket, ids=ids)

    def xor(
        self,
        roots: U64,
        values: U64,
        *,
        hold_unregistered: bool = False,
        bucket: int = NEVER,
        ids: IdLists | None = None,
    ) -> Roots:
        roots, values = as_u64(roots, "roots"), as_u64(values, "values", len(roots))
        as_stamp(bucket)
        complete: list[tuple[int, int]] = []
        done: set[int] = set()
        for root, value, owed in zip(roots.tolist(), values.tolist(), _lists(ids, values), strict=True):
            entry = self._entries.get(root)
            if entry is None:
                if not hold_unregistered or root == 0 or root in done:
                    self._unknown_xors += 1
                    continue
                entry = self._entries[root] = _Entry()
            elif not entry.registered and not hold_unregistered:
                self._unknown_xors += 1
                continue
            if not entry.registered:
                entry.bucket = bucket
            self._fold(entry, value, owed)
            if self._complete_if_due(root, complete):
                done.add(root)
        return _roots(complete)

    def explain(self, root: int) -> Explanation | None:
        """Return what ``root`` waits for; None if it is not pending and nothing is held for it."""
        entry = self._entries.get(root)
        if entry is None:
            return None
        return Explanation(entry.registered, entry.folded, entry.ids_known, tuple(entry.owed.values()))

    def forget(self, roots: U64) -> Located:
        wanted = as_u64(roots, "roots").tolist()
        pending = np.zeros(len(wanted), np.bool_)
        locations = np.zeros(len(wanted), np.uint64)
        for position, root in enumerate(wanted):
            if self._is_pending(root):
                pending[position] = True
                locations[position] = self._entries.pop(root).location
        return Located(pending, locations)

    def touch(self, roots: U64, bucket: int) -> Mask:
        as_stamp(bucket)
        found = self.contains(roots)
        for root in roots[found].tolist():
            self._entries[root].bucket = bucket
        return found

    def expire(self, buckets: Sequence[int], *, keep_as: int | None = None) -> Roots:
        taken = [(root, entry.location) for root, entry in self._in(buckets) if entry.registered]
        for root, _ in taken:
            if keep_as is None:
                del self._entries[root]
            else:
                self._entries[root].bucket = keep_as
        return _roots(taken)

    def drop_orphans(self, buckets: Sequence[int]) -> int:
        orphans = [root for root, entry in self._in(buckets) if not entry.registered]
        for root in orphans:
            del self._entries[root]
        return len(orphans)

    def locate(self, roots: U64) -> Located:
        pending = self.contains(roots)
        found = zip(roots.tolist(), pending.tolist(), strict=True)
        locations = [self._entries[root].location if is_pending else 0 for root, is_pending in found]
        return Located(pending, np.array(locations, np.uint64))

    def contains(self, roots: U64) -> Mask:
        return np.array([self._is_pending(root) for root in as_u64(roots, "roots").tolist()], np.bool_)

    def values(self, roots: U64) -> U64:
        wanted = as_u64(roots, "roots").tolist()
        return np.array([self._entries[r].folded if self._is_pending(r) else 0 for r in wanted], np.uint64)

    def pending(self) -> Roots:
        return _roots((root, entry.location) for root, entry in self._entries.items() if entry.registered)

    @property
    def pending_count(self) -> int:
        return sum(entry.registered for entry in self._entries.values())

    @property
    def orphan_count(self) -> int:
        return len(self._entries) - self.pending_count

    @property
    def unknown_xors(self) -> int:
        return self._unknown_xors

    @property
    def duplicate_registrations(self) -> int:
        return self._duplicate_registrations

    def _is_pending(self, root: int) -> bool:
        return root in self._entries and self._entries[root].registered

    def _in(self, buckets: Sequence[int]) -> list[tuple[int, _Entry]]:
        wanted = set(buckets) - {NEVER}
        return [(root, entry) for root, entry in self._entries.items() if entry.bucket in wanted]

    def _fold(self, entry: _Entry, value: int, owed: list[OwedId] | None) -> None:
        entry.folded ^= value
        if owed is None:
            entry.ids_known = False
            return
        for item in owed:
            if entry.owed.pop(item.record_id, None) is None:
                entry.owed[item.record_id] = item

    def _complete_if_due(self, root: int, complete: list[tuple[int, int]]) -> bool:
        entry = self._entries.get(root)
        if entry is None or not entry.registered:
            return False
        if entry.is_complete():
            complete.append((root, self._entries.pop(root).location))
            return True
        return False


def _lists(ids: IdLists | None, values: U64) -> list[list[OwedId] | None]:
    """Split ``ids`` by event; `ConfigError` if they are not what ``values`` were folded from."""
    if ids is None:
        return [None] * values.size
    folded = fold_ids(ids)
    if folded.size != values.size or (folded != values).any():
        raise ConfigError("ids: their XOR differs from the values; give the lists that the values come from")
    owners = ids.owners if ids.owners is not None else [None] * ids.ids.size
    emitted = (owner != "" for owner in owners)
    owed = [
        OwedId(record_id, owner or "", is_emitted)
        for record_id, owner, is_emitted in zip(ids.ids.tolist(), owners, emitted, strict=True)
    ]
    bounds = ids.offsets.tolist()
    return [owed[start:stop] for start, stop in pairwise(bounds)]


def _roots(pairs: Iterable[tuple[int, int]]) -> Roots:
    rows = list(pairs)
    return Roots(
        np.array([root for root, _ in rows], np.uint64),
        np.array([location for _, location in rows], np.uint64),
    )
