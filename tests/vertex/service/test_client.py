"""The client: retries, pipelines, windows, deadlines, forks."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from ftlayer.errors import (
    ConfigError,
    IntakeTimeoutError,
    MalformedRequestError,
    ProtocolError,
    StaleIncarnationError,
    UnsupportedError,
    VertexUnavailableError,
)
from ftlayer.transport.tls import make_certificate
from ftlayer.vertex.calls import (
    Accepted,
    Deliverable,
    DeliverableUpTo,
    Ingest,
    Stats,
    Xor,
    Xored,
)
from ftlayer.vertex.client.client import VertexClient
from ftlayer.vertex.client.connection import retried

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


# ---------------------------------------------------------------- calls


def test_calls_of_many_threads(client: VertexClient, open_stream: Callable[..., Any], batches: Any) -> None:
    opened: Any = client.call(open_stream())
    work = [batches.persist(3) for _ in range(40)]
    answers: list[Any] = []

    def run(mine: list[Any]) -> None:
        for call in mine:
            answers.append(client.call(call))
            answers.append(client.call(batches.xor(call, opened.incarnation)))

    threads = [threading.Thread(target=run, args=(work[start::8],)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers.count(Accepted(3)) == answers.count(Xored(3, 0)) == 40
    assert stat(client, "deduplicated_calls") == 0


def test_ingest_is_delivered(client: VertexClient) -> None:
    from ftlayer.vertex.calls import OpenQuery, ReadDeliveries

    client.call(OpenQuery("q", "run", ("ingest/clicks",)))
    batch = pa.record_batch({"x": [1, 2, 3]})
    with client.pipeline() as pipeline:
        assert pipeline.submit(Ingest("ingest/clicks", batch)).result() == Accepted(3)
    assert client.call(Deliverable("ingest/clicks", 0, 10)) == DeliverableUpTo(3)
    reply: Any = client.call(ReadDeliveries("ingest/clicks", 0, 3))
    assert sum(records.payload.num_rows for records in reply.batches) == 3


def test_what_the_rules_refuse_is_raised_as_it_was(client: VertexClient, batches: Any) -> None:
    with pytest.raises(ProtocolError, match="unknown"):
        client.call(batches.persist(stream="job/unknown"))
    with client.pipeline() as pipeline, pytest.raises(ProtocolError, match="unknown"):
        pipeline.submit(batches.persist(stream="job/unknown")).result()


def test_what_cannot_be_meant_is_refused(client: VertexClient, batches: Any) -> None:
    call = batches.persist(2)
    call.roots[1] = 0
    with pytest.raises(MalformedRequestError, match=r"Persist\.roots\[1\]"):
        client.call(call)
    with client.pipeline() as pipeline, pytest.raises(MalformedRequestError, match=r"Persist\.roots\[1\]"):
        pipeline.submit(call).result()


def test_without_a_vertex_a_call_fails_at_its_deadline(batches: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with VertexClient(f"grpc://127.0.0.1:{port}", TOKEN, deadline_ms=300) as client:
        with pytest.raises(VertexUnavailableError, match="deadline"):
            client.call(Stats())
        with client.pipeline() as pipeline, pytest.raises(VertexUnavailableError, match="deadline"):
            pipeline.submit(batches.persist()).result()


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


# ---------------------------------------------------------------- addresses, processes


@pytest.mark.parametrize(
    ("address", "options", "named"),
    [
        ("127.0.0.1:1", {}, "address"),
        ("http://127.0.0.1:1", {}, "address"),
        ("grpc://127.0.0.1", {}, "address"),
        ("grpc://10.0.0.1:1", {}, "grpc+tls"),
        ("grpc+unix://relative", {}, "absolute path"),
        ("grpc+unix:///with?query", {}, "absolute path"),
        ("grpc+unix:///" + "x" * 103, {}, "103 bytes"),
        ("grpc+unix:///run/x", {"root_certs": b"x"}, "grpc+tls"),
        ("grpc://127.0.0.1:1", {"root_certs": b"x"}, "root_certs"),
        ("grpc://127.0.0.1:1", {"token": "short"}, "token"),
        ("grpc://127.0.0.1:1", {"token": "with a space in it"}, "token"),
    ],
)
def test_wrong_arguments_are_named(address: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace("+", r"\+")):
        VertexClient(address, **({"token": TOKEN} | options))


def test_certificates_that_are_none_are_named_at_once() -> None:
    mine, other = make_certificate(["client"]), make_certificate(["client"])
    for options, said in (
        ({"root_certs": b"garbage"}, "root_certs: expected PEM of certificates"),
        ({"root_certs": mine.key}, "root_certs: expected PEM of certificates"),
        ({"client_pem": b"garbage"}, "client_pem: expected PEM of certificates"),
        ({"client_pem": mine.key}, "client_pem: expected PEM of certificates"),
        ({"client_pem": mine.cert}, "client_pem: expected PEM of a private key"),
        ({"client_pem": mine.cert + other.key}, "client_pem: the key is not that of the first certificate"),
        ({"client_pem": "text"}, "client_pem: expected at least 1 bytes, or None, got a str"),
    ):
        with pytest.raises(ConfigError, match=said):
            VertexClient("grpc+tls://127.0.0.1:1", TOKEN, **options)
    VertexClient(
        "grpc+tls://127.0.0.1:1", TOKEN, root_certs=mine.cert + other.cert, client_pem=mine.cert + mine.key
    )


# What gRPC says, as it ends.
CLOSED = "last error: UNAVAILABLE: ipv4:127.0.0.1:7077: Socket closed"
NOT_TLS = "SSL_ERROR_SSL: error:0A00010B:SSL routines::wrong version number"
NOT_TRUSTED = "SSL_ERROR_SSL: error:0A000086:SSL routines::certificate verify failed: self-signed certificate"
REFUSED = "ipv4:127.0.0.1:7077: Failed to connect to remote host: Connection refused"


@pytest.mark.parametrize(
    ("address", "failure", "said"),
    [
        ("grpc://127.0.0.1:7077", CLOSED, "a vertex with TLS is addressed as grpc+tls://127.0.0.1:7077"),
        ("grpc://127.0.0.1:7077", REFUSED, ""),
        ("grpc+unix:///run/x", CLOSED, ""),
        ("grpc+tls://127.0.0.1:7077", CLOSED, "client_pem"),
        ("grpc+tls://127.0.0.1:7077", NOT_TLS, "a vertex without TLS is addressed as grpc://127.0.0.1:7077"),
        ("grpc+tls://127.0.0.1:7077", NOT_TRUSTED, "the vertex's certificate was not accepted"),
        ("grpc+tls://127.0.0.1:7077", REFUSED, ""),
    ],
)
def test_the_error_at_the_deadline_names_a_possible_cause(address: str, failure: str, said: str) -> None:
    def attempt(_: float) -> None:
        raise flight.FlightUnavailableError(failure)

    with pytest.raises(VertexUnavailableError) as caught:
        retried(attempt, "Stats", address, deadline_ms=0)
    assert failure in str(caught.value)
    assert said in str(caught.value)
    assert ("possible cause" in str(caught.value)) == bool(said)


def test_a_pickled_client_has_names_of_its_own(running: Any, client: VertexClient, batches: Any) -> None:
    other = pickle.loads(pickle.dumps(client))
    assert other.address == client.address
    assert other.client_id != client.client_id
    assert other.health() == client.health()
    other.close()


def test_a_pipeline_cannot_be_pickled(client: VertexClient) -> None:
    with client.pipeline() as pipeline, pytest.raises(UnsupportedError):
        pickle.dumps(pipeline)


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_is_cheap_to_import() -> None:
    code = """
        import sys
        import ftlayer.vertex.client.client
        print([name for name in ("numba", "lmdb", "ftlayer.acker", "cryptography") if name in sys.modules])
    """
    assert run_python(code).strip() == "[]"


FORK = """
    import os, sys
    from ftlayer.errors import UnsupportedError
    from ftlayer.vertex.calls import Stats
    from ftlayer.vertex.client.client import VertexClient

    client = VertexClient(sys.argv[1], sys.argv[2], deadline_ms=10_000)
    names = [client.client_id]
    if sys.argv[3] == "used":
        client.call(Stats())
    child = os.fork()
    if child == 0:
        try:
            client.call(Stats())
            os._exit(7 if client.client_id != names[0] else 8)
        except UnsupportedError:
            os._exit(9)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    client.call(Stats())
    print(os.waitstatus_to_exitcode(status))
"""


def test_a_client_that_was_not_used_survives_a_fork(running: Any) -> None:
    assert run_python(FORK, running.address, running.token, "unused").strip() == "7"


def test_a_client_that_was_used_refuses_in_a_forked_process_instead_of_hanging(running: Any) -> None:
    assert run_python(FORK, running.address, running.token, "used").strip() == "9"


def test_a_proxy_of_the_environment_is_not_asked_about_loopback(running: Any) -> None:
    code = """
        import sys
        from ftlayer.vertex.calls import Stats
        from ftlayer.vertex.client.client import VertexClient
        print(type(VertexClient(sys.argv[1], sys.argv[2], deadline_ms=5_000).call(Stats())).__name__)
    """
    os.environ["http_proxy"] = "http://127.0.0.1:9"
    try:
        assert run_python(code, running.address, running.token).strip() == "StatsReply"
    finally:
        del os.environ["http_proxy"]


def test_a_process_that_ends_with_an_open_pipeline_ends(running: Any, open_stream: Any) -> None:
    code = """
        import sys, numpy as np, pyarrow as pa
        from ftlayer.vertex.calls import OpenStream, Persist
        from ftlayer.vertex.client.client import VertexClient
        client = VertexClient(sys.argv[1], sys.argv[2], deadline_ms=5_000)
        client.call(OpenStream("job/source"))
        pipeline = client.pipeline()
        ids = np.array([1], np.uint64)
        print(pipeline.submit(Persist("job/source", pa.record_batch({"x": [1]}), ids, ids)).result())
    """
    assert "Accepted" in run_python(code, running.address, running.token)


def test_an_xor_for_another_incarnation_is_refused(
    client: VertexClient, open_stream: Any, batches: Any
) -> None:
    opened: Any = client.call(open_stream())
    call = batches.persist()
    stale = Xor(call.roots, call.values, opened.incarnation + 1)
    with pytest.raises(StaleIncarnationError):
        client.call(stale)
    with client.pipeline() as pipeline, pytest.raises(StaleIncarnationError):
        pipeline.submit(stale).result()
