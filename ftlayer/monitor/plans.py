"""What is to be done to many dead letters: counted first, then carried out in calls of a bounded size.

Both are rules: they say which vertex has to be asked what, and take its answer. What is counted is a set of keys; a
letter that dies meanwhile is none of them, and one that is gone by then is left out of what was changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ftlayer.monitor.grouped import LetterGroup, LetterGroups
from ftlayer.monitor.names import JobNames
from ftlayer.monitor.where import Where
from ftlayer.vertex.calls import MAX_KEYS, MAX_SELECTED, Changed, Purge, RecordPage, Requeue, SelectRecords

KEYS_A_CALL = 1_000
"""So many letters a call changes: 20 ms of a vertex, with other calls in between."""


class Change(StrEnum):
    """What can be done to dead letters."""

    REQUEUE = "requeue"
    PURGE = "purge"


@dataclass(frozen=True, slots=True)
class PlanScope:
    """Letters of one vertex: what it is asked to find them."""

    vertex: str
    select: SelectRecords


@dataclass(frozen=True, slots=True)
class Letters:
    """Dead letters that were found: the vertex and key of each. ``until_ms``: those that died before (Unix)."""

    keys: tuple[tuple[str, bytes], ...]
    examined: int
    until_ms: int


class Counting:
    """Finds the letters that some scopes, and a filter, leave."""

    def __init__(self, scopes: Sequence[PlanScope], where: Where, names: JobNames, now_ms: int) -> None:
        """Look for those that are dead at ``now_ms`` (Unix)."""
        self._scopes = list(scopes)
        self._where = where
        self._names = names
        self._now_ms = now_ms
        self._sees_records = not where.pushed(now_ms).is_all
        self._groups = LetterGroups()
        self._found: dict[tuple[str, bytes], None] = {}  # scopes may overlap
        self._after = b""
        self._examined = 0

    @property
    def found(self) -> int:
        return len(self._found)

    def next_call(self) -> tuple[str, SelectRecords] | None:
        """Return whom to ask what, None at the end."""
        if not self._scopes:
            return None
        scope = self._scopes[0]
        until_ms = min(scope.select.until_ms or self._now_ms + 1, self._now_ms + 1)
        call = replace(
            scope.select,
            state="dead",
            newest=False,
            after=self._after,
            until_ms=until_ms,
            keys_only=not self._sees_records,
            limit=MAX_SELECTED if self._sees_records else MAX_KEYS,
        )
        return scope.vertex, call

    def take(self, page: RecordPage) -> None:
        vertex = self._scopes[0].vertex
        keys: Sequence[bytes] = page.keys
        if self._sees_records:
            meant = [
                info for info in page.records if self._where.matches(vertex, info, self._names, self._now_ms)
            ]
            for info in meant:
                if (vertex, info.key) not in self._found:
                    self._groups.add(vertex, info)
            keys = [info.key for info in meant]
        self._found |= dict.fromkeys((vertex, key) for key in keys)
        self._examined += page.examined
        self._after = page.more
        if not page.more:
            self._scopes.pop(0)

    @property
    def groups(self) -> list[LetterGroup] | None:
        """Return what was found by group; None where the filter needs no look at each letter."""
        return self._groups.groups() if self._sees_records else None

    @property
    def letters(self) -> Letters:
        return Letters(tuple(self._found), self._examined, self._now_ms)


class Carrying:
    """Changes letters, a call after the other."""

    def __init__(self, change: Change, letters: Letters, by: str = "") -> None:
        """Change these letters; nothing is done yet. ``by`` says who does it, for the audit log."""
        self._change = change
        self._by = by
        self._rest: dict[str, list[bytes]] = {}
        for vertex, key in letters.keys:
            self._rest.setdefault(vertex, []).append(key)
        self.total = len(letters.keys)
        self.asked = 0
        self.changed = 0

    def next_call(self) -> tuple[str, Requeue | Purge] | None:
        """Return whom to ask what, None at the end."""
        for vertex, keys in self._rest.items():
            some = tuple(keys[:KEYS_A_CALL])
            return vertex, Requeue(some, self._by) if self._change is Change.REQUEUE else Purge(
                some, self._by
            )
        return None

    def take(self, answer: Changed) -> None:
        vertex, keys = next(iter(self._rest.items()))
        self.asked += len(keys[:KEYS_A_CALL])
        self.changed += answer.count
        del keys[:KEYS_A_CALL]
        if not keys:
            del self._rest[vertex]
