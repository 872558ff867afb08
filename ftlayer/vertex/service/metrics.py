"""A vertex's counters and gauges for Prometheus."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric

from ftlayer.circuit import CircuitState
from ftlayer.errors import ConfigError, FTLayerError
from ftlayer.vertex.calls import Reply, Stats, StatsReply
from ftlayer.vertex.service.vertex import Vertex

_SINCE = "since the start of the vertex"

TEXTS = {
    "cancelled_replays": f"Records that timed out and came to be done before their replay went out, {_SINCE}.",
    "completed": f"Records in flight that came to be done, {_SINCE}.",
    "dead": f"Records that became dead letters, {_SINCE}.",
    "dead_letters": "Dead letters held now, in records.",
    "deduplicated_calls": f"Calls of clients that came again and had their effect once, {_SINCE}.",
    "delivered_done": f"Records delivered to micro-batches that a commit finished, {_SINCE}.",
    "duplicate_roots": f"Records registered under an id that another record had, {_SINCE}.",
    "failed_explicit": f"Attempts that ended because a task or query reported a failure, {_SINCE}.",
    "failed_sealed": f"Attempts that ended because a micro-batch sealed its failures, {_SINCE}.",
    "in_delivery": "Accepted or due records that no micro-batch has committed, now.",
    "incarnation": "How often the store was opened, the sum over its shards.",
    "ingested": f"Records that ingests accepted, {_SINCE}.",
    "late_ignored": f"Events about records that were not followed any more, {_SINCE}.",
    "live_segments": "Segments of the store that hold records in flight, now.",
    "orphans": "Records of which events came, and which are not registered yet, now.",
    "orphans_dropped": f"Records of which events came, and which were never registered, {_SINCE}.",
    "pending": "Records in flight, now.",
    "persisted": f"Records in flight that were stored, {_SINCE}.",
    "purged": f"Dead letters that were removed, {_SINCE}.",
    "recalled": f"Records in flight that became due at once because their task was lost, {_SINCE}.",
    "recovered": "Records that were in flight when the vertex started.",
    "registered": f"Records that other queries or tasks registered to be followed, {_SINCE}.",
    "replayed": f"Records given out again for another attempt, {_SINCE}.",
    "requeued": f"Dead letters that were given another round of attempts, {_SINCE}.",
    "streams": "Streams of records that the vertex knows, now.",
    "timed_out": f"Attempts that ended because they took longer than the timeout, {_SINCE}.",
    "tracked_roots": "Records in flight that the acker follows, now.",
    "used_bytes": "Bytes of the store's map that are in use, of all shards, now.",
    "used_share": "Share of the store's map that is in use, from 0 to 1, of the fullest shard, now.",
    "waiting": "Failed records that wait for their pause or are due, now.",
}
"""By the name in `StatsReply.values`."""


class Metrics:
    """An HTTP endpoint ``/metrics`` for as long as the ``with`` block runs; nothing if ``port`` is None.

    Each value of `StatsReply` is ``ftlayer_<name>``. They are all gauges: counters begin anew with an
    incarnation, and `rate()` understands that of gauges named so as well.
    """

    def __init__(self, vertex: Vertex, host: str, port: int | None) -> None:
        self._vertex = vertex
        self._host = host
        self._port = port
        self._server: tuple[Any, threading.Thread] | None = None

    def __enter__(self) -> Metrics:
        """Listen; `ConfigError` when the port is taken."""
        if self._port is None:
            return self
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server = start_http_server(self._port, self._host, registry)
        except OSError as error:
            raise ConfigError(f"metrics_port: cannot listen on {self._port}: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()

    @property
    def port(self) -> int | None:
        """The port listened on; None without an endpoint."""
        return None if self._server is None else int(self._server[0].server_port)

    def collect(self) -> Iterator[Metric]:
        """Give the values of now (what prometheus_client asks a collector for)."""
        answers: queue.SimpleQueue[Reply | FTLayerError] = queue.SimpleQueue()
        self._vertex.submit(Stats(), None, answers.put)
        answer = answers.get()
        if not isinstance(answer, StatsReply):
            return
        for name, value in sorted(answer.values.items()):
            yield GaugeMetricFamily(f"ftlayer_{name}", TEXTS[name], value)
        yield from _circuits(answer)


def _circuits(answer: StatsReply) -> Iterator[Metric]:
    """Give the circuit breakers, by topology or query ("owner") and by name (of an operator, "" for all others)."""
    state = GaugeMetricFamily(
        "ftlayer_circuit_state",
        "1 for the state that a circuit breaker is in, 0 for the others.",
        labels=("owner", "circuit", "state"),
    )
    opened = GaugeMetricFamily(
        "ftlayer_circuit_opened",
        "How often a circuit breaker has opened, trials that failed included.",
        labels=("owner", "circuit"),
    )
    for owner, circuits in sorted(answer.circuits.items()):
        for name, status in sorted(circuits.items()):
            opened.add_metric((owner, name), status.opened)
            for each in CircuitState:
                state.add_metric((owner, name, each), float(status.state is each))
    yield state
    yield opened
