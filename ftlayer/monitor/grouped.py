"""Dead letters by what they have in common: how many of each stream, operator and kind of reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ftlayer.monitor.names import JobNames
from ftlayer.monitor.search import Selection
from ftlayer.vertex.calls import DeadGroup, RecordInfo
from ftlayer.vertex.rules.grouping import kind_of


@dataclass(frozen=True, slots=True)
class LetterGroup:
    """Letters of one vertex that stream, operator and kind of reason are the same of; times are Unix ms."""

    vertex: str
    stream: str
    operator: str
    kind: str
    count: int
    first_seen_ms: int
    last_seen_ms: int


class LetterGroups:
    def __init__(self) -> None:
        self._groups: dict[tuple[str, str, str, str], LetterGroup] = {}

    def add(self, vertex: str, info: RecordInfo) -> None:
        at_ms = info.history[-1].at_ms if info.history else 0
        name = (vertex, info.stream, info.operator, kind_of(info.reason))
        group = self._groups.get(name, LetterGroup(*name, 0, at_ms, at_ms))
        first_ms, last_ms = min(group.first_seen_ms, at_ms), max(group.last_seen_ms, at_ms)
        self._groups[name] = LetterGroup(*name, group.count + 1, first_ms, last_ms)

    def groups(self) -> list[LetterGroup]:
        """Return the groups, the largest first."""
        return sorted(self._groups.values(), key=lambda group: -group.count)


def whole_groups(
    selection: Selection, names: JobNames, now_ms: int, groups: Iterable[DeadGroup]
) -> list[LetterGroup] | None:
    """Return those of a vertex's ``groups`` that a selection takes, the largest first.

    None where it may take a part of one: then the letters have to be looked at.
    """
    pushed = selection.where.pushed(now_ms)
    is_partial = selection.keys or selection.text or pushed.keys or pushed.since_ms or pushed.until_ms
    if is_partial or not pushed.is_all:
        return None
    wanted = [set(names.streams(name)) for name in (selection.stream, pushed.stream) if name]
    found = [
        LetterGroup(
            selection.vertex,
            group.stream,
            group.operator,
            group.kind,
            group.count,
            group.first_seen_ms,
            group.last_seen_ms,
        )
        for group in groups
        if pushed.operator in ("", group.operator)
        and all((selection.vertex, group.stream) in streams for streams in wanted)
        and selection.stream_id in ("", group.stream)
        and selection.group in (-1, group.number)
    ]
    return sorted(found, key=lambda group: -group.count)
