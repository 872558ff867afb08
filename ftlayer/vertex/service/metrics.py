"""The HTTP endpoint of a vertex or a board: for Prometheus what it and its jobs are doing; for probes how it is."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import Exemplar, Metric
from prometheus_client.exposition import ThreadingWSGIServer

from ftlayer.common.rules.histogram import Histogram
from ftlayer.errors import FTLayerError, UnknownJobError, VertexUnavailableError
from ftlayer.transport.sockets import REQUEST_S, cannot_listen
from ftlayer.vertex import calls
from ftlayer.vertex.metrics import catalogue as plain
from ftlayer.vertex.metrics.catalogue import Families, MetricKind, add_build, add_jobs, add_vertex, is_shown
from ftlayer.vertex.rules.operating import Phase, ProbeResult, ShardPulse, liveness, readiness
from ftlayer.vertex.service.shard import Answer

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment


LIVEZ, READYZ = "/livez", "/readyz"


class Pulsing(Protocol):
    def pulses(self) -> Sequence[ShardPulse]:
        """Return one of each shard, without waiting for any."""


class Probes:
    """The life of a vertex as its process tells it. Any thread may ask; no lock is taken that a writer holds."""

    def __init__(self, mono_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000) -> None:
        self._mono_ms = mono_ms
        self._vertex: Pulsing | None = None
        self.phase = Phase.OPENING

    def opened(self, vertex: Pulsing) -> None:
        self._vertex = vertex

    def serving(self) -> None:
        self.phase = Phase.SERVING

    def stopping(self) -> None:
        self.phase = Phase.STOPPING

    def liveness(self) -> ProbeResult:
        return liveness(self.phase, self._pulses(), self._mono_ms())

    def readiness(self) -> ProbeResult:
        return readiness(self.phase, self._pulses(), self._mono_ms())

    def answer(self, path: str) -> tuple[HTTPStatus, bytes] | None:
        """Return the status and the JSON that a probe gets; None if ``path`` is no probe's."""
        if path == LIVEZ:
            result = self.liveness()
        elif path == READYZ:
            result = self.readiness()
        else:
            return None
        return (HTTPStatus.OK if result.passes else HTTPStatus.SERVICE_UNAVAILABLE), self._body(result)

    def _pulses(self) -> Sequence[ShardPulse]:
        return () if self._vertex is None else self._vertex.pulses()

    def _body(self, result: ProbeResult) -> bytes:
        now_ms = self._mono_ms()
        shards = [
            {
                "shard": index,
                "seconds_since_turn": max(now_ms - pulse.turned_ms, 0) / 1_000,
                "store_used_ratio": round(pulse.used_share, 4),
            }
            for index, pulse in enumerate(self._pulses())
        ]
        return json.dumps(result.facts() | {"shards": shards}).encode() + b"\n"


MAX_CONNECTIONS = 32


class Submitting(Protocol):
    def submit(self, call: calls.Call, envelope: None, answer: Answer) -> None:
        """Run ``call``; ``answer`` gets the reply or the error."""


class Metrics:
    """An HTTP endpoint ``/metrics`` for as long as the ``with`` block runs; nothing if ``port`` is None.

    Text or OpenMetrics (with exemplars), as is asked for. A scrape fails where gathering raises, with status 503 for a
    vertex that does not serve. With ``probes``, those are answered too, also while a scrape waits.
    """

    def __init__(
        self, gather: Callable[[], Families], host: str, port: int | None, probes: Probes | None = None
    ) -> None:
        self._gather = gather
        self._host = host
        self._port = port
        self._probes = probes
        self._server: tuple[ThreadingWSGIServer, threading.Thread] | None = None

    def __enter__(self) -> Metrics:
        if self._port is None:
            return self
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        scraped = make_wsgi_app(registry)

        def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            probed = None if self._probes is None else self._probes.answer(environ["PATH_INFO"])
            if probed is not None:
                return _answered(start_response, *probed, "application/json")
            try:
                text: Iterable[bytes] = scraped(environ, start_response)
                return text
            except VertexUnavailableError as error:
                said = f"{error}\n".encode()
                return _answered(start_response, HTTPStatus.SERVICE_UNAVAILABLE, said, "text/plain")

        kind = _ServerOnIPv6 if ":" in self._host else _Server
        try:
            server = make_server(self._host, self._port, app, kind, handler_class=_SilentHandler)
        except OSError as error:
            raise cannot_listen("metrics_port", self._port, error) from error
        thread = threading.Thread(target=server.serve_forever, name="ftlayer-metrics", daemon=True)
        thread.start()
        self._server = server, thread
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()

    @property
    def port(self) -> int | None:
        return None if self._server is None else int(self._server[0].server_port)

    def describe(self) -> list[Metric]:
        """Name no metric: a registry that asks for their names would ask the vertex before it serves."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Give the values of now (what prometheus_client asks a collector for). Raises what gathering does."""
        return prometheus_metrics(self._gather())


class _Server(ThreadingWSGIServer):
    """Each connection is a thread and a descriptor, and callers show no token: of these there are `MAX_CONNECTIONS`.

    One more ends the oldest whose request has not come; where all have, it is ended itself.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._open: dict[socket.socket, float] = {}  # by when its request has to be there
        self._lock = threading.Lock()
        super().__init__(*args, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            ended = None
            if len(self._open) >= MAX_CONNECTIONS:
                ended = next((each for each, by in self._open.items() if by < math.inf), request)
                self._open.pop(ended, None)
            if ended is not request:
                self._open[request] = time.monotonic() + REQUEST_S
            if ended is not None:
                _end(ended)
        if ended is request:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def requested(self, request: socket.socket) -> None:
        """All of its request is there: it is answered, however long that takes."""
        with self._lock:
            if request in self._open:
                self._open[request] = math.inf

    def service_actions(self) -> None:
        """End those whose requests do not come, byte by byte or not at all (twice a second)."""
        now = time.monotonic()
        with self._lock:
            for request in [each for each, by in self._open.items() if by <= now]:
                del self._open[request]
                _end(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that break off, or that were ended."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _end(request: socket.socket) -> None:
    """Let the thread that reads from or writes to a connection find its end; it closes it."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _ServerOnIPv6(_Server):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    """Logs no requests: there is one of each probe and each scraper every few seconds."""

    timeout = REQUEST_S  # of each read and write
    server: _Server

    def get_environ(self) -> dict[str, Any]:
        self.server.requested(self.connection)
        return super().get_environ()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _answered(
    start_response: StartResponse, status: HTTPStatus, body: bytes, media_type: str
) -> Iterable[bytes]:
    headers = [
        ("Content-Type", media_type),
        ("Content-Length", str(len(body))),
        ("Cache-Control", "no-store"),
    ]
    start_response(f"{status.value} {status.phrase}", headers)
    return [body]


def vertex_families(vertex: Submitting, version: str) -> Families:
    """Ask a vertex what it and the jobs that are announced to it are doing. Raises what it answers."""

    def ask(call: calls.AnsweredBy[calls.R]) -> calls.R:
        answers: queue.SimpleQueue[calls.Reply | FTLayerError] = queue.SimpleQueue()
        vertex.submit(call, None, answers.put)
        answer = answers.get()
        if isinstance(answer, FTLayerError):
            raise answer
        return call.expected(answer)

    families = Families()
    add_vertex(families, ask(calls.Stats()), ask(calls.ListStreams()), version, time.time_ns() // 1_000_000)
    add_jobs(families, _jobs(ask))
    return families


def board_families(ask: calls.Asked, version: str) -> Families:
    """Ask a board that is no vertex's what the jobs that are announced to it are doing."""
    families = Families()
    add_build(families, version)
    add_jobs(families, _jobs(ask))
    return families


def _jobs(ask: calls.Asked) -> Iterator[calls.AnnouncedJob]:
    now_ms = time.time_ns() // 1_000_000
    for job in ask(calls.ListJobs()).jobs:
        if not is_shown(job):
            continue
        try:
            # No checkpoint that has ended: each has its parts by subtask.
            announced = ask(calls.GetJob(job.job.owner, checkpoints_since_ms=now_ms))
        except UnknownJobError:
            continue  # it was trimmed in between
        yield announced


def prometheus_metrics(families: Families) -> Iterator[Metric]:
    for metric, values in families.values():
        family = Metric(metric.name, metric.text, metric.kind)
        name = f"{metric.name}_total" if metric.kind is MetricKind.COUNTER else metric.name
        for labels, value in values:
            family.add_sample(name, labels, value)
        yield family
    for metric, histograms in families.histograms():
        yield _histogram_family(metric, histograms)


def _histogram_family(metric: plain.Metric, samples: list[tuple[dict[str, str], Histogram]]) -> Metric:
    family = Metric(metric.name, metric.text, metric.kind)
    for labels, histogram in samples:
        count = 0
        for bound, each, exemplar in zip(
            (*histogram.bounds, math.inf), histogram.counts, histogram.exemplars, strict=True
        ):
            count += each
            shown = None
            if exemplar is not None:
                shown = Exemplar({"root": f"{exemplar.root:016x}"}, exemplar.value, exemplar.at_ms / 1_000)
            bucket = {**labels, "le": "+Inf" if math.isinf(bound) else str(bound)}
            family.add_sample(f"{metric.name}_bucket", bucket, count, exemplar=shown)
        family.add_sample(f"{metric.name}_count", labels, count)
        family.add_sample(f"{metric.name}_sum", labels, histogram.total)
    return family
