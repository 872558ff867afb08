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
from ftlayer.vertex.service.metric_texts import TEXTS
from ftlayer.vertex.service.vertex import Vertex


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
