"""Names that people gave: what jobs and their streams are called where they are shown, and found by.

A topology is its name. A wrapped query has a drawn name, which begins those of its streams; people gave it another.
Where two jobs of a vertex have one name, the time they began at stands beside it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from ftlayer.common.checks import shown
from ftlayer.common.printable import shown_url
from ftlayer.common.rules.circuit import CircuitStatus
from ftlayer.errors import ConfigError
from ftlayer.vertex.calls.jobs import AnnouncedJob
from ftlayer.vertex.calls.records import DeadGroup, StreamDetails
from ftlayer.vertex.rules.streams import INGEST, owner_of


@dataclass(frozen=True, slots=True)
class VertexView:
    """A vertex, or a board that a driver serves for itself, at its last answer. Times are Unix ms of this machine.

    Attributes:
        vertex: its short name, unique among those that are looked at.
        path: the directory of its store, "" where that is not known.
        is_up: whether it has answered when it was asked last, at ``asked_ms``.
        as_of_ms: when it gave what stands here, 0 if it never did.
        is_gone: its driver has ended, and it with it: there is nothing to ask any more, and nothing wrong.
        is_killed: its driver was killed, and it with it.
        is_stored: it is a directory with what drivers have said last, and ``address`` the directory.
        left: as `VertexSource.left`: nothing of it runs, and the command that has opened its store is what answers.
        is_unreadable: its program runs another version of ftlayer, whose replies cannot be read.
        failure: why it gave no answer, "" while it is up.
        has_records: False for a driver's own board, which keeps no records.
        stats: counters and gauges by name, as `ftlayer.vertex.calls.StatsReply` has them.
        circuits: circuit breakers by name, by topology or query.
        indexed: share of the dead letters that ``groups`` counts.
        died_lately: how many records died in the last 5 minutes; None where that is not known, as behind a restart.
    """

    vertex: str
    address: str
    path: str = ""
    is_up: bool = False
    asked_ms: int = 0
    as_of_ms: int = 0
    is_gone: bool = False
    is_killed: bool = False
    is_stored: bool = False
    left: str = ""
    is_unreadable: bool = False
    failure: str = ""
    has_records: bool = True
    stats: dict[str, float] = field(default_factory=dict)
    circuits: dict[str, dict[str, CircuitStatus]] = field(default_factory=dict)
    jobs: tuple[AnnouncedJob, ...] = ()
    streams: tuple[StreamDetails, ...] = ()
    groups: tuple[DeadGroup, ...] = ()
    indexed: float = 1.0
    died_lately: int | None = None

    def heard_ago_ms(self, announced: AnnouncedJob) -> int:
        """Return how long ago a job of it was heard, by when the vertex was asked last."""
        return announced.heard_ago_ms + (max(self.asked_ms - self.as_of_ms, 0) if self.as_of_ms else 0)

    @property
    def place(self) -> str:
        """What it is called, and where its store is, or its address."""
        return f"{self.vertex} ({self.path or shown_url(self.address)})"

    @property
    def silence(self) -> str:
        """Why it has never answered, in a sentence."""
        if self.is_unreadable:
            return f"vertex {self.place if self.path else self.vertex} is left aside: {self.failure}"
        return f"vertex {self.vertex} gives no answer: {self.failure}"

    @property
    def state(self) -> str:
        """How it is in a word: ``up``, ``no answer``, ``gone``, ``killed``; ``stored`` for a directory."""
        if self.left or self.is_gone or self.is_killed:
            return self.left or ("gone" if self.is_gone else "killed")
        return ("stored" if self.is_stored else "up") if self.is_up else "no answer"


def marked(name: str, identity: str) -> str:
    """Return the name of a source with a few characters behind it that tell it from others of that name."""
    return f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:4]}"


def spoken(milliseconds: int) -> str:
    """Return a duration as people say it: ``12 s``, ``5 min``, ``3 h 20 min``, ``2 days``."""
    seconds = max(milliseconds, 0) // 1_000
    if 0 < milliseconds < 1_000:
        return f"{milliseconds} ms"
    if seconds < 120:
        return f"{seconds} s"
    minutes = seconds // 60
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{hours // 24} days"


def enumerated(names: Sequence[str]) -> str:
    """Return names as a sentence has them: ``a, b and c``. One at least."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def state_of(view: VertexView, announced: AnnouncedJob) -> str:
    """Return a job's state in a word: what its driver said last, or why that need not be so any more.

    These are ``gone`` (its program has ended without a last word), ``killed`` (so was its driver), ``silent`` (its
    driver is not heard) and ``no answer`` (its vertex gives none).
    """
    if announced.job.final:
        return announced.job.state
    if view.left or view.is_gone or view.is_killed:
        return view.state
    if announced.is_silent:
        return "gone" if announced.is_gone else "silent"
    return announced.job.state if view.is_up else view.state


def pace_of(view: VertexView, announced: AnnouncedJob) -> float | None:
    """Return how many records a second a job takes in; None where it has ended, or is not heard any more."""
    job = announced.job
    is_heard = not job.final and state_of(view, announced) == job.state
    return job.rates.get("records_in") if is_heard else None


_DRAWN_CHARS = 8
"""So much of a drawn name tells two jobs apart whose name and beginning are the same."""


@dataclass(frozen=True, slots=True)
class JobKey:
    """A job, or what had been one: ``owner`` is what its streams begin with, on ``vertex``."""

    vertex: str
    owner: str


class JobNames:
    def __init__(self, views: Iterable[VertexView]) -> None:
        self._titles: dict[JobKey, str] = {}
        self._since_ms: dict[JobKey, int] = {}
        self._alive: set[JobKey] = set()
        self._streams: dict[JobKey, list[str]] = {}
        self._views = {view.vertex: view for view in views}
        for view in self._views.values():
            for stream in view.streams:
                key = JobKey(view.vertex, stream.owner)
                self._titles[key] = stream.title or stream.owner
                self._streams.setdefault(key, []).append(stream.stream)
            for announced in view.jobs:
                job, key = announced.job, JobKey(view.vertex, announced.job.owner)
                self._titles[key] = job.name or job.owner
                self._since_ms[key] = job.since_ms
                if not job.final and not announced.is_silent:
                    self._alive.add(key)
        self._labels = self._made_labels()

    def _made_labels(self) -> dict[JobKey, str]:
        alike = Counter((key.vertex, title) for key, title in self._titles.items())
        labels = {}
        for key, title in self._titles.items():
            labels[key] = title
            if alike[key.vertex, title] > 1:
                mark = key.owner[:_DRAWN_CHARS]
                if since_ms := self._since_ms.get(key, 0):
                    mark = datetime.fromtimestamp(since_ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
                labels[key] = f"{title} ({mark})"
        again = Counter((key.vertex, label) for key, label in labels.items())
        return {
            key: label if again[key.vertex, label] == 1 else f"{label} {key.owner[:_DRAWN_CHARS]}"
            for key, label in labels.items()
        }

    def place(self, vertex: str) -> str:
        return self._views[vertex].place if vertex in self._views else vertex

    def label(self, vertex: str, owner: str) -> str:
        return self._labels.get(JobKey(vertex, owner), owner)

    def stream(self, vertex: str, stream: str) -> str:
        if stream.startswith(INGEST):
            return stream
        owner = owner_of(stream)
        return self.label(vertex, owner) + stream.removeprefix(owner)

    def find(self, text: str) -> JobKey:
        """Return the job that people mean by ``text``: its name, ``<vertex>:<name>``, or its drawn name.

        Of several of one name the one that is alive is meant. Raises `ConfigError` where there is none, or several.
        """
        known = set(self._since_ms)
        found = [key for key in known if text in self._called(key)]
        if len(found) > 1:
            found = [key for key in found if key in self._alive] or found
        if len(found) == 1:
            return found[0]
        there = ", ".join(sorted(self._full_label(key, known) for key in (found or known))) or "none"
        if not found:
            raise ConfigError(
                f"no job is called {shown(text)}; there are: {there} (one that was killed is found from the directory "
                "that it was started in)"
            )
        places = ", ".join(sorted({self.place(key.vertex) for key in found}))
        raise ConfigError(
            f"{len(found)} jobs are called {shown(text)}: say which of {there}; they are in {places}"
        )

    def streams(self, text: str) -> tuple[tuple[str, str], ...]:
        """Return (vertex, stream) of all that ``text`` may mean: a stream, or all of a job, by any of their names."""
        found = []
        for key, streams in self._streams.items():
            called = self._called(key)
            for stream in streams:
                source = stream.removeprefix(key.owner)
                if text in called or text == stream or text in {name + source for name in called}:
                    found.append((key.vertex, stream))
        return tuple(sorted(found))

    def _called(self, key: JobKey) -> set[str]:
        names, view = {self._titles[key], self._labels[key], key.owner}, self._views[key.vertex]
        # A vertex is found by its marked name too once no other has its plain one.
        vertices = (key.vertex, marked(key.vertex, view.path or view.address))
        return names | {f"{vertex}:{name}" for vertex in vertices for name in names}

    def _full_label(self, key: JobKey, among: set[JobKey]) -> str:
        label = self._labels[key]
        elsewhere = any(other.vertex != key.vertex and self._labels[other] == label for other in among)
        return f"{key.vertex}:{label}" if elsewhere else label
