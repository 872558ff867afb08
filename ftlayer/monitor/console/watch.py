"""What a console knows of vertices and jobs, asked once for all who look.

A thread asks every second while somebody looks, and every ten seconds otherwise, so that the last state of what is gone
is known. Pages are made of what is known: none waits for a vertex that does not answer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.exposition import choose_encoder
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ftlayer import __version__
from ftlayer.common.clock import Now
from ftlayer.common.rules.histogram import Histogram
from ftlayer.errors import FTLayerError, UnknownJobError, VertexUnavailableError
from ftlayer.monitor.console.guard import API, EVENTS, METRICS, STATIC
from ftlayer.monitor.console.options import Sessions
from ftlayer.monitor.gather import Client, Gatherer
from ftlayer.monitor.rules.names import JobNames, VertexView
from ftlayer.vertex.calls import AnnouncedJob, GetHour, Hour
from ftlayer.vertex.metrics.catalogue import (
    Families,
    Merge,
    Metric,
    MetricKind,
    add_build,
    add_jobs,
    is_shown,
)
from ftlayer.vertex.service.metrics import prometheus_metrics

logger = logging.getLogger(__name__)


LOOKED_AT_MS = 1_000
OTHERWISE_MS = 10_000
STILL_LOOKS_MS = 5_000
"""Somebody who asked for a page or its news looks for so long."""

_FRESH_MS = 800
_MAX_KEPT = 500
_LOOK_EVERY_S = 0.2

Value = TypeVar("Value")


class Watch:
    """Looks at vertices for all requests. Any thread may use it."""

    def __init__(self, gatherer: Gatherer, clock: Callable[[], Now]) -> None:
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
        self.refresh()
        self._thread = threading.Thread(target=self._run, name="ftlayer-console-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._gatherer.close()

    def silent_ms(self) -> int:
        return self._clock().mono_ms - self._turned_ms

    def views(self) -> tuple[VertexView, ...]:
        self._looked_ms = self._clock().mono_ms
        return self._gatherer.views()

    def known(self) -> tuple[VertexView, ...]:
        """Return what is known, for one who does not look: a scraper."""
        return self._gatherer.views()

    def names(self) -> JobNames:
        return self._gatherer.names()

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

    def view(self, vertex: str) -> VertexView:
        """Return what was heard last of a vertex. Raises `ConfigError` for a name that none has."""
        self.client(vertex)
        return next(view for view in self.views() if view.vertex == vertex)

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

        if not self.is_up(vertex):
            raise VertexUnavailableError(f"{vertex} gives no answer")
        return self._fresh(("hour", vertex, owner), lambda: self.client(vertex).call(GetHour(owner)))

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
            if now - self._asked_ms < every_ms:
                continue
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
    job = replace(newer, plan=older.plan, slots=older.slots, batches=older.batches)
    job = replace(job, checkpoints=older.checkpoints, histograms=older.histograms)
    return replace(listed, job=job, incidents=looked_at.incidents, orders=looked_at.orders)


# What a console tells Prometheus: of itself, of how old what it shows is, and of jobs that no vertex tells of. It asks
# the boards in their drivers anyway, so one scrape of the console has all such jobs.

REQUESTS = Metric(
    "ftlayer_console_requests",
    MetricKind.COUNTER,
    "Requests that the console has answered, by kind (page, api, events, static, metrics) and status code.",
)
REQUEST_SECONDS = Metric(
    "ftlayer_console_request_seconds",
    MetricKind.HISTOGRAM,
    "From a request to the end of its answer; without streams of news, which last as long as their page is open.",
)
SESSIONS = Metric("ftlayer_console_sessions", MetricKind.GAUGE, "Sessions of people who are logged in, now.")
OPEN_PAGES = Metric("ftlayer_console_open_pages", MetricKind.GAUGE, "Pages that are kept current, now.")
VERTEX_UP = Metric(
    "ftlayer_console_vertex_up",
    MetricKind.GAUGE,
    "1 for a vertex or board that has answered when it was asked last, 0 otherwise; of one that has ended, nothing.",
    Merge.LARGEST,
)
SHOWN_AGE = Metric(
    "ftlayer_console_shown_age_seconds",
    MetricKind.GAUGE,
    "How old what the console shows of a vertex or board is.",
    Merge.LARGEST,
)


class Traffic:
    """Counts requests. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds: dict[str, Histogram] = {}
        self._open_pages = 0

    def opened(self, pages: int) -> None:
        """Note that so many pages more are kept current."""
        with self._lock:
            self._open_pages += pages

    def answered(self, kind: str, status: int, seconds: float) -> None:
        with self._lock:
            self._requests[kind, status] += 1
            if kind != "events":
                self._seconds.setdefault(kind, Histogram()).observe(seconds)

    def add_to(self, families: Families) -> None:
        with self._lock:
            for (kind, status), count in sorted(self._requests.items()):
                families.add(REQUESTS, count, {"kind": kind, "code": str(status)})
            for kind, histogram in sorted(self._seconds.items()):
                families.observe(REQUEST_SECONDS, histogram, {"kind": kind})
            families.add(OPEN_PAGES, self._open_pages, {})


class Counted:
    """An ASGI layer that counts what the application behind it answers."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self._app, self._traffic = app, traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, began, status = scope["path"], time.perf_counter(), 500
        kind = "api" if path.startswith(API) else "static" if path.startswith(STATIC) else "page"
        kind = {EVENTS: "events", METRICS: "metrics"}.get(path, kind)

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        is_news = kind == "events"
        self._traffic.opened(is_news)
        try:
            await self._app(scope, receive, noted)
        finally:
            self._traffic.opened(-is_news)
            self._traffic.answered(kind, status, time.perf_counter() - began)


def console_families(traffic: Traffic, sessions: Sessions, watch: Watch, now_ms: int) -> Families:
    families = Families()
    add_build(families, __version__)
    traffic.add_to(families)
    families.add(SESSIONS, sessions.count(), {})
    for view in watch.known():
        if view.is_gone:
            continue
        families.add(VERTEX_UP, float(view.is_up), {"vertex": view.vertex})
        if view.as_of_ms:
            families.add(SHOWN_AGE, max(now_ms - view.as_of_ms, 0) / 1_000, {"vertex": view.vertex})
    add_jobs(families, _jobs_of_boards(watch))
    return families


def _jobs_of_boards(watch: Watch) -> Iterator[AnnouncedJob]:
    for view in watch.known():
        for listed in view.jobs if view.is_up and not view.has_records else ():
            if is_shown(listed):
                # It may have ended since the board was asked: `VERTEX_UP` tells of that.
                with contextlib.suppress(UnknownJobError, VertexUnavailableError):
                    yield watch.job(view.vertex, listed.job.owner)


def exposition(families: Families, accept: str) -> tuple[bytes, str]:
    """Return families, and this process's own, as a scraper wants them, and the type of that."""
    registry = CollectorRegistry()
    registry.register(_Collected(families))
    ProcessCollector(registry=registry)
    encoder, media_type = choose_encoder(accept)
    return encoder(registry), media_type


class _Collected:
    def __init__(self, families: Families) -> None:
        self._families = families

    def describe(self) -> list[PrometheusMetric]:
        return []

    def collect(self) -> Iterator[PrometheusMetric]:
        return prometheus_metrics(self._families)
