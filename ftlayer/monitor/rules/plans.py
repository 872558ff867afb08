"""What is to be done to many dead letters: counted first, then carried out in calls of a bounded size.

Both are rules: they say which vertex has to be asked what, and take its answer. What is counted is a set of keys; a
letter that dies meanwhile is none of them, and one that is gone by then is left out of what was changed.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from typing import Any

import pyarrow as pa

from ftlayer.checkpoint.custom_storage import imported
from ftlayer.checkpoint.letters import TIMER_SCHEMA, not_into_source
from ftlayer.common.checks import named_type
from ftlayer.common.printable import described
from ftlayer.config import MIB
from ftlayer.errors import ConfigError, FTLayerError, UnsupportedError
from ftlayer.monitor.rules.names import JobNames, VertexView
from ftlayer.monitor.rules.row_json import Difference, differences, json_of_row, row_of_json
from ftlayer.monitor.rules.where import Where
from ftlayer.vertex import calls
from ftlayer.vertex.rules.grouping import kind_of

# Finding records: page by page, what the vertex can do of a filter there, the rest of it here. No call examines more
# than a bounded number of records, so a search is many short ones, between which others work and it may be given up.

DEAD, WAITING = "dead", "waiting"


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


# What may be done to a dead letter. All of them may be purged, exported and shown.

BACK_FROM_FILES = "their job takes them within ten seconds while it runs, else at its next start"
"""What becomes of requeued letters that are in files."""


def no_way_back(view: VertexView, stream: str) -> str:
    """Return why dead letters of a stream cannot be requeued, and what to do; "" where they can, as far as is known."""
    for job in (announced.job for announced in view.jobs):
        chain = stream.removeprefix(f"{job.owner}/")
        if chain == stream or job.mode != "barrier":
            continue
        plan = job.plan or calls.JobPlan((), ())
        if chain in {node.uid for node in plan.nodes} - {edge.target for edge in plan.edges}:
            return not_into_source(chain)
        if view.is_stored and job.state == "ended":
            return (
                f"{job.name!r} has come to its end, and a start with restore_from='latest' has nothing left to do: "
                "nothing would take its letters. Requeue them while it runs anew (from a savepoint, or with "
                "restore_from=None); or write them to a file with `ftlayer dead export`"
            )
    return ""


def check_streams(view: VertexView, streams: Iterable[str]) -> None:
    """Raise `UnsupportedError` where dead letters of one of these streams of a vertex cannot be requeued."""
    for stream in streams:
        if reason := no_way_back(view, stream):
            raise UnsupportedError(reason)


def check_way_back(view: VertexView, info: calls.RecordInfo, *, edited: bool = False) -> None:
    """Raise `UnsupportedError` for a record that cannot be requeued, or, with ``edited``, that cannot be edited."""
    if info.state != DEAD:
        raise UnsupportedError(f"this record is {info.state}: only dead letters are requeued and edited")
    check_streams(view, [info.stream])
    if edited and info.payload.schema.equals(TIMER_SCHEMA):
        raise UnsupportedError(
            f"{info.key.hex()} is a timer, which has no record to edit: requeue or purge it"
        )


class Search:
    """The records of a selection: `next_call` says what to ask the vertex, `take` what was found."""

    def __init__(self, selection: Selection, names: JobNames, now_ms: int) -> None:
        """``now_ms`` (Unix) is what ages are reckoned from."""
        self._selection, self._names, self._now_ms = selection, names, now_ms
        self._calls = deque(first_pages(selection, names, now_ms))
        self.examined = 0

    @property
    def is_over(self) -> bool:
        return not self._calls

    def next_call(self, limit: int = calls.MAX_SELECTED) -> calls.SelectRecords | None:
        """Return what to ask next, None at the end; for ``limit`` records at most."""
        if not self._calls:
            return None
        return replace(self._calls[0], limit=min(limit, calls.MAX_SELECTED))

    def take(self, page: calls.RecordPage) -> tuple[calls.RecordInfo, ...]:
        self.examined += page.examined
        call = self._calls.popleft()
        if page.more:
            self._calls.appendleft(replace(call, after=page.more))
        where, known = self._selection.where, (self._names, self._now_ms)
        return tuple(info for info in page.records if where.matches(self._selection.vertex, info, *known))


def first_pages(selection: Selection, names: JobNames, now_ms: int) -> tuple[calls.SelectRecords, ...]:
    """Return the first pages that have all of a selection; of what they give the filter is to be checked."""
    pushed = selection.where.pushed(now_ms)
    is_dead = selection.state == DEAD
    base = calls.SelectRecords(
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
    keys = selection.keys or pushed.keys
    if selection.keys and pushed.keys:
        keys = tuple(key for key in keys if key in pushed.keys)
    parts = [keys[start : start + calls.MAX_KEYS] for start in range(0, len(keys), calls.MAX_KEYS)]
    if not parts and not selection.keys:
        parts = [()]
    return tuple(
        replace(base, stream=stream, keys=part)
        for stream in _streams(selection, names, pushed.stream)
        for part in parts
    )


def _streams(selection: Selection, names: JobNames, pushed: str) -> list[str]:
    """Return the streams of the vertex that all names mean, "" where none is named."""
    sets = [
        {stream for vertex, stream in names.streams(name) if vertex == selection.vertex}
        for name in (selection.stream, pushed)
        if name
    ]
    if selection.stream_id:
        sets.append({selection.stream_id})
    return sorted(set.intersection(*sets)) if sets else [""]


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

    def add(self, vertex: str, info: calls.RecordInfo) -> None:
        at_ms = info.history[-1].at_ms if info.history else 0
        name = (vertex, info.stream, info.operator, kind_of(info.reason))
        group = self._groups.get(name, LetterGroup(*name, 0, at_ms, at_ms))
        first_ms, last_ms = min(group.first_seen_ms, at_ms), max(group.last_seen_ms, at_ms)
        self._groups[name] = LetterGroup(*name, group.count + 1, first_ms, last_ms)

    def groups(self) -> list[LetterGroup]:
        return sorted(self._groups.values(), key=lambda group: -group.count)


def whole_groups(
    selection: Selection, names: JobNames, now_ms: int, groups: Iterable[calls.DeadGroup]
) -> list[LetterGroup] | None:
    """Return those of a vertex's ``groups`` that a selection takes, the largest first.

    None where it may take a part of one: then the letters have to be looked at.
    """
    pushed = selection.where.pushed(now_ms)
    is_partial = selection.keys or selection.text or pushed.keys or pushed.since_ms or pushed.until_ms
    if is_partial or not pushed.is_all:
        return None
    wanted = [set(names.streams(name)) for name in (selection.stream, pushed.stream) if name]
    same = ("stream", "operator", "kind", "count", "first_seen_ms", "last_seen_ms")
    found = [
        LetterGroup(selection.vertex, *(getattr(group, name) for name in same))
        for group in groups
        if pushed.operator in ("", group.operator)
        and all((selection.vertex, group.stream) in streams for streams in wanted)
        and selection.stream_id in ("", group.stream)
        and selection.group in (-1, group.number)
    ]
    return sorted(found, key=lambda group: -group.count)


KEYS_A_CALL = 1_000
"""So many letters a call changes: 20 ms of a vertex, with other calls in between."""


class Change(StrEnum):
    REQUEUE = "requeue"
    PURGE = "purge"
    EDIT = "edit"


@dataclass(frozen=True, slots=True)
class PlanScope:
    vertex: str
    select: calls.SelectRecords


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
        self._where, self._names, self._now_ms = where, names, now_ms
        self._sees_records = not where.pushed(now_ms).is_all
        self._groups = LetterGroups()
        self._found: dict[tuple[str, bytes], None] = {}  # scopes may overlap
        self._after = b""
        self._examined = 0

    @property
    def found(self) -> int:
        return len(self._found)

    def next_call(self) -> tuple[str, calls.SelectRecords] | None:
        """Return whom to ask what, None at the end."""
        if not self._scopes:
            return None
        scope = self._scopes[0]
        call = replace(
            scope.select,
            state="dead",
            newest=False,
            after=self._after,
            until_ms=min(scope.select.until_ms or self._now_ms + 1, self._now_ms + 1),
            keys_only=not self._sees_records,
            limit=calls.MAX_SELECTED if self._sees_records else calls.MAX_KEYS,
        )
        return scope.vertex, call

    def take(self, page: calls.RecordPage) -> None:
        vertex = self._scopes[0].vertex
        keys: Sequence[bytes] = page.keys
        if self._sees_records:
            known = self._names, self._now_ms
            meant = [info for info in page.records if self._where.matches(vertex, info, *known)]
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


EditFunction = Callable[[dict[str, Any]], object]
"""Gets a record as `json_of_row` has it; returns the new one, or None to leave the letter as it is."""

SHOWN_EDITS = 10
MOST_EDITED, MOST_EDITED_BYTES = 100_000, 512 * MIB
"""New records that are kept in memory until they are confirmed."""
_EDIT_BYTES = 4 * MIB
"""Records of a call that edits, unless one alone has more."""


def edit_function(name: str, option: str) -> EditFunction:
    """Return the function that ``module:function`` names. Raises `ConfigError`, naming the option."""
    found = imported(name, option, "'package.module:function', of a module that can be imported here")
    if not callable(found):
        raise ConfigError(f"{option}: {name!r} is {named_type(found)}, not a function of a record")
    return found


class Editing:
    """What a function makes of dead letters, one by one. It is called once for each, and nothing is changed yet.

    Attributes:
        found: vertex and key of all letters that were looked at.
        payloads: the new records, by vertex and key.
        first: the first ten of them: vertex, letter, and where the new record differs.
        left: why letters stay as they are whose function failed, or gave what the letter cannot be.
    """

    def __init__(self, function: EditFunction) -> None:
        self._function = function
        self._bytes = 0
        self._groups = LetterGroups()
        self.found: dict[tuple[str, bytes], None] = {}  # selections may overlap
        self.payloads: dict[tuple[str, bytes], pa.RecordBatch] = {}
        self.first: list[tuple[str, calls.RecordInfo, list[Difference]]] = []
        self.left: dict[tuple[str, bytes], str] = {}

    @property
    def unchanged(self) -> int:
        return len(self.found) - len(self.payloads) - len(self.left)

    @property
    def groups(self) -> list[LetterGroup]:
        return self._groups.groups()

    def take(self, view: VertexView, letters: Iterable[calls.RecordInfo]) -> None:
        """Look at letters of a vertex. Raises `ConfigError` where these are more than can be kept."""
        for info in letters:
            name = (view.vertex, info.key)
            if name in self.found:
                continue
            self.found[name] = None
            try:
                before, row = self._edited(view, info)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - it is a user's function
                self.left[name] = str(error) if isinstance(error, FTLayerError) else described(error)
                continue
            after = before if row is None else json_of_row(row)
            # Not ==, to which 0 is -0.0, and 1 is true.
            if row is None or json.dumps(after) == json.dumps(before):
                continue
            self._bytes += row.nbytes
            if len(self.payloads) >= MOST_EDITED or self._bytes > MOST_EDITED_BYTES:
                raise ConfigError(
                    f"more than {MOST_EDITED:,} letters, or {MOST_EDITED_BYTES // MIB} MiB of new records: edit some "
                    "first, by a filter like 'age > 1h'"
                )
            self.payloads[name] = row
            self._groups.add(view.vertex, info)
            if len(self.first) < SHOWN_EDITS:
                self.first.append((view.vertex, info, differences(before, after)))

    def _edited(
        self, view: VertexView, info: calls.RecordInfo
    ) -> tuple[dict[str, Any], pa.RecordBatch | None]:
        check_way_back(view, info, edited=True)
        # The function may change what it is given.
        before, given = json_of_row(info.payload), self._function(json_of_row(info.payload))
        return before, None if given is None else row_of_json(given, info.payload.schema, info.payload)

    def facts(self) -> dict[str, Any]:
        """Return what is left, and why, and the first edits, as JSON has them."""
        return {
            "unchanged": self.unchanged,
            "left": [{"vertex": at, "key": key.hex(), "reason": why} for (at, key), why in self.left.items()],
            "preview": [
                {
                    "vertex": vertex,
                    "key": info.key.hex(),
                    "before": json_of_row(info.payload),
                    "after": json_of_row(self.payloads[vertex, info.key]),
                }
                for vertex, info, _ in self.first
            ],
        }


class Carrying:
    """Changes letters, a call after the other."""

    def __init__(
        self,
        change: Change,
        letters: Letters,
        by: str = "",
        payloads: Mapping[tuple[str, bytes], pa.RecordBatch] | None = None,
    ) -> None:
        """``by`` says who does it, for the audit log; ``payloads`` are the new ones, of a change that edits."""
        self._change, self._by = change, by
        self._payloads = payloads or {}
        self._rest: dict[str, list[bytes]] = {}
        for vertex, key in letters.keys:
            self._rest.setdefault(vertex, []).append(key)
        self.total = len(letters.keys)
        self.asked = 0
        self.changed = 0

    def next_call(self) -> tuple[str, calls.Requeue | calls.Purge | calls.EditAndRequeue] | None:
        """Return whom to ask what, None at the end."""
        for vertex, keys in self._rest.items():
            some = tuple(keys[: self._at_once(vertex, keys)])
            if self._change is Change.EDIT:
                edits = tuple(calls.Edit(key, self._payloads[vertex, key]) for key in some)
                return vertex, calls.EditAndRequeue(edits, self._by)
            return vertex, (calls.Requeue if self._change is Change.REQUEUE else calls.Purge)(some, self._by)
        return None

    def _at_once(self, vertex: str, keys: list[bytes]) -> int:
        if self._change is not Change.EDIT:
            return KEYS_A_CALL
        sizes = accumulate(self._payloads[vertex, key].nbytes for key in keys[: calls.MAX_EDITS])
        return max(1, sum(int(size) <= _EDIT_BYTES for size in sizes))

    def take(self, answer: calls.Changed) -> None:
        vertex, keys = next(iter(self._rest.items()))
        some = len(keys[: self._at_once(vertex, keys)])
        self.asked += some
        self.changed += answer.count
        del keys[:some]
        if not keys:
            del self._rest[vertex]
