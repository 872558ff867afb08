"""The endpoint: what it asks of a vertex, and what it does when that does not answer."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.error
import urllib.request
from functools import partial
from typing import Any

import pytest

from ftlayer.errors import MachineError, UnknownJobError, VertexUnavailableError
from ftlayer.vertex.calls import GetJob, ListJobs, ListStreams, Stats
from ftlayer.vertex.metrics.catalogue import Families
from ftlayer.vertex.service.metrics import MAX_CONNECTIONS, Metrics, vertex_families


class Vertex:
    """A vertex of which some answers are replaced."""

    def __init__(self, vertex: Any, answers: dict[type, Any]) -> None:
        self._vertex = vertex
        self._answers = answers

    def submit(self, call: Any, envelope: Any, answer: Any) -> None:
        if type(call) in self._answers:
            answer(self._answers[type(call)])
        else:
            self._vertex.submit(call, envelope, answer)


def test_a_job_that_is_forgotten_between_two_calls_is_left_out(running: Any) -> None:
    vertex = Vertex(running.vertex, {GetJob: UnknownJobError("it was trimmed")})
    assert list(vertex_families(vertex, "1").values())


def test_a_scrape_of_a_vertex_that_stops_fails(running: Any) -> None:
    for call in (Stats, ListJobs):
        vertex = Vertex(running.vertex, {call: VertexUnavailableError("the vertex is stopping")})
        with (
            Metrics(partial(vertex_families, vertex, "1"), "127.0.0.1", 0) as metrics,
            pytest.raises(urllib.error.HTTPError, match="503") as refused,
        ):
            urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=60)
        assert refused.value.read() == b"the vertex is stopping\n"


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=f"metrics_port: cannot listen on {port}"):
            Metrics(Families, "127.0.0.1", port).__enter__()


def test_what_questions_of_tools_take_is_counted(running: Any) -> None:
    client = running.client()
    before = client.call(Stats()).values["reading_seconds"]
    client.call(ListStreams())
    assert client.call(Stats()).values["reading_seconds"] > before > 0


def test_connections_without_a_request_lock_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new one beyond the bound ends the oldest that waits; those whose request does not come are ended."""
    monkeypatch.setattr("ftlayer.vertex.service.metrics.REQUEST_S", 1)
    with Metrics(Families, "127.0.0.1", 0) as endpoint:
        at = ("127.0.0.1", endpoint.port)
        idle = [socket.create_connection(at, timeout=600) for _ in range(3 * MAX_CONNECTIONS)]
        idle[-1].sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        threads = [each for each in threading.enumerate() if "process_request" in each.name]
        assert len(threads) <= 2 * MAX_CONNECTIONS  # ended ones may still be about to return
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=600) as answer:
            assert answer.status == 200
        for each in idle:
            with contextlib.suppress(ConnectionError):
                each.recv(65_536)
            each.close()
