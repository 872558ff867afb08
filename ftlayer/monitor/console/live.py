"""Pages whose parts change: rendered once as a page, and then part by part as news (server-sent events)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlencode, urlsplit

from fastapi import Request
from fastapi.responses import HTMLResponse, StreamingResponse
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from ftlayer.errors import (
    ConfigError,
    FTLayerError,
    UnknownJobError,
    UnsupportedError,
    VertexUnavailableError,
)
from ftlayer.monitor.console import formats
from ftlayer.monitor.console.asking import checked_caller
from ftlayer.monitor.console.guard import EVENTS, Caller, session_key
from ftlayer.monitor.console.rendering import console_of, page, render
from ftlayer.monitor.console.searching import Console
from ftlayer.monitor.console.watch import Watch
from ftlayer.monitor.rules.facts import iso
from ftlayer.vertex.calls.jobs import Hour

FEWEST_POINTS = 6
"""Of what began a moment ago so many points are shown."""


@dataclass(frozen=True, slots=True)
class Series:
    """A series of `Hour`, what it is called, and how its values are written."""

    key: str
    name: str
    written: Callable[[float | None], str]


@dataclass(frozen=True, slots=True)
class Shown:
    """A chart: its values, and in words the last and the largest of them."""

    name: str
    values: Sequence[float]
    now: str
    largest: str
    label: str
    begin: str
    end: str


SERIES = (
    Series("in_per_second", "Records in", formats.rate),
    Series("out_per_second", "Records out", formats.rate),
    Series("done_per_second", "Done", formats.rate),
    Series("failed_per_second", "Failed attempts", formats.rate),
    Series("pending", "Pending", formats.short),
    Series("waiting", "Waiting", formats.short),
    Series("dead", "Dead letters", formats.short),
    Series("oldest_seconds", "Oldest record", formats.seconds),
    Series("used_share", "Store used", formats.share),
    Series("busy", "Busiest subtask", formats.share),
    Series("back_pressured", "Most back-pressured", formats.share),
    Series("watermark_lag_seconds", "Watermark lag", formats.seconds),
    Series("queued_bytes", "Queued", formats.size),
    Series("checkpoint_seconds", "Checkpoint", formats.seconds),
    Series("batch_seconds", "Batch", formats.seconds),
)
"""Those of vertices and of jobs, in the order in which they are shown; each has some of them."""


def known_hour(watch: Watch, vertex: str, owner: str) -> Hour | None:
    """Return an hour; None where there is none: a vertex does not answer, keeps none, or does not know the job."""
    try:
        return watch.hour(vertex, owner)
    except (UnknownJobError, UnsupportedError, VertexUnavailableError):
        return None


RANGES = {"5m": ("5 minutes", 300_000), "15m": ("15 minutes", 900_000), "1h": ("hour", 3_600_000)}
"""How much of an hour is shown: what a page's ``range`` says, its name, and how long it is. More is not kept."""


@dataclass(frozen=True, slots=True)
class Hours:
    """Charts by what they are of, in the ``chosen`` one of `RANGES`."""

    chosen: str
    charts: list[tuple[str, list[Shown]]]
    ranges: ClassVar = RANGES


def shown_hours(visit: Visit, wanted: Iterable[tuple[str, str, str]]) -> Hours:
    """Return the charts, by their title, of jobs, or with the owner "" of vertices. Raises `ConfigError`."""
    chosen = visit.query.get("range", "1h")
    if chosen not in RANGES:
        raise ConfigError(f"range: expected one of {', '.join(RANGES)}, got {chosen!r}")
    watch, range_ms = visit.console.watch, RANGES[chosen][1]
    return Hours(chosen, [(title, _shown(watch, vertex, owner, range_ms)) for title, vertex, owner in wanted])


def _shown(watch: Watch, vertex: str, owner: str, range_ms: int) -> list[Shown]:
    """Return the charts that there are values for: none while a vertex does not answer, which its health says."""
    hour = known_hour(watch, vertex, owner)
    if hour is None:
        return []
    found = []
    shown = min(_points(hour), max(range_ms // hour.step_ms, 1))
    begin, end = iso(hour.end_ms - shown * hour.step_ms) or "", iso(hour.end_ms) or ""
    for each in SERIES:
        values = hour.series.get(each.key, ())[-shown:]
        known = [value for value in values if math.isfinite(value)]
        if known:
            last = values[-1] if math.isfinite(values[-1]) else None
            now, largest = each.written(last), each.written(max(known))
            since = formats.seconds(shown * hour.step_ms / 1_000)
            label = f"{each.name} in the last {since}: now {now}, at most {largest}"
            found.append(Shown(each.name, values, now, largest, label, begin, end))
    return found


def _points(hour: Hour) -> int:
    """Return how many points are shown: an hour's, or, of what began lately, those since then."""
    series = list(hour.series.values())
    first = (next((i for i, value in enumerate(each) if math.isfinite(value)), len(each)) for each in series)
    return max([*(len(each) - start for each, start in zip(series, first, strict=True)), FEWEST_POINTS])


NEWS_EVERY_S = 1.0
MAX_STREAMS = 100

Context = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Visit:
    """Somebody who looks at a page: ``params`` are those of its path, ``query`` of its query string."""

    console: Console
    caller: Caller
    params: Mapping[str, str]
    query: QueryParams

    @property
    def mask(self) -> bool:
        return self.console.options.mask_payloads


class LivePage:
    """A page made of parts, each a template ``parts/<name>.html`` in an element with the id ``part-<name>``."""

    def __init__(
        self,
        route: str,
        template: str,
        parts: tuple[str, ...],
        context: Callable[[Visit], Context],
        here: str,
    ) -> None:
        self._pattern, _, _ = compile_path(route)
        self._template, self._parts, self._context, self._here = template, parts, context, here

    def respond(self, request: Request) -> HTMLResponse:
        visit = _visit(request, request.path_params, request.query_params)
        context = self._context(visit)
        where = f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path

        def part(name: str) -> Markup:
            return Markup('<div id="part-{0}" data-part>{1}</div>').format(name, _part(visit, name, context))

        events = f"{EVENTS}?{urlencode({'page': where})}"
        return page(request, self._template, here=self._here, events=events, part=part, **context)

    def match(self, path: str) -> Mapping[str, str] | None:
        found = self._pattern.match(path)
        return None if found is None else found.groupdict()

    def render(self, visit: Visit) -> dict[str, Markup]:
        context = self._context(visit)
        return {f"part-{name}": _part(visit, name, context) for name in self._parts}


def _visit(request: Request, params: Mapping[str, str], query: QueryParams) -> Visit:
    return Visit(console_of(request), checked_caller(request), params, query)


def _part(visit: Visit, name: str, context: Context) -> Markup:
    shared = {"masked": visit.mask, "functions": visit.console.options.edit_with}
    return Markup(render(visit.caller, f"parts/{name}.html", **shared, **context))


def events(request: Request, pages: tuple[LivePage, ...], streams: set[object]) -> StreamingResponse:
    where = urlsplit(request.query_params.get("page", ""))
    for live in pages:
        params = live.match(where.path)
        if params is not None:
            break
    else:
        raise HTTPException(404)
    if len(streams) >= MAX_STREAMS:
        raise HTTPException(503, f"{MAX_STREAMS} pages are open already; close one")
    visit = _visit(request, params, QueryParams(where.query))
    console, session = visit.console, visit.caller.session
    key = session_key(request.headers, console.cookie)

    def is_over() -> bool:
        return session is not None and console.sessions.find(key, used=False) is None

    async def pause() -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(console.closing.wait(), NEWS_EVERY_S)
        return not console.closing.is_set()

    async def counted() -> AsyncIterator[str]:
        token = object()
        streams.add(token)
        try:
            async for event in news(live, visit, is_over, pause):
                yield event
        finally:
            streams.discard(token)

    return StreamingResponse(counted(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})


async def news(
    live: LivePage, visit: Visit, is_over: Callable[[], bool], pause: Callable[[], Awaitable[bool]]
) -> AsyncIterator[str]:
    """Yield an event for each part that has changed, until the session is over, which the last event says.

    ``pause`` waits for the next round; False: the console ends, and the page keeps what it shows.
    """
    sent: dict[str, Markup] = {}
    while not is_over():
        try:
            parts = await run_in_threadpool(live.render, visit)
        except FTLayerError as error:
            yield _event("trouble", {"text": str(error)})
        else:
            for name, html in parts.items():
                if sent.get(name) != html:
                    sent[name] = html
                    yield _event("part", {"part": name, "html": html})
        if not await pause():
            return
    yield _event("over", {})


def _event(kind: str, data: Mapping[str, str]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"
