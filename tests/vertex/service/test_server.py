"""The server over real sockets: what other clients send, and what is wrong with it."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

from ftlayer.config import MIB
from ftlayer.errors import ConfigError, MalformedRequestError, UnauthorizedError, VertexUnavailableError
from ftlayer.transport.tls import make_certificate
from ftlayer.vertex.calls import (
    MAX_EXAMINED,
    Accepted,
    ListRecords,
    RecordList,
    Stats,
    StatsReply,
    StreamOpened,
    Xored,
)
from ftlayer.vertex.client.client import VertexClient

STREAM = "job/source"
CALLS = flight.FlightDescriptor.for_command(b"calls")


def stream_of(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def persist_frame(sequence: int, root: int) -> bytes:
    ids = np.array([root], "<u8").tobytes()
    payload = stream_of(pa.record_batch({"x": ["y"]}))
    fields = {"stream": STREAM, "payload": payload, "roots": ids, "values": ids}
    frame: bytes = msgpack.packb({"call": "Persist", "fields": fields, "client": "me", "sequence": sequence})
    return frame


@pytest.fixture
def raw(running: Any) -> flight.FlightClient:
    with flight.FlightClient(running.address) as client:
        yield client


@pytest.fixture
def options(running: Any) -> flight.FlightCallOptions:
    return flight.FlightCallOptions(
        headers=[(b"authorization", f"Bearer {running.token}".encode())], timeout=600
    )


def persisted(client: VertexClient) -> float:
    reply = client.call(Stats())
    assert isinstance(reply, StatsReply)
    return reply.values["persisted"]


# ---------------------------------------------------------------- any Flight client


def test_a_plain_flight_client_persists_and_xors_as_documented(
    running: Any,
    client: VertexClient,
    raw: flight.FlightClient,
    options: Any,
    open_stream: Callable[..., Any],
) -> None:
    opened = client.call(open_stream())
    assert isinstance(opened, StreamOpened)
    ids = np.array([11, 12], "<u8").tobytes()
    payload = stream_of(pa.record_batch({"text": ["a", "b"]}))
    writer, reader = raw.do_put(CALLS, pa.schema([]), options)
    fields = {"stream": STREAM, "payload": payload, "roots": ids, "values": ids}
    call = {"call": "Persist", "fields": fields, "client": "plain", "sequence": 1}
    writer.write_metadata(msgpack.packb(call))
    answer = msgpack.unpackb(reader.read().to_pybytes())
    assert answer == {"reply": "Accepted", "fields": {"rows": 2}, "sequence": 1}

    fields = {"roots": ids, "values": ids, "incarnation": opened.incarnation}
    call = {"call": "Xor", "fields": fields, "client": "plain", "sequence": 2}
    writer.write_metadata(msgpack.packb(call))
    answer = msgpack.unpackb(reader.read().to_pybytes())
    assert answer["fields"] == {"completed": 2, "unknown": 0}
    writer.close()


def test_health_and_route(raw: flight.FlightClient, options: Any) -> None:
    [health] = raw.do_action(flight.Action("health", b""), options)
    assert msgpack.unpackb(health.body)["shards"] == 1
    [route] = raw.do_action(flight.Action("route", STREAM.encode()), options)
    assert msgpack.unpackb(route.body) == {"shard": 0, "shards": 1}
    assert {action.type for action in raw.list_actions(options)} == {"call", "health", "route"}


# ---------------------------------------------------------------- malformed


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(flight.FlightServerError) as caught:
        list(call() or [])
    assert msgpack.unpackb(caught.value.extra_info)["error"] == "MALFORMED"
    return str(caught.value)


def test_malformed_actions_are_refused_and_the_vertex_goes_on(
    client: VertexClient, raw: flight.FlightClient, options: Any
) -> None:
    for action, named in [
        (flight.Action("unknown", b""), "unknown"),
        (flight.Action("call", b""), "msgpack"),
        (flight.Action("call", os.urandom(1_000)), "call"),
        (flight.Action("call", msgpack.packb({"call": "Stats"})), "fields"),
        (flight.Action("call", bytes(4 * MIB + 1)), "max_message_bytes"),
        (flight.Action("route", b"\xff"), "UTF-8"),
    ]:
        assert named in refused(lambda action=action: raw.do_action(action, options))
    assert persisted(client) == 0


def put(raw: flight.FlightClient, options: Any, command: bytes, *frames: bytes) -> None:
    writer, reader = raw.do_put(flight.FlightDescriptor.for_command(command), pa.schema([]), options)
    for frame in frames:
        writer.write_metadata(frame)
    writer.done_writing()
    reader.read()
    writer.close()


def test_malformed_streams_are_refused_and_the_vertex_goes_on(
    client: VertexClient, raw: flight.FlightClient, options: Any
) -> None:
    stats = {"call": "Stats", "fields": {}}
    for command, frame, named in [
        (b"Xor", b"", "descriptor"),
        (b"calls", b"\xc1", "msgpack"),
        (b"calls", msgpack.packb({"call": "Xor"}), "fields"),
        (b"calls", msgpack.packb(stats), "client"),
        (b"calls", msgpack.packb(stats | {"client": "me", "sequence": 0}), "sequence"),
        (b"parts", b"123", "call"),
        (b"parts", msgpack.packb(stats)[:-1], "msgpack"),
    ]:
        assert named in refused(lambda command=command, frame=frame: put(raw, options, command, frame))
    assert "call" in refused(lambda: put(raw, options, b"parts"))
    assert persisted(client) == 0


def test_columns_beside_the_frames_are_refused(
    client: VertexClient, raw: flight.FlightClient, options: Any
) -> None:
    def send(batch: pa.RecordBatch) -> None:
        writer, reader = raw.do_put(CALLS, batch.schema, options)
        writer.write_with_metadata(batch, persist_frame(1, 5))
        writer.done_writing()
        reader.read()
        writer.close()

    assert "schema" in refused(lambda: send(pa.record_batch({"x": [1]})))
    assert "app_metadata alone" in refused(lambda: send(pa.record_batch([], schema=pa.schema([]))))
    assert persisted(client) == 0


def test_a_stream_with_a_path_instead_of_a_command_is_refused(raw: flight.FlightClient, options: Any) -> None:
    def send() -> None:
        writer, reader = raw.do_put(flight.FlightDescriptor.for_path("x"), pa.schema([]), options)
        writer.done_writing()
        reader.read()
        writer.close()

    assert "descriptor" in refused(send)


def test_one_malformed_call_of_a_stream_spoils_no_other(
    client: VertexClient, raw: flight.FlightClient, options: Any, open_stream: Callable[..., Any]
) -> None:
    client.call(open_stream())
    writer, reader = raw.do_put(CALLS, pa.schema([]), options)
    for sequence, root in enumerate([5, 0, 7], 1):
        writer.write_metadata(persist_frame(sequence, root))
    answers = [msgpack.unpackb(reader.read().to_pybytes()) for _ in range(3)]
    writer.close()
    by_sequence = {answer["sequence"]: answer for answer in answers}
    assert by_sequence[1]["reply"] == by_sequence[3]["reply"] == "Accepted"
    assert by_sequence[2]["error"] == "MALFORMED"
    assert "Persist.roots[0]" in by_sequence[2]["message"]
    assert persisted(client) == 2


def test_a_stream_that_breaks_off_leaves_what_it_brought(
    running: Any,
    client: VertexClient,
    raw: flight.FlightClient,
    options: Any,
    open_stream: Callable[..., Any],
) -> None:
    client.call(open_stream())
    writer, reader = raw.do_exchange(CALLS, options)
    writer.begin(pa.schema([]))
    writer.write_metadata(persist_frame(1, 5))
    assert reader.read_chunk().app_metadata is not None
    reader.cancel()
    assert persisted(client) == 1


def test_garbage_on_the_port_does_no_harm(running: Any, client: VertexClient) -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    random = np.random.default_rng(1)
    for size in (0, 1, 10, 1_000, 100_000):
        for prefix in (b"", preface, preface + bytes(9)):
            with socket.create_connection(("127.0.0.1", running.server.port), timeout=600) as connection:
                try:
                    connection.sendall(prefix + random.bytes(size))
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65_536):
                        pass
                except OSError:
                    continue  # thrown out by the server, as it should be
    assert persisted(client) == 0


# ---------------------------------------------------------------- long calls and replies


def test_calls_and_replies_longer_than_a_message(
    client: VertexClient, open_stream: Callable[..., Any], batches: Any
) -> None:
    client.call(open_stream())
    rows = 60_000
    payload = pa.record_batch({"text": pa.array(["x" * 100] * rows)})
    call = batches.persist(rows)
    reply = client.call(type(call)(STREAM, payload, call.roots, call.values))
    assert reply == Accepted(rows)
    reply = client.call(ListRecords("pending", STREAM, limit=10_000))
    assert isinstance(reply, RecordList)
    assert len(reply.records) == MAX_EXAMINED
    assert reply.more


def test_a_call_beyond_all_parts_is_refused(client: VertexClient, batches: Any) -> None:
    payload = pa.record_batch({"text": pa.array([b"x" * (65 * MIB)])})
    call = batches.persist(1)
    with pytest.raises(MalformedRequestError, match="max_message_bytes"):
        client.call(type(call)(STREAM, payload, call.roots, call.values))


def test_a_batch_beyond_the_message_limit_is_refused_alone(
    client: VertexClient, open_stream: Callable[..., Any], batches: Any
) -> None:
    client.call(open_stream())
    small = batches.persist(1)
    payload = pa.record_batch({"text": pa.array(["x" * (5 * MIB)])})
    large = type(small)(STREAM, payload, *(small.roots + np.uint64(1),) * 2)
    with client.pipeline() as pipeline:
        first, second = pipeline.submit(large), pipeline.submit(small)
        with pytest.raises(MalformedRequestError, match="max_message_bytes"):
            first.result()
        assert second.result() == Accepted(1)


# ---------------------------------------------------------------- token and TLS


@pytest.mark.parametrize("headers", [[], [b"Bearer wrong-wrong-wrong"], [b"Basic x"], [b"Bearer "]])
def test_a_missing_or_wrong_token_is_refused(raw: flight.FlightClient, headers: list[bytes]) -> None:
    options = flight.FlightCallOptions(headers=[(b"authorization", value) for value in headers], timeout=600)
    with pytest.raises(flight.FlightUnauthenticatedError):
        list(raw.do_action(flight.Action("health", b""), options))


def test_two_tokens_are_none(raw: flight.FlightClient, running: Any) -> None:
    header = (b"authorization", f"Bearer {running.token}".encode())
    with pytest.raises(flight.FlightUnauthenticatedError):
        list(raw.do_action(flight.Action("health", b""), flight.FlightCallOptions(headers=[header] * 2)))


def test_a_wrong_token_fails_every_kind_of_call_at_once(running: Any, batches: Any) -> None:
    client = running.client(token="wrong" * 5)
    with pytest.raises(UnauthorizedError):
        client.health()
    with pytest.raises(UnauthorizedError):
        client.call(Stats())
    with client.pipeline() as pipeline, pytest.raises(UnauthorizedError):
        pipeline.submit(batches.persist()).result(600)


def test_tls_with_the_vertexs_own_certificate(
    tmp_path: Path, serving: Callable[..., Any], open_stream: Callable[..., Any], batches: Any
) -> None:
    certificate = make_certificate(["127.0.0.1", "vertex.example"])
    with serving(tmp_path / "vertex", certificate) as running:
        client = running.client()
        opened = client.call(open_stream())
        with client.pipeline() as pipeline:
            persist = batches.persist()
            pipeline.submit(persist).result()
            assert pipeline.submit(batches.xor(persist, opened.incarnation)).result() == Xored(10, 0)


def test_tls_with_another_certificate_fails(tmp_path: Path, serving: Callable[..., Any]) -> None:
    with serving(tmp_path / "vertex", make_certificate(["127.0.0.1"])) as running:
        other = running.client(root_certs=make_certificate(["127.0.0.1"]).cert, deadline_ms=500)
        with pytest.raises(VertexUnavailableError):
            other.health()


def test_a_vertex_that_asks_for_certificates_hears_only_who_has_one(
    tmp_path: Path, serving: Callable[..., Any]
) -> None:
    known, unknown = make_certificate(["client"]), make_certificate(["client"])
    with serving(tmp_path / "vertex", make_certificate(["127.0.0.1"]), client_ca=known.cert) as running:
        client = running.client(client_pem=known.cert + known.key)
        assert client.health().shards == 1
        assert pickle.loads(pickle.dumps(client)).health().shards == 1
        for pem in (None, unknown.cert + unknown.key):
            with pytest.raises(VertexUnavailableError):
                running.client(client_pem=pem, deadline_ms=500).health()


def test_tls_for_another_name_fails(tmp_path: Path, serving: Callable[..., Any]) -> None:
    with serving(tmp_path / "vertex", make_certificate(["vertex.example"])) as running:
        client = running.client(deadline_ms=500)
        with pytest.raises(VertexUnavailableError):
            client.health()


def test_certificates_are_for_addresses_or_names() -> None:
    with pytest.raises(ConfigError):
        make_certificate([])
    with pytest.raises(ConfigError):
        make_certificate(["höst"])
