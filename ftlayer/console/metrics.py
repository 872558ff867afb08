"""What a console tells Prometheus: of itself, of how old what it shows is, and of jobs that no vertex tells of.

A topology without a vertex has a board in its driver, whose metrics end with the program unless its `metrics_port` is
set. A console asks that board anyway, so one scrape of the console has all such jobs.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.exposition import choose_encoder
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ftlayer import __version__
from ftlayer.console.guard import API, EVENTS, METRICS, STATIC
from ftlayer.console.login import Sessions
from ftlayer.console.watch import Watch
from ftlayer.errors import UnknownJobError, VertexUnavailableError
from ftlayer.histogram import Histogram
from ftlayer.vertex.calls import AnnouncedJob
from ftlayer.vertex.metrics.families import Families, Merge, Metric, MetricKind
from ftlayer.vertex.metrics.of_jobs import add_jobs, is_shown
from ftlayer.vertex.metrics.of_vertex import add_build
from ftlayer.vertex.service.metrics import prometheus_metrics

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
        """Note that so many pages more are kept current; -1 for one that was left."""
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
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, kind, status = time.perf_counter(), _kind(scope["path"]), 500

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


def _kind(path: str) -> str:
    for start, kind in ((API, "api"), (STATIC, "static")):
        if path.startswith(start):
            return kind
    return {EVENTS: "events", METRICS: "metrics"}.get(path, "page")


def console_families(traffic: Traffic, sessions: Sessions, watch: Watch, now_ms: int) -> Families:
    """Return the values of now; asks boards, but no vertex."""
    families = Families()
    add_build(families, __version__)
    traffic.add_to(families)
    families.add(SESSIONS, sessions.count(), {})
    for view in watch.known():
        if not view.is_gone:
            families.add(VERTEX_UP, float(view.is_up), {"vertex": view.vertex})
        if not view.is_gone and view.as_of_ms:
            age_ms = max(now_ms - view.as_of_ms, 0)
            families.add(SHOWN_AGE, age_ms / 1_000, {"vertex": view.vertex})
    add_jobs(families, _jobs_of_boards(watch))
    return families


def _jobs_of_boards(watch: Watch) -> Iterator[AnnouncedJob]:
    for view in watch.known():
        if view.has_records or not view.is_up:
            continue
        for listed in view.jobs:
            if not is_shown(listed):
                continue
            try:
                yield watch.job(view.vertex, listed.job.owner)
            except (UnknownJobError, VertexUnavailableError):
                continue  # it has ended since the board was asked: `VERTEX_UP` tells of that


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
