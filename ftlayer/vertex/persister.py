"""The ids that source records are persisted under, and the single ids that an exact tracker keeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ftlayer.records.ids import I64Array, RootRange, RootSeed, U64Array, root_ids, root_range
from ftlayer.vertex.calls import EventIds

OWN = -1
"""In `EventIds.owners`: the event acknowledges the id itself."""


class IdBook:
    """Which copies each record has emitted, and who is to acknowledge them, until the record is settled itself."""

    def __init__(self) -> None:
        self._owed: dict[int, list[tuple[int, int]]] = {}
        self._operators: dict[str, int] = {}

    def note(self, parents: U64Array, ids: U64Array, owner: str) -> None:
        """Note that ``ids[i]`` was emitted under the record id ``parents[i]``, to ``owner``."""
        operator = self._operators.setdefault(owner, len(self._operators))
        for parent, record_id in zip(parents.tolist(), ids.tolist(), strict=True):
            self._owed.setdefault(parent, []).append((record_id, operator))

    def take(self, parents: U64Array, *, own: bool) -> EventIds:
        """Return for each of ``parents`` the list of what it owes, and forget it.

        ``own`` puts the parent's id in front: the list of the event by which it is acknowledged.
        """
        lists = [[(parent, OWN)] * own + self._owed.pop(parent, []) for parent in parents.tolist()]
        offsets = np.zeros(len(lists) + 1, np.int32)
        np.cumsum([len(items) for items in lists], out=offsets[1:])
        flat = [item for items in lists for item in items]
        return EventIds(
            np.array([record_id for record_id, _ in flat], np.uint64),
            offsets,
            np.array([owner for _, owner in flat], np.int32),
            tuple(self._operators),
        )


def fold_lists(parts: Sequence[EventIds], group_of: I64Array, groups: int) -> EventIds:
    """Join lists as their values are folded.

    Args:
        parts: lists, one part behind the other; the last one names all operators of the others.
        group_of: int64[n], the group of each list of all parts.
        groups: their number.

    Returns:
        One list a group, of all its lists in their order.
    """
    starts = np.cumsum([0, *(len(part.ids) for part in parts)])
    bounds = [part.offsets[1:] + start for part, start in zip(parts, starts[:-1], strict=True)]
    lists = EventIds(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([np.zeros(1, np.int32), *bounds]).astype(np.int32),
        np.concatenate([part.owners for part in parts]),
        parts[-1].operators,
    )
    sorted_lists = lists.take(np.argsort(group_of, kind="stable"))
    ends = np.cumsum(np.bincount(group_of, minlength=groups))
    offsets = np.concatenate([sorted_lists.offsets[:1], sorted_lists.offsets[ends]])
    return EventIds(sorted_lists.ids, offsets, sorted_lists.owners, sorted_lists.operators)


class Persister:
    """Gives roots: none, with fault tolerance off."""

    def roots(self, source: str, batch: int, partition: int, first_ordinal: int, n: int) -> U64Array | None:
        """Name ``n`` records of a source by their place: ordinals from ``first_ordinal`` on.

        ``batch`` and ``partition`` (0 or more) together name what is counted in. Returns uint64[n], None with
        fault tolerance off. Unique as far as the arguments (and the handler's job and run) are: see `RootSeed`.
        """
        return None

    def root_range(
        self, source: str, batch: int, partition: int, first_ordinal: int, n: int
    ) -> RootRange | None:
        """Name ``n`` records of a source by a range: that of a first id, which `roots` gives the first of them."""
        return None


class FTPersister(Persister):
    def __init__(self, job: str, run: str, shard: int, shards: int) -> None:
        self._job, self._run = job, run
        self._shard, self._shards = shard, shards

    def roots(self, source: str, batch: int, partition: int, first_ordinal: int, n: int) -> U64Array:
        seed = RootSeed(self._job, self._run, source, batch, partition)
        return root_ids(seed, first_ordinal, n, shard=self._shard, shards=self._shards)

    def root_range(self, source: str, batch: int, partition: int, first_ordinal: int, n: int) -> RootRange:
        seed = RootSeed(self._job, self._run, source, batch, partition)
        return root_range(seed, first_ordinal, n, shard=self._shard, shards=self._shards)
