"""The client: calls, addresses, certificates, forks."""

from __future__ import annotations

import os
import pickle
import re
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from ftlayer.common.clock import mono_ms
from ftlayer.errors import (
    ConfigError,
    MalformedRequestError,
    ProtocolError,
    StaleIncarnationError,
    UnsupportedError,
    VertexUnavailableError,
)
from ftlayer.transport.tls import make_certificate
from ftlayer.vertex.calls import Accepted, Deliverable, DeliverableUpTo, Ingest, Stats, Xor, Xored
from ftlayer.vertex.client.client import VertexClient, retried

TOKEN = "t" * 32


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
# What gRPC says, and what is said of it.
CLOSED = (
    "last error: UNAVAILABLE: ipv4:127.0.0.1:7077: Socket closed",
    "the other end has closed the connection",
)
NOT_TLS = (
    "SSL_ERROR_SSL: error:0A00010B:SSL routines::wrong version number",
    "what listens there speaks no TLS",
)
NOT_TRUSTED = (
    "SSL_ERROR_SSL: error:0A000086:SSL routines::certificate verify failed: self-signed certificate",
    "its certificate is not accepted",
)
REFUSED = (
    "ipv4:127.0.0.1:7077: Failed to connect to remote host: Connection refused",
    "no process listens there",
)


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
def test_the_error_at_the_deadline_names_a_possible_cause(
    address: str, failure: tuple[str, str], said: str
) -> None:
    def attempt(_: float) -> None:
        raise flight.FlightUnavailableError(failure[0])

    with pytest.raises(VertexUnavailableError) as caught:
        retried(attempt, "Stats", address, deadline_ms=0)
    assert failure[1] in str(caught.value)
    assert said in str(caught.value)
    assert ("possible cause" in str(caught.value)) == bool(said)


def test_an_outage_that_is_waited_for_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    address = "grpc://127.0.0.1:7999"
    attempts = 0

    def attempt(left_s: float) -> str:
        nonlocal attempts
        attempts += 1
        if attempts % 4:
            raise flight.FlightUnavailableError("failed to connect to all addresses; Connection refused")
        return "an answer"

    def call(seconds: int) -> str:
        return retried(attempt, "Stats", address, mono_ms() + 1_000 * seconds)

    assert call(5) == "an answer"
    assert not caplog.messages  # The error would come soon enough.
    assert [call(120) for _ in range(2)] == ["an answer"] * 2
    warning = (
        rf"Stats: no answer from the vertex at {address}; it is tried again for up to 120 s; last failure: .+"
    )
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2  # One an outage.
    assert all(re.fullmatch(warning, message) for message in caplog.messages)


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
        print([name for name in ("numba", "lmdb", "ftlayer.vertex.acker", "cryptography") if name in sys.modules])
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
