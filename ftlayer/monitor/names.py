"""Names that people gave: what jobs and their streams are called where they are shown, and found by.

A topology is its name. A wrapped query has a drawn name, which begins those of its streams; people gave it another.
Where two jobs of a vertex have one name, the time they began at stands beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from ftlayer.checks import shown
from ftlayer.errors import ConfigError
from ftlayer.monitor.views import VertexView
from ftlayer.vertex.rules.owners import INGEST, owner_of

_DRAWN_CHARS = 8
"""So much of a drawn name tells two jobs apart whose name and beginning are the same."""


@dataclass(frozen=True, slots=True)
class JobKey:
    """A job, or what had been one: ``owner`` is what its streams begin with, on ``vertex``."""

    vertex: str
    owner: str


class JobNames:
    """What the jobs and streams of some vertices are called."""

    def __init__(self, views: Iterable[VertexView]) -> None:
        self._titles: dict[JobKey, str] = {}
        self._since_ms: dict[JobKey, int] = {}
        self._alive: set[JobKey] = set()
        self._streams: dict[JobKey, list[str]] = {}
        for view in views:
            self._add(view)
        self._labels = self._made_labels()

    def _add(self, view: VertexView) -> None:
        for stream in view.streams:
            key = JobKey(view.vertex, stream.owner)
            self._titles[key] = stream.title or stream.owner
            self._streams.setdefault(key, []).append(stream.stream)
        for announced in view.jobs:
            job = announced.job
            key = JobKey(view.vertex, job.owner)
            self._titles[key] = job.name or job.owner
            self._since_ms[key] = job.since_ms
            if not job.final and not announced.is_silent:
                self._alive.add(key)

    def _made_labels(self) -> dict[JobKey, str]:
        alike = Counter((key.vertex, title) for key, title in self._titles.items())
        labels = {}
        for key, title in self._titles.items():
            since_ms = self._since_ms.get(key, 0)
            if alike[key.vertex, title] == 1:
                labels[key] = title
            elif since_ms:
                labels[key] = f"{title} ({_time(since_ms)})"
            else:
                labels[key] = f"{title} ({key.owner[:_DRAWN_CHARS]})"
        again = Counter((key.vertex, label) for key, label in labels.items())
        return {
            key: label if again[key.vertex, label] == 1 else f"{label} {key.owner[:_DRAWN_CHARS]}"
            for key, label in labels.items()
        }

    def label(self, vertex: str, owner: str) -> str:
        """Return what a job is called; its owner's name where nothing else is known."""
        return self._labels.get(JobKey(vertex, owner), owner)

    def stream(self, vertex: str, stream: str) -> str:
        """Return a stream as ``<what its job is called>/<source>``; an ingest as it is."""
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
            raise ConfigError(f"no job is called {shown(text)}; there are: {there}")
        raise ConfigError(f"{len(found)} jobs are called {shown(text)}: say which of {there}")

    def streams(self, text: str) -> tuple[tuple[str, str], ...]:
        """Return (vertex, stream) of all that ``text`` may mean: a stream, or all of a job, by any of their names."""
        return tuple(sorted(self._streams_called(text)))

    def _streams_called(self, text: str) -> Iterator[tuple[str, str]]:
        for key, streams in self._streams.items():
            called = self._called(key)
            for stream in streams:
                source = stream.removeprefix(key.owner)
                if text in called or text == stream or text in {name + source for name in called}:
                    yield key.vertex, stream

    def _called(self, key: JobKey) -> set[str]:
        names = {self._titles[key], self._labels[key], key.owner}
        return names | {f"{key.vertex}:{name}" for name in names}

    def _full_label(self, key: JobKey, among: set[JobKey]) -> str:
        label = self._labels[key]
        elsewhere = any(other.vertex != key.vertex and self._labels[other] == label for other in among)
        return f"{key.vertex}:{label}" if elsewhere else label


def _time(wall_ms: int) -> str:
    return datetime.fromtimestamp(wall_ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
