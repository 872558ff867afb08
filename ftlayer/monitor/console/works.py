"""What operators have the console do to many letters: counted, confirmed, done by its thread; and where things are.

A work is one operator's. It is forgotten after ten minutes in which nothing was asked of it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from urllib.parse import quote, urlencode

from ftlayer.common.clock import Now
from ftlayer.errors import ConfigError, FTLayerError
from ftlayer.monitor.console.watch import Watch
from ftlayer.monitor.rules import plans
from ftlayer.monitor.rules.facts import Facts, group_facts
from ftlayer.monitor.rules.health import Page


def job_href(job: str) -> str:
    return f"/jobs/{quote(job, safe=':')}"


def record_href(vertex: str, key: str) -> str:
    return f"/records/{quote(vertex, safe='')}/{quote(key, safe='')}"


def with_query(path: str, fields: Mapping[str, str | int | None]) -> str:
    given = {name: value for name, value in fields.items() if value not in ("", None)}
    return f"{path}?{urlencode(given)}" if given else path


def href_of(place: Mapping[str, str]) -> str:
    """Return where a finding leads to, as `ftlayer.monitor.rules.facts` gives its place."""
    vertex, owner = place["vertex"], place["owner"]
    filters = {"vertex": vertex, "stream": place["stream"], "operator": place["operator"]}
    match place["page"]:
        case Page.JOB:
            return job_href(f"{vertex}:{owner}")
        case Page.CHECKPOINTS:
            return f"{job_href(f'{vertex}:{owner}')}/checkpoints"
        case Page.DEAD:
            return with_query("/dead", filters)
        case Page.RECORDS:
            return with_query("/records", {"state": "pending"} | filters)
        case _:
            return f"/#vertex-{quote(vertex, safe='')}"


@dataclass(frozen=True, slots=True)
class FoundGroups:
    """Groups, the largest first, and why there may be more."""

    groups: list[Facts]
    troubles: list[str]


def dead_groups(
    watch: Watch, *, vertex: str = "", job: str = "", stream: str = "", operator: str = "", mask: bool
) -> FoundGroups:
    """Return the groups that a filter leaves; "" is all. A vertex that gives no answer is said so.

    Raises `ConfigError` for a vertex that there is not.
    """
    names = watch.names()
    if vertex:
        watch.is_up(vertex)  # which says so where there is none
    if job:
        vertex, _, owner = job.partition(":")
        stream = stream or owner
    groups: list[Facts] = []
    troubles = []
    for view in watch.views():
        if not view.has_records or vertex not in ("", view.vertex):
            continue
        if view.is_gone:
            if dead := int(view.stats.get("dead_letters", 0)):
                troubles.append(
                    f"The program of {view.vertex} has ended, and {dead:,} dead letters are in its store, {view.path}: "
                    "start it again, or serve the store with `ftlayer serve`, to look at them and to change them."
                )
            continue
        if not view.is_up:
            troubles.append(f"{view.vertex} gives no answer: {view.failure}")
        if view.indexed < 1:
            troubles.append(f"{view.vertex} counts its dead letters: {view.indexed:.0%} are in the groups.")
        groups += [group_facts(view.vertex, group, names, mask=mask) for group in view.groups]
    streams = set(names.streams(stream)) if stream else set()
    kept = [
        group
        for group in groups
        if operator in ("", group["operator"])
        and (not stream or (group["vertex"], group["stream_id"]) in streams or group["stream_id"] == stream)
    ]
    return FoundGroups(sorted(kept, key=lambda group: -group["count"]), troubles)


KEPT_MS = 600_000
MAX_WORKS = 100
MAX_LETTERS = 2_000_000
"""More keys than that are not kept in memory: say which of them."""


class Wanted(StrEnum):
    REQUEUE = "requeue"
    PURGE = "purge"
    EDIT = "edit"
    EXPORT = "export"


class WorkState(StrEnum):
    COUNTING = "counting"
    COUNTED = "counted"
    CHANGING = "changing"
    DONE = "done"
    FAILED = "failed"


class Work:
    """One work of ``user``: what is to be done with which ``letters``, and how far that is.

    ``editing``: what they become. ``groups`` say what they are, as far as that is known without a look at each.
    ``ready`` is set while nothing is under way.
    """

    def __init__(self, id: str, user: str, action: Wanted, used_ms: int) -> None:
        self.id, self.user, self.action, self.used_ms = id, user, action, used_ms
        self.state = WorkState.COUNTING
        self.failure = ""
        self.count = 0
        self.letters = plans.Letters((), 0, 0)
        self.groups: tuple[plans.LetterGroup, ...] = ()
        self.sent = self.changed = 0
        self.editing: plans.Editing | None = None
        self.ready = threading.Event()


class Works:
    """All works of a console. Any thread may use it."""

    def __init__(self, watch: Watch, clock: Callable[[], Now]) -> None:
        self._watch, self._clock = watch, clock
        self._lock = threading.Lock()
        self._works: dict[str, Work] = {}

    def count(
        self,
        user: str,
        action: Wanted,
        selections: Sequence[plans.Selection],
        function: plans.EditFunction | None = None,
    ) -> Work:
        """Begin to count the letters that are meant, or what ``function`` makes of them.

        Raises `ConfigError` while too many works are kept.
        """
        now = self._clock()
        work = Work(secrets.token_urlsafe(12), user, action, now.mono_ms)
        work.editing = None if function is None else plans.Editing(function)
        with self._lock:
            self._forget(now.mono_ms)
            if len(self._works) >= MAX_WORKS:
                raise ConfigError(
                    f"{MAX_WORKS} plans are kept already; wait until some of them are forgotten"
                )
            self._works[work.id] = work
        count = self._count if function is None else self._edit
        self._run(work, lambda: count(work, selections, now.wall_ms))
        return work

    def get(self, id: str, user: str) -> Work | None:
        """Return a work of this user; None for one that is not known (any more)."""
        now_ms = self._clock().mono_ms
        with self._lock:
            self._forget(now_ms)
            work = self._works.get(id)
            if work is None or work.user != user:
                return None
            work.used_ms = now_ms
            return work

    def carry_out(self, work: Work, by: str) -> None:
        """Begin to change what was counted, once. Raises `ConfigError` for what is not counted, or to be exported."""
        with self._lock:
            if work.state in (WorkState.CHANGING, WorkState.DONE):
                return  # the same button, pressed twice
            if work.state is not WorkState.COUNTED or work.action is Wanted.EXPORT:
                raise ConfigError(f"this plan, to {work.action}, is {work.state}; make another one")
            work.state = WorkState.CHANGING
            work.ready.clear()
        self._run(work, lambda: self._carry_out(work, by))

    def _forget(self, now_ms: int) -> None:
        for id, work in list(self._works.items()):
            if work.ready.is_set() and now_ms - work.used_ms >= KEPT_MS:
                del self._works[id]

    def _run(self, work: Work, steps: Callable[[], None]) -> None:
        def run() -> None:
            try:
                steps()
                self._watch.refresh()
            except FTLayerError as error:
                work.failure = str(error)
                work.state = WorkState.FAILED
            finally:
                work.ready.set()

        threading.Thread(target=run, name=f"ftlayer-console-{work.action}", daemon=True).start()

    def _count(self, work: Work, selections: Sequence[plans.Selection], now_ms: int) -> None:
        names, examined = self._watch.names(), 0
        found: dict[tuple[str, bytes], None] = {}  # selections may overlap
        groups: list[plans.LetterGroup] = []
        for selection in selections:
            calls = plans.first_pages(selection, names, now_ms)
            scopes = [plans.PlanScope(selection.vertex, call) for call in calls]
            counting = plans.Counting(scopes, selection.where, names, now_ms)
            while (step := counting.next_call()) is not None:
                vertex, call = step
                counting.take(self._watch.client(vertex).call(call))
                work.count = len(found) + counting.found
                if work.count > MAX_LETTERS:
                    raise ConfigError(f"these are more than {MAX_LETTERS:,} letters; choose some of them")
            before = len(found)
            found |= dict.fromkeys(counting.letters.keys)
            examined += counting.letters.examined
            groups += self._groups_of(selection, counting, len(found) - before, now_ms)
        work.count, work.groups = len(found), tuple(groups)
        work.letters = plans.Letters(tuple(found), examined, now_ms)
        work.state = WorkState.COUNTED

    def _edit(self, work: Work, selections: Sequence[plans.Selection], now_ms: int) -> None:
        names, editing = self._watch.names(), work.editing
        assert editing is not None
        for selection in selections:
            search = plans.Search(selection, names, now_ms)
            while (call := search.next_call()) is not None:
                letters = search.take(self._watch.client(selection.vertex).call(call))
                editing.take(self._watch.view(selection.vertex), letters)
                work.count = len(editing.found)
        work.count, work.groups = len(editing.payloads), tuple(editing.groups)
        work.letters = plans.Letters(tuple(editing.payloads), len(editing.found), now_ms)
        work.state = WorkState.COUNTED

    def _groups_of(
        self, selection: plans.Selection, counting: plans.Counting, count: int, now_ms: int
    ) -> Sequence[plans.LetterGroup]:
        """Return what was counted by group; nothing where the groups are of another moment than the count."""
        groups = counting.groups
        if groups is None:
            known = {view.vertex: view.groups for view in self._watch.views()}
            whole = plans.whole_groups(selection, self._watch.names(), now_ms, known[selection.vertex]) or []
            groups = [replace(whole[0], count=count)] if len(whole) == 1 else whole
        return groups if sum(group.count for group in groups) == count else ()

    def _carry_out(self, work: Work, by: str) -> None:
        payloads = None if work.editing is None else work.editing.payloads
        carrying = plans.Carrying(plans.Change(work.action), work.letters, by, payloads)
        while (step := carrying.next_call()) is not None:
            vertex, call = step
            carrying.take(self._watch.client(vertex).call(call))
            work.sent, work.changed = carrying.asked, carrying.changed
        work.state = WorkState.DONE
