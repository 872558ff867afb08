"""The single ids behind folded values, for a vertex that keeps every id (``tracker="exact"``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ftlayer.records.ids import I64Array, U64Array
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
