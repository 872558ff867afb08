"""What a console knows of vertices and jobs, asked once for all who look.

A thread asks every second while somebody looks, and every ten seconds otherwise, so that the last state of what is gone
is known. Pages are made of what is known: none waits for a vertex that does not answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TypeVar

from ftlayer.clock import Now
from ftlayer.errors import FTLayerError, VertexUnavailableError
from ftlayer.monitor.gather import Client, Gatherer
from ftlayer.monitor.names import JobNames
from ftlayer.monitor.views import VertexView
from ftlayer.vertex.calls import AnnouncedJob, GetHour, Hour

LOOKED_AT_MS = 1_000
OTHERWISE_MS = 10_000
STILL_LOOKS_MS = 5_000
"""Somebody who asked for a page or its news looks for so long."""

_FRESH_MS = 800
_MAX_KEPT = 500
_LOOK_EVERY_S = 0.2

Value = TypeVar("Value")
logger = logging.getLogger(__name__)


class Watch:
    """Looks at vertices for all requests. Any thread may use it."""

    def __init__(self, gatherer: Gatherer, clock: Callable[[], Now]) -> None:
        """Look by ``gatherer``; asks nothing before `start` or `refresh`."""
        self._gatherer = gatherer
        self._clock = clock
        self._looked_ms = -STILL_LOOKS_MS
        self._asked_ms = -OTHERWISE_MS
        self._turned_ms = clock().mono_ms
        self._asking = threading.Lock()
        self._kept: dict[Hashable, tuple[int, object]] = {}
        self._last: dict[tuple[str, str], AnnouncedJob] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Ask once, and go on asking until `close`."""
        self.refresh()
        self._thread = threading.Thread(target=self._run, name="ftlayer-console-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop asking, and give the connections up."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._gatherer.close()

    def silent_ms(self) -> int:
        """Return for how long the thread that asks has not come round."""
        return self._clock().mono_ms - self._turned_ms

    def views(self) -> tuple[VertexView, ...]:
        self._looked_ms = self._clock().mono_ms
        return self._gatherer.views()

    def known(self) -> tuple[VertexView, ...]:
        """Return what is known, for one who does not look: a scraper."""
        return self._gatherer.views()

    def names(self) -> JobNames:
        """Return what jobs and streams are called."""
        return JobNames(self._gatherer.views())

    def refresh(self) -> None:
        """Ask all now, so that what was changed a moment ago is seen."""
        with self._asking:
            self._asked_ms = self._clock().mono_ms
            self._kept.clear()
            self._gatherer.gather()

    def client(self, vertex: str) -> Client:
        """Return the connection to a vertex.

        Raises `ConfigError` for a name that none has, and `VertexUnavailableError` at once for one that gave no answer
        when it was asked last, a moment ago: no page waits for it again.
        """
        client = self._gatherer.client(vertex)
        for view in self.views():
            if view.vertex == vertex and view.asked_ms and not view.is_up:
                raise VertexUnavailableError(f"{vertex} gives no answer: {view.failure}")
        return client

    def job(self, vertex: str, owner: str) -> AnnouncedJob:
        """Return all that is known of a job; while its vertex gives no answer, what was known last.

        Raises `ConfigError`, `UnknownJobError`, and `VertexUnavailableError` where nothing was known.
        """
        key = vertex, owner
        try:
            if not self.is_up(vertex):
                return self._last_of(vertex, owner)
            job = self._fresh(("job", vertex, owner), lambda: self._gatherer.job(vertex, owner))
        except VertexUnavailableError:
            return self._last_of(vertex, owner)
        if len(self._last) >= _MAX_KEPT and key not in self._last:
            self._last.clear()
        self._last[key] = job
        return job

    def is_up(self, vertex: str) -> bool:
        """Whether a vertex has answered when it was asked last. `ConfigError` for a name that none has."""
        self._gatherer.client(vertex)  # which says so where there is none
        return any(view.is_up for view in self._gatherer.views() if view.vertex == vertex)

    def _last_of(self, vertex: str, owner: str) -> AnnouncedJob:
        """Return what was seen of a job last: what lists have, and of one that was looked at its parts."""
        last = self._last.get((vertex, owner))
        views = (view for view in self._gatherer.views() if view.vertex == vertex)
        listed = next((job for view in views for job in view.jobs if job.job.owner == owner), last)
        if listed is None:
            raise VertexUnavailableError(f"{vertex} gives no answer, and nothing was known of {owner}")
        return listed if last is None else _with_parts(listed, last)

    def hour(self, vertex: str, owner: str = "") -> Hour:
        """Return the last hour of a job, or with ``owner`` "" of a vertex. Raises as `job`."""

        def ask() -> Hour:
            hour = self.client(vertex).call(GetHour(owner))
            assert isinstance(hour, Hour)
            return hour

        if not self.is_up(vertex):
            raise VertexUnavailableError(f"{vertex} gives no answer")
        return self._fresh(("hour", vertex, owner), ask)

    def _fresh(self, key: Hashable, ask: Callable[[], Value]) -> Value:
        """Return an answer that is hardly older than a moment: tabs that show the same ask once."""
        now = self._clock().mono_ms
        at, kept = self._kept.get(key, (now - _FRESH_MS, None))
        if now - at < _FRESH_MS:
            return kept  # type: ignore[return-value]
        value = ask()
        if len(self._kept) >= _MAX_KEPT:
            self._kept.clear()
        self._kept[key] = now, value
        return value

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_S):
            now = self._turned_ms = self._clock().mono_ms
            every_ms = LOOKED_AT_MS if now - self._looked_ms < STILL_LOOKS_MS else OTHERWISE_MS
            if now - self._asked_ms >= every_ms:
                self._ask()

    def _ask(self) -> None:
        try:
            self.refresh()
        except FTLayerError as error:
            # What a vertex does not answer is in its view; this is a fault of the console's own.
            logger.warning("the vertices could not be asked: %s", error)


def _with_parts(listed: AnnouncedJob, looked_at: AnnouncedJob) -> AnnouncedJob:
    """Return the later one of a job's last two words, with what lists leave out and does not pass with the moment."""
    newer, older = listed.job, looked_at.job
    if newer.run != older.run:
        return listed
    if newer.at_ms <= older.at_ms:
        return looked_at
    job = replace(
        newer,
        plan=older.plan,
        slots=older.slots,
        batches=older.batches,
        checkpoints=older.checkpoints,
        histograms=older.histograms,
    )
    return replace(listed, job=job, incidents=looked_at.incidents, orders=looked_at.orders)
