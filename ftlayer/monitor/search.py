"""Finding records: page by page, what the vertex can do of a filter there, the rest of it here.

No call to a vertex examines more than a bounded number of records, so a search is many short calls, between which
others work. It says how many were examined, and may be given up, or gone on with, behind each.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from ftlayer.monitor.names import JobNames
from ftlayer.monitor.where import Where
from ftlayer.vertex.calls import MAX_KEYS, MAX_SELECTED, RecordInfo, RecordPage, SelectRecords

DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Selection:
    """Which records of one vertex.

    Attributes:
        state: "pending", "waiting", "delivery" or "dead".
        where: what has to hold for them; all of the rest has to, too.
        stream: a stream or a job, by any of their names; "" for all.
        stream_id, group: a group of dead letters, `DeadGroup.stream` and `number`; "" and -1 for all.
        text: in the reason, the operator, or the bytes of the payload.
        keys: these alone; () for all.
        newest: from the latest on; of dead letters.
    """

    vertex: str
    state: str = DEAD
    where: Where = field(default_factory=Where)
    stream: str = ""
    stream_id: str = ""
    group: int = -1
    text: str = ""
    keys: tuple[bytes, ...] = ()
    newest: bool = False


class Search:
    """The records of a selection: `next_call` says what to ask the vertex, `take` what was found."""

    def __init__(self, selection: Selection, names: JobNames, now_ms: int) -> None:
        """``now_ms`` (Unix) is what ages are reckoned from."""
        self._selection = selection
        self._names = names
        self._now_ms = now_ms
        self._calls = deque(first_pages(selection, names, now_ms))
        self.examined = 0

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to ask."""
        return not self._calls

    def next_call(self, limit: int = MAX_SELECTED) -> SelectRecords | None:
        """Return what to ask next, None at the end; for ``limit`` records at most."""
        if not self._calls:
            return None
        return replace(self._calls[0], limit=min(limit, MAX_SELECTED))

    def take(self, page: RecordPage) -> tuple[RecordInfo, ...]:
        """Return the records of a page that the filter takes."""
        self.examined += page.examined
        call = self._calls.popleft()
        if page.more:
            self._calls.appendleft(replace(call, after=page.more))
        where = self._selection.where
        vertex = self._selection.vertex
        return tuple(info for info in page.records if where.matches(vertex, info, self._names, self._now_ms))


def first_pages(selection: Selection, names: JobNames, now_ms: int) -> tuple[SelectRecords, ...]:
    """Return the first pages that have all of a selection; of what they give the filter is to be checked."""
    pushed = selection.where.pushed(now_ms)
    is_dead = selection.state == DEAD
    base = SelectRecords(
        state=selection.state,
        operator=pushed.operator,
        group=selection.group,
        # Of records in other states these are other times.
        since_ms=pushed.since_ms if is_dead else 0,
        until_ms=pushed.until_ms if is_dead else 0,
        text=selection.text or pushed.text,
        root=pushed.root,
        newest=selection.newest and is_dead,
    )
    keys = _keys(selection.keys, pushed.keys)
    parts = [keys[start : start + MAX_KEYS] for start in range(0, len(keys), MAX_KEYS)]
    if not parts:
        if selection.keys:
            return ()
        parts = [()]
    return tuple(
        replace(base, stream=stream, keys=part)
        for stream in _streams(selection, names, pushed.stream)
        for part in parts
    )


def _keys(wanted: tuple[bytes, ...], pushed: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return tuple(key for key in wanted if key in pushed) if wanted and pushed else wanted or pushed


def _streams(selection: Selection, names: JobNames, pushed: str) -> list[str]:
    """Return the streams of the vertex that all names mean, "" where none is named."""
    wanted = [name for name in (selection.stream, pushed) if name]
    sets = [
        {stream for vertex, stream in names.streams(name) if vertex == selection.vertex} for name in wanted
    ]
    if selection.stream_id:
        sets.append({selection.stream_id})
    return sorted(set.intersection(*sets)) if sets else [""]
