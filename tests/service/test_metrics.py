"""What Prometheus is told of circuit breakers."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from ftlayer.circuit import CircuitState, CircuitStatus
from ftlayer.layer.calls import StatsReply
from ftlayer.service.gather import add_stats
from ftlayer.service.metrics import Metrics

OPEN = CircuitStatus(CircuitState.OPEN, 3, 100, 40, 700)


class Vertex:
    """Answers `Stats` alone."""

    def __init__(self, answer: StatsReply) -> None:
        self._answer = answer

    def submit(self, call: Any, envelope: Any, answer: Any) -> None:
        answer(self._answer)


def test_the_breakers_of_topologies_and_queries_are_metrics() -> None:
    stats = add_stats(
        StatsReply({"pending": 1.0}, {"shop": {"": CircuitStatus(), "enrich": OPEN}}),
        StatsReply({"pending": 2.0}, {"query": {"": OPEN}}),
    )
    registry = CollectorRegistry()
    registry.register(Metrics(Vertex(stats), "", None))  # type: ignore[arg-type]
    lines = generate_latest(registry).decode().splitlines()
    for line in (
        "ftlayer_pending 3.0",
        'ftlayer_circuit_state{circuit="",owner="shop",state="closed"} 1.0',
        'ftlayer_circuit_state{circuit="enrich",owner="shop",state="open"} 1.0',
        'ftlayer_circuit_state{circuit="enrich",owner="shop",state="half-open"} 0.0',
        'ftlayer_circuit_opened{circuit="enrich",owner="shop"} 3.0',
        'ftlayer_circuit_opened{circuit="",owner="query"} 3.0',
    ):
        assert line in lines
