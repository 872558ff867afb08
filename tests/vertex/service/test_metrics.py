"""The endpoint: what it asks of a vertex, and what it does when that does not answer."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from functools import partial
from typing import Any

import pytest

from ftlayer.errors import ConfigError, UnknownJobError, VertexUnavailableError
from ftlayer.vertex.calls import GetJob, ListJobs, ListStreams, Stats
from ftlayer.vertex.metrics.families import Families
from ftlayer.vertex.service.metrics import Metrics, vertex_families


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
        with pytest.raises(ConfigError, match=f"metrics_port: cannot listen on {port}"):
            Metrics(Families, "127.0.0.1", port).__enter__()


def test_what_questions_of_tools_take_is_counted(running: Any) -> None:
    client = running.client()
    before = client.call(Stats()).values["reading_seconds"]
    client.call(ListStreams())
    assert client.call(Stats()).values["reading_seconds"] > before > 0
