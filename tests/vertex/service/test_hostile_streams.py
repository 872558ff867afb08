"""A client that has the token and means harm: the vertex stays up, and as large as it was.

The messages are written by hand, since no Flight client would write them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgpack
import pyarrow as pa
import pytest

from ftlayer.config import MIB, VertexOptions
from ftlayer.vertex.service.embedded import EmbeddedVertex

WAIT_S = 600
# Beside what a message itself takes, in the vertex and on its way there.
MOST_GROWTH_BYTES = 400 * MIB


def field(number: int, data: bytes) -> bytes:
    """Return a field of protobuf."""

    def varint(value: int) -> bytes:
        out = bytearray()
        while value >= 128:
            out.append(value & 127 | 128)
            value >>= 7
        return bytes(out + bytes([value]))

    return varint(number << 3 | 2) + varint(len(data)) + data


def message(header: bytes = b"", body: bytes = b"", metadata: bytes = b"", command: bytes = b"") -> bytes:
    """Return a FlightData; with a ``command`` the first of a stream."""
    parts = field(1, b"\x08\x02" + field(2, command)) if command else b""
    for number, data in ((2, header), (3, metadata), (1000, body)):
        parts += field(number, data) if data else b""
    return parts


def messages_of(batch: pa.RecordBatch, **options: Any) -> list[tuple[bytes, bytes]]:
    """Return (header, body) of schema, dictionaries and batch, as Arrow writes them."""
    sink = pa.BufferOutputStream()
    written = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(sink, batch.schema, options=written) as writer:
        writer.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    found = []
    while True:
        try:
            each = reader.read_next_message()
        except StopIteration:
            return found
        found.append((each.metadata.to_pybytes(), b"" if each.body is None else each.body.to_pybytes()))


CODED = pa.array(["a", "b"]).dictionary_encode()
DICTIONARIES = messages_of(pa.record_batch({"x": CODED, "y": CODED}))
NO_COLUMNS = messages_of(pa.record_batch([], schema=pa.schema([])))
ZEROS = pa.array([bytes(512 * MIB)], pa.large_binary())
COMMANDS = [b"calls", b"parts", msgpack.packb({"call": "Ingest", "client": "me", "stream": "ingest/x"})]


def without_a_header(command: bytes) -> list[bytes]:
    schema, dictionary, *_ = DICTIONARIES
    return [message(schema[0], command=command), message(*dictionary), message(metadata=b"x")]


def compressed(command: bytes, codec: str, schema: bytes | None = None) -> list[bytes]:
    own, batch = messages_of(pa.record_batch({"x": ZEROS}), compression=codec)
    return [message(schema or own[0], command=command), message(*batch, b"x")]


@pytest.fixture(scope="module")
def vertex(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedVertex]:
    with EmbeddedVertex(VertexOptions(tmp_path_factory.mktemp("hostile") / "vertex")) as it:
        yield it


def peak_bytes(pid: int | None) -> int:
    lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    [peak] = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return 1024 * int(peak)


def channel_to(vertex: EmbeddedVertex) -> grpc.Channel:
    target = vertex.address.partition("://")[2]
    if vertex.address.startswith("grpc+unix"):
        target = f"unix:{target}"
    return grpc.insecure_channel(target, options=[("grpc.max_send_message_length", -1)])


def send(vertex: EmbeddedVertex, method: str, messages: list[bytes]) -> None:
    """Send what will be refused, and check that the vertex is as it was."""
    pid = vertex.pid
    # Begins the peak anew.
    Path(f"/proc/{pid}/clear_refs").write_text("5", "utf-8")
    before = peak_bytes(pid)
    token = [("authorization", f"Bearer {vertex.token}")]
    path = f"/arrow.flight.protocol.FlightService/{method}"
    with channel_to(vertex) as channel, pytest.raises(grpc.RpcError):
        list(channel.stream_stream(path)(iter(messages), metadata=token, timeout=WAIT_S))
    with vertex.client() as client:
        assert client.health().protocol == 2
    assert vertex.pid == pid, "it is the same process"
    assert peak_bytes(pid) - before < MOST_GROWTH_BYTES


@pytest.mark.parametrize("method", ["DoPut", "DoExchange"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_message_without_its_header(vertex: EmbeddedVertex, method: str, command: bytes) -> None:
    send(vertex, method, without_a_header(command))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_batch_that_is_larger_than_it_looks(vertex: EmbeddedVertex, command: bytes) -> None:
    send(vertex, "DoPut", compressed(command, "zstd"))
    send(vertex, "DoPut", compressed(command, "zstd", NO_COLUMNS[0][0]))


def test_a_batch_inside_a_call_that_is_larger_than_it_looks(vertex: EmbeddedVertex) -> None:
    sink = pa.BufferOutputStream()
    written = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, pa.schema([("x", pa.large_binary())]), options=written) as writer:
        writer.write_batch(pa.record_batch({"x": ZEROS}))
    fields = {"stream": "ingest/x", "payload": sink.getvalue().to_pybytes()}
    frame = msgpack.packb({"call": "Ingest", "fields": fields, "client": "me", "sequence": 1})
    send(vertex, "DoPut", [message(NO_COLUMNS[0][0], command=b"parts"), message(metadata=frame)])


def test_a_call_of_empty_maps(vertex: EmbeddedVertex) -> None:
    maps = b"\xdd\x03\x80\x00\x00" + b"\x80" * (0x03800000)
    send(vertex, "DoPut", [message(NO_COLUMNS[0][0], command=b"calls"), message(metadata=maps)])
