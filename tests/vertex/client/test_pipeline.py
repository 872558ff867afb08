"""What is sent again, windows and deadlines: pipelines, and calls whose connection breaks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.errors import ConfigError, IntakeTimeoutError, VertexUnavailableError
from ftlayer.vertex.calls import Accepted, Stats, Xored
from ftlayer.vertex.client.client import VertexClient

TOKEN = "t" * 32


class Proxy:
    """Passes bytes between clients and a vertex, until it is told to cut them off."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self.answers_pass = threading.Event()
        self.answers_pass.set()
        self.bytes_back = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                vertex = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, vertex]
                threading.Thread(target=self._pass, args=(client, vertex, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(vertex, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if is_answer:
                    self.answers_pass.wait()
                sink.sendall(data)

    def cut(self) -> None:
        """Break all connections."""
        for connection in self._sockets:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._sockets.clear()

    def close(self) -> None:
        self._listener.close()
        self.answers_pass.set()
        self.cut()


@pytest.fixture
def proxy(running: Any) -> Iterator[Proxy]:
    proxy = Proxy(running.server.port)
    yield proxy
    proxy.close()


@contextmanager
def client_of(proxy: Proxy, running: Any, **options: Any) -> Iterator[VertexClient]:
    arguments: dict[str, Any] = {"deadline_ms": 20_000} | options
    with VertexClient(f"grpc://127.0.0.1:{proxy.port}", running.token, **arguments) as client:
        yield client


def stat(client: VertexClient, name: str) -> float:
    reply: Any = client.call(Stats())
    value: float = reply.values[name]
    return value


# ---------------------------------------------------------------- sent again


def test_a_call_whose_answer_was_lost_has_its_effect_once(
    running: Any, proxy: Proxy, client: VertexClient, open_stream: Callable[..., Any], batches: Any
) -> None:
    client.call(open_stream())
    with client_of(proxy, running) as cut_off:
        cut_off.health()
        proxy.answers_pass.clear()
        result: list[Any] = []
        caller = threading.Thread(target=lambda: result.append(cut_off.call(batches.persist(5))))
        caller.start()
        while stat(client, "persisted") == 0:
            pass
        proxy.cut()
        proxy.answers_pass.set()
        caller.join()
        assert result == [Accepted(5)]
    assert stat(client, "persisted") == 5
    assert stat(client, "deduplicated_calls") == 1


def test_a_pipeline_whose_connection_broke_sends_again(
    running: Any, proxy: Proxy, client: VertexClient, open_stream: Callable[..., Any], batches: Any
) -> None:
    opened: Any = client.call(open_stream())
    with client_of(proxy, running) as cut_off, cut_off.pipeline(window=64) as pipeline:
        calls = [batches.persist(2) for _ in range(60)]
        assert pipeline.submit(calls[0]).result() == Accepted(2)
        futures = []
        for number, call in enumerate(calls[1:]):
            if number % 20 == 10:
                proxy.answers_pass.clear()
            if number % 20 == 15:
                proxy.cut()
                proxy.answers_pass.set()
            futures.append(pipeline.submit(call))
        assert [future.result() for future in futures] == [Accepted(2)] * 59
        xors = [pipeline.submit(batches.xor(call, opened.incarnation)) for call in calls]
        proxy.cut()
        assert [future.result() for future in xors] == [Xored(2, 0)] * 60
    assert stat(client, "persisted") == stat(client, "completed") == 120


# ---------------------------------------------------------------- windows and deadlines


def test_a_full_window_makes_submit_wait(
    running: Any, proxy: Proxy, client: VertexClient, open_stream: Callable[..., Any], batches: Any
) -> None:
    client.call(open_stream())
    with client_of(proxy, running) as slow, slow.pipeline(window=2) as pipeline:
        pipeline.submit(batches.persist(1)).result()
        proxy.answers_pass.clear()
        futures: list[Future[Any]] = [pipeline.submit(batches.persist(1)) for _ in range(2)]
        third: list[Future[Any]] = []
        waiting = threading.Thread(target=lambda: third.append(pipeline.submit(batches.persist(1))))
        waiting.start()
        while stat(client, "persisted") < 3:
            pass
        assert third == []
        proxy.answers_pass.set()
        waiting.join()
        assert [future.result() for future in [*futures, *third]] == [Accepted(1)] * 3


def test_a_window_of_bytes_takes_one_call_however_large(
    client: VertexClient, open_stream: Callable[..., Any], batches: Any
) -> None:
    client.call(open_stream())
    with client.pipeline(window_bytes=1) as pipeline:
        futures = [pipeline.submit(batches.persist(10)) for _ in range(5)]
        assert [future.result() for future in futures] == [Accepted(10)] * 5


def test_a_vertex_that_hangs_fails_calls_at_their_deadline_and_is_used_again_when_it_is_back(
    running: Any, proxy: Proxy, client: VertexClient, open_stream: Callable[..., Any], batches: Any
) -> None:
    client.call(open_stream())
    with client_of(proxy, running, deadline_ms=2_500) as hanging, hanging.pipeline(window=2) as pipeline:
        assert pipeline.submit(batches.persist(1)).result() == Accepted(1)
        proxy.answers_pass.clear()
        futures = [pipeline.submit(batches.persist(1)) for _ in range(2)]
        with pytest.raises(VertexUnavailableError, match="window"):
            pipeline.submit(batches.persist(1))
        for future in futures:
            with pytest.raises(VertexUnavailableError, match="deadline"):
                future.result(600)
        with pytest.raises(VertexUnavailableError):
            hanging.call(Stats())
        proxy.answers_pass.set()
        proxy.cut()
        assert pipeline.submit(batches.persist(1)).result(600) == Accepted(1)


def test_a_pipeline_that_waits_at_max_pending_holds_up_no_xor(
    client: VertexClient, open_stream: Callable[..., Any], batches: Any
) -> None:
    opened: Any = client.call(open_stream(max_pending=10))
    with client.pipeline() as pipeline:
        first = batches.persist(10)
        pipeline.submit(first).result()
        held = [pipeline.submit(batches.persist(10)) for _ in range(3)]
        done = pipeline.submit(batches.xor(first, opened.incarnation)).result()
        assert done == Xored(10, 0)
        assert held[0].result() == Accepted(10)
        assert not held[2].done()
        for future in held:
            future.add_done_callback(lambda _: None)
        pipeline_calls_end(client, pipeline, held)


def pipeline_calls_end(client: VertexClient, pipeline: Any, held: list[Future[Any]]) -> None:
    """Let the calls that are held back through, so that the pipeline can be closed."""
    from ftlayer.vertex.calls import OpenStream, StreamOptions

    client.call(OpenStream("job/source", StreamOptions(max_pending=1_000)))
    assert [future.result(600) for future in held] == [Accepted(10)] * 3


def test_a_full_store_makes_intake_wait_and_then_fail(
    tmp_path: Any, serving: Callable[..., Any], open_stream: Callable[..., Any], batches: Any
) -> None:
    with serving(tmp_path / "vertex", max_store_bytes=8 << 20, persist_timeout_ms=400) as running:
        client = running.client()
        opened: Any = client.call(open_stream())
        payload = pa.record_batch({"x": pa.array(["y" * 1_000] * 500)})
        stored = []

        def fill() -> None:
            while len(stored) < 100:
                call = batches.persist(500)
                client.call(type(call)(call.stream, payload, call.roots, call.values))
                stored.append(call)

        with pytest.raises(IntakeTimeoutError, match="store"):
            fill()
        assert 5 < len(stored) < 20
        for call in stored:
            assert client.call(batches.xor(call, opened.incarnation)) == Xored(500, 0)
        call = batches.persist(500)
        assert client.call(type(call)(call.stream, payload, call.roots, call.values)) == Accepted(500)


def test_windows_out_of_range(client: VertexClient) -> None:
    for options in ({"window": 0}, {"window": 1_000}, {"window_bytes": 0}):
        with pytest.raises(ConfigError, match="window"):
            client.pipeline(**options)


def test_a_closed_pipeline_takes_nothing(client: VertexClient, batches: Any) -> None:
    pipeline = client.pipeline()
    pipeline.close()
    with pytest.raises(VertexUnavailableError, match="closed"):
        pipeline.submit(batches.persist())
