"""Looking for records in several vertices, a page at a time, and for no longer than somebody waits."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ftlayer.common.clock import Now
from ftlayer.errors import ConfigError, VertexUnavailableError
from ftlayer.monitor.console.options import ConsoleOptions, Sessions, Throttle, Users
from ftlayer.monitor.console.watch import Traffic, Watch
from ftlayer.monitor.console.works import Works
from ftlayer.monitor.gather import Gatherer
from ftlayer.monitor.rules.names import JobNames
from ftlayer.monitor.rules.plans import DEAD, EditFunction, Search, Selection
from ftlayer.monitor.rules.where import parse_where
from ftlayer.vertex.calls import MAX_KEYS, MAX_SELECTED, RecordInfo, SelectRecords

STATES = (DEAD, "waiting", "delivery", "pending")
BUDGET_MS = 200
"""After so long a page shows what was found, and where to go on."""

PAGE = 50
MOST = MAX_SELECTED
"""So many records are on a page by itself, and at most."""

_ID = re.compile(r"[0-9a-fA-F]{16}")


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Which records are looked for, as a form or the API says it; "" is all.

    Attributes:
        job: ``<vertex>:<owner>``.
        stream: by any of its names; as `JobNames.streams` finds it.
        group: the number of a group of dead letters, with ``vertex`` and ``stream``.
        q: text in reason, operator or payload.
        root: a root or an origin, 16 hexadecimal digits.
        where: conditions, as `ftlayer.monitor.rules.where` reads them.
    """

    state: str = DEAD
    vertex: str = ""
    job: str = ""
    stream: str = ""
    operator: str = ""
    group: int = -1
    q: str = ""
    root: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What was found, each with its vertex; ``next`` goes on, "" at the end. ``examined`` were looked at.

    ``troubles`` say which vertices were not searched, and why.
    """

    records: tuple[tuple[str, RecordInfo], ...]
    next: str
    examined: int
    troubles: tuple[str, ...] = ()


def selections_of(watch: Watch, wanted: RecordFilter, now_ms: int) -> tuple[Selection, ...]:
    """Return what a filter means in each vertex and stream, in an order that stays. Raises `ConfigError`."""
    if wanted.state not in STATES:
        raise ConfigError(f"state: expected one of {', '.join(STATES)}, got {wanted.state!r}")
    where = parse_where(wanted.where)
    if wanted.operator:
        operator = f"operator = {json.dumps(wanted.operator)}"
        where = parse_where(f"({where}) and {operator}" if str(where) else operator)
    newest = wanted.state == DEAD and not wanted.root
    base = Selection("", wanted.state, where, group=wanted.group, text=wanted.q, newest=newest)
    places = _places(watch, wanted, where.pushed(now_ms).stream)
    return tuple(replace(base, vertex=vertex, stream_id=stream) for vertex, stream in places)


def _places(watch: Watch, wanted: RecordFilter, also: str) -> Sequence[tuple[str, str]]:
    """Return the vertices, and in each the stream that is meant, "" for all."""
    vertex, stream = wanted.vertex, wanted.stream or also
    if wanted.job:
        vertex, _, owner = wanted.job.partition(":")
        stream = stream or owner
    views = [view for view in watch.views() if view.has_records and not view.is_gone]
    if vertex:
        watch.client(vertex)  # which says so where there is none
        views = [view for view in views if view.vertex == vertex]
    if not stream:
        return [(view.vertex, "") for view in views]
    return JobNames(views).streams(stream)


def search(
    watch: Watch, wanted: RecordFilter, *, after: str = "", limit: int = PAGE, clock: Callable[[], Now]
) -> SearchResult:
    """Return up to ``limit`` records, going on behind ``after``. Raises `ConfigError`, and what a vertex raises."""
    began = clock()
    selections = selections_of(watch, wanted, began.wall_ms)
    root, names = _root(wanted.root), watch.names()
    place, cursor = _parse_cursor(after, len(selections))
    records: list[tuple[str, RecordInfo]] = []
    examined = 0
    while place < len(selections) and len(records) < limit:
        vertex = selections[place].vertex
        step = Search(selections[place], names, began.wall_ms)
        # What is asked for fits into the page, so that its end is where the vertex goes on.
        call = step.next_call(limit - len(records))
        if call is None:  # no record can be meant
            place, cursor = place + 1, b""
            continue
        try:
            page = watch.client(vertex).call(replace(call, after=cursor, root=root or call.root))
        except VertexUnavailableError:
            if wanted.vertex or wanted.job:
                raise
            place, cursor = place + 1, b""
            continue
        records += [(vertex, info) for info in step.take(page)]
        examined += page.examined
        cursor = page.more
        if not cursor:
            place += 1
        if clock().mono_ms - began.mono_ms >= BUDGET_MS:
            break
    more = "" if place >= len(selections) else f"{place}.{cursor.hex()}"
    troubles = tuple(
        f"{view.vertex} was not searched: {view.failure}"
        for view in watch.views()
        if view.has_records and view.asked_ms and not view.is_up and not (wanted.vertex or wanted.job)
    )
    return SearchResult(tuple(records), more, examined, troubles)


def _root(text: str) -> int:
    if not text:
        return 0
    # No other form: a decimal number of as many digits would be another id.
    if not _ID.fullmatch(text) or not int(text, 16):
        raise ConfigError(f"root: expected 16 hexadecimal digits, got {text!r}")
    return int(text, 16)


def _parse_cursor(text: str, selections: int) -> tuple[int, bytes]:
    if not text:
        return 0, b""
    place, dot, cursor = text.partition(".")
    try:
        if dot and place.isdecimal() and int(place) < selections:
            return int(place), bytes.fromhex(cursor)
    except ValueError:
        pass  # what is said below
    raise ConfigError("after: this is not where a page of this search ended; search anew")


def record_of(watch: Watch, vertex: str, key: str) -> RecordInfo | None:
    """Return one record, whatever its state; None where it is not there (any more)."""
    try:
        wanted = bytes.fromhex(key)
    except ValueError:
        raise ConfigError(f"key: expected hexadecimal digits, got {key!r}") from None
    client = watch.client(vertex)
    for state in STATES:
        if found := client.call(SelectRecords(state, keys=(wanted,), limit=1)).records:
            return found[0]
    return None


@dataclass(frozen=True)
class Console:
    """A console: who may use it, and what it shows.

    ``cookie`` is the name of the session's; operators may edit letters by ``functions``; ``closing`` is set when it
    ends, so that streams of news end first.
    """

    options: ConsoleOptions
    users: Users
    sessions: Sessions
    throttle: Throttle
    clock: Callable[[], Now]
    cookie: str
    watch: Watch
    works: Works
    functions: Mapping[str, EditFunction]
    traffic: Traffic
    closing: asyncio.Event

    @classmethod
    def of(
        cls, options: ConsoleOptions, gatherer: Gatherer, clock: Callable[[], Now], port: int = 0
    ) -> Console:
        """Return a console that listens on ``port``. Raises `ConfigError` for files or functions that are none."""
        # Cookies of one host know no ports: two consoles on this machine need two names.
        cookie = "__Host-ftlayer" if options.has_tls else f"ftlayer-{port}"
        watch, functions = Watch(gatherer, clock), options.edit_functions()
        login = options.users(), Sessions(clock), Throttle(clock)
        works = Works(watch, clock)
        return cls(options, *login, clock, cookie, watch, works, functions, Traffic(), asyncio.Event())


@dataclass(frozen=True, slots=True)
class ChosenGroup:
    vertex: str
    number: int
    stream: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Letters that somebody chose: groups, or (vertex, key) of single ones, or what a filter leaves.

    A filter that leaves all of them has to be meant so: ``everything``.
    """

    groups: tuple[ChosenGroup, ...] = ()
    keys: tuple[tuple[str, bytes], ...] = ()
    filter: RecordFilter | None = None
    everything: bool = False

    def selections(self, console: Console) -> list[Selection]:
        """Return where they are, no letter twice. Raises `ConfigError`, also where nothing was chosen."""
        given = [each for each in (self.groups, self.keys, self.filter) if each]
        if len(given) != 1:
            what = "nothing was chosen" if not given else "groups, letters and a filter were chosen at once"
            raise ConfigError(f"{what}; choose groups, or letters, or say a filter")
        if self.filter is not None:
            if self.filter.root:
                raise ConfigError(
                    "root: a filter that changes letters has none; choose the letters that it finds"
                )
            wanted = replace(self.filter, state=DEAD)
            if wanted == RecordFilter() and not self.everything:
                raise ConfigError(
                    'filter: nothing was chosen; for all dead letters there are, say "all": true'
                )
            return list(selections_of(console.watch, wanted, console.clock().wall_ms))
        groups = dict.fromkeys(self.groups)
        selections = [Selection(each.vertex, stream_id=each.stream, group=each.number) for each in groups]
        by_vertex: dict[str, list[bytes]] = {}
        for vertex, key in dict.fromkeys(self.keys):
            by_vertex.setdefault(vertex, []).append(key)
        for vertex, keys in by_vertex.items():
            for start in range(0, len(keys), MAX_KEYS):
                selections.append(Selection(vertex, keys=tuple(keys[start : start + MAX_KEYS])))
        for selection in selections:
            console.watch.client(selection.vertex)  # which says so where there is none
        return selections


def choice_of(groups: tuple[str, ...], keys: tuple[str, ...]) -> Choice:
    """Read what a form has checked: ``vertex:number:stream`` and ``vertex:key``. Raises `ConfigError`."""
    return Choice(tuple(map(_group, groups)), tuple(map(_key, keys)))


def _group(text: str) -> ChosenGroup:
    vertex, _, rest = text.partition(":")
    number, _, stream = rest.partition(":")
    if not (vertex and number.isdecimal() and stream):
        raise ConfigError(f"group: expected '<vertex>:<number>:<stream>', got {text!r}")
    return ChosenGroup(vertex, int(number), stream)


def _key(text: str) -> tuple[str, bytes]:
    vertex, _, key = text.partition(":")
    try:
        if vertex and key:
            return vertex, bytes.fromhex(key)
    except ValueError:
        pass  # what is said below
    raise ConfigError(f"key: expected '<vertex>:<hexadecimal key>', got {text!r}")
