"""What Prometheus is told."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from ftlayer.circuit import CircuitState, CircuitStatus
from ftlayer.vertex.calls import Stats, StatsReply
from ftlayer.vertex.service.metrics import TEXTS, Metrics
from ftlayer.vertex.service.sharding import add_stats

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
        "# HELP ftlayer_pending Records in flight, now.",
        "ftlayer_pending 3.0",
        'ftlayer_circuit_state{circuit="",owner="shop",state="closed"} 1.0',
        'ftlayer_circuit_state{circuit="enrich",owner="shop",state="open"} 1.0',
        'ftlayer_circuit_state{circuit="enrich",owner="shop",state="half-open"} 0.0',
        'ftlayer_circuit_opened{circuit="enrich",owner="shop"} 3.0',
        'ftlayer_circuit_opened{circuit="",owner="query"} 3.0',
    ):
        assert line in lines


def test_each_value_of_a_vertex_says_what_it_is(running: Any) -> None:
    reply = running.client().call(Stats())
    assert isinstance(reply, StatsReply)
    assert set(reply.values) == set(TEXTS)
