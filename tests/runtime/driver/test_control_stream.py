"""The control stream over real Flight: registration, both directions, breaks, garbage, tokens, TLS."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pyarrow as pa
import pytest
from pyarrow import flight

from ftlayer.runtime.driver.control_server import ControlServer
from ftlayer.runtime.protocol.channel_frames import PROTOCOL, encode
from ftlayer.runtime.protocol.messages import (
    AssignSplits,
    Cancel,
    Deploy,
    Heartbeat,
    Hello,
    Peer,
    PeersDropped,
    Probe,
    ReaderRange,
    Split,
)
from ftlayer.runtime.slot.main import ControlClient
from ftlayer.transport.address import Address
from ftlayer.transport.flight_connection import NO_COLUMNS, Endpoint
from ftlayer.transport.sockets import SocketDirectory
from ftlayer.transport.tls import Certificate, make_certificate

TOKEN = "a token of the tests, long enough".replace(" ", "-")
WAIT_S = 600
LOOPBACK = Address("127.0.0.1")


@dataclass
class Coordinator:
    server: ControlServer
    messages: queue.Queue[Any]
    lost: queue.Queue[Any]
    certificate: Certificate | None
    clients: list[ControlClient] = field(default_factory=list)

    def endpoint(self, **changes: Any) -> Endpoint:
        known: dict[str, Any] = {"address": str(self.server.address), "token": TOKEN}
        if self.certificate:
            known |= {"root_certs": self.certificate.cert, "tls_name": "ftlayer-job"}
            known |= {"client_cert": self.certificate.cert, "client_key": self.certificate.key}
        return Endpoint(**(known | changes))

    def client(self, instance: str = "a", slot: int = 1, job: str = "job", **changes: Any) -> Slot:
        client = ControlClient(self.endpoint(**changes), job=job, slot=slot, instance=instance)
        self.clients.append(client)
        return Slot(client)

    def raw(self, command: bytes) -> tuple[Any, Any]:
        client = flight.FlightClient(self.endpoint().address)
        header = (b"authorization", f"Bearer {TOKEN}".encode())
        descriptor = flight.FlightDescriptor.for_command(command)
        return client.do_exchange(descriptor, flight.FlightCallOptions(headers=[header], timeout=WAIT_S))


class Slot:
    """A client with what it has received."""

    def __init__(self, client: ControlClient) -> None:
        self.client = client
        self.messages: queue.Queue[Any] = queue.Queue()
        self.lost: queue.Queue[str] = queue.Queue()
        client.start(self.messages.put, self.lost.put)


@contextmanager
def coordinator(certificate: Certificate | None = None, listen: Address = LOOPBACK) -> Iterator[Coordinator]:
    messages: queue.Queue[Any] = queue.Queue()
    lost: queue.Queue[Any] = queue.Queue()
    server = ControlServer(
        listen=listen,
        token=TOKEN,
        job="job",
        slots=4,
        certificate=None if certificate is None else (certificate.cert, certificate.key),
        on_message=lambda *said: messages.put(said),
        on_lost=lambda *what: lost.put(what),
    )
    running = Coordinator(server, messages, lost, certificate)
    try:
        yield running
    finally:
        for client in running.clients:
            client.close()
        server.close()


def hello(instance: str = "a", slot: int = 1) -> Hello:
    return Hello(slot, instance, "grpc://127.0.0.1:1", "host", 7)


def head(**changes: Any) -> bytes:
    data: bytes = msgpack.packb({"protocol": PROTOCOL, "job": "job", "slot": 1, "instance": "a"} | changes)
    return data


@pytest.fixture
def sockets() -> Iterator[SocketDirectory]:
    made = SocketDirectory.make()
    assert made is not None
    yield made
    made.remove()


@pytest.mark.parametrize("unix", [False, True])
def test_both_directions_in_order(unix: bool, sockets: SocketDirectory) -> None:
    with coordinator(listen=sockets.socket("driver") if unix else LOOPBACK) as it:
        slot = it.client()
        said = [hello(), *(Heartbeat(0, number, False, {"records_in": number}) for number in range(200))]
        for message in said:
            slot.client.send(message)
        assert [it.messages.get(timeout=WAIT_S) for _ in said] == [(1, "a", message) for message in said]
        split = Split(0, b"x" * (5 << 20), 3)
        told = [
            Deploy(1, "run/1", (Peer(1, "a", "grpc://127.0.0.1:1"),)),
            AssignSplits("source", 0, ReaderRange(1, "{}", "{}", 1, b"d"), (split,)),
            *(Probe(number) for number in range(200)),
        ]
        for order in told:
            it.server.send("a", order)
        assert [slot.messages.get(timeout=WAIT_S) for _ in told] == told


def test_an_end_in_order_says_everything_first() -> None:
    with coordinator() as it:
        slot = it.client()
        slot.client.send(hello())
        for number in range(100):
            slot.client.send(PeersDropped(number))
        slot.client.close()
        assert it.lost.get(timeout=WAIT_S)[:2] == (1, "a")
        assert it.messages.qsize() == 101
        assert slot.lost.empty()


def test_a_message_to_one_that_left_goes_nowhere() -> None:
    with coordinator() as it:
        slot = it.client()
        slot.client.send(hello())
        slot.client.close()
        it.lost.get(timeout=WAIT_S)
        it.server.send("a", Cancel("late"))
        it.server.send("unknown", Cancel("late"))


def test_a_killed_process_is_lost() -> None:
    program = f"""
import sys
from ftlayer.runtime.slot.main import ControlClient
from ftlayer.runtime.protocol.messages import Hello
from ftlayer.transport.flight_connection import Endpoint
client = ControlClient(Endpoint(sys.argv[1], {TOKEN!r}), job="job", slot=2, instance="child")
client.start(print, print)
client.send(Hello(2, "child", "grpc://127.0.0.1:1", "host", 7))
sys.stdin.read()
"""
    with coordinator() as it:
        child = subprocess.Popen(
            [sys.executable, "-c", program, it.endpoint().address], stdin=subprocess.PIPE
        )
        assert it.messages.get(timeout=WAIT_S)[:2] == (2, "child")
        child.kill()
        assert it.lost.get(timeout=WAIT_S)[:2] == (2, "child")
        child.wait()
        assert child.stdin is not None
        child.stdin.close()


def test_a_driver_that_dies_is_lost() -> None:
    program = f"""
from ftlayer.transport.address import Address
from ftlayer.runtime.driver.control_server import ControlServer
server = ControlServer(listen=Address("127.0.0.1"), token={TOKEN!r}, job="job", slots=4, certificate=None,
    on_message=lambda *said: print("said", flush=True), on_lost=print)
print(server.address, flush=True)
server.serve()
"""
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    address = driver.stdout.readline().strip()
    client = ControlClient(Endpoint(address, TOKEN), job="job", slot=1, instance="a")
    slot = Slot(client)
    client.send(hello())
    assert driver.stdout.readline() == "said\n"
    driver.kill()
    assert "broke" in slot.lost.get(timeout=WAIT_S)
    client.send(Heartbeat(0, 1, False))  # goes nowhere, and does no harm
    client.close()
    driver.wait()
    driver.stdout.close()
    assert slot.lost.empty()


@pytest.mark.parametrize("address", ["grpc://127.0.0.1:1", "grpc+unix:///nothing/here"])
def test_no_server_there(address: str) -> None:
    client = ControlClient(Endpoint(address, TOKEN), job="job", slot=1, instance="a")
    slot = Slot(client)
    assert f"{address} broke" in slot.lost.get(timeout=WAIT_S)
    client.close()


def test_a_wrong_token() -> None:
    with coordinator() as it:
        slot = it.client(token="another-token-that-is-as-long-as-it")
        slot.client.send(hello())
        assert "token is missing or wrong" in slot.lost.get(timeout=WAIT_S)
        assert it.messages.empty()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (b"\xc1", "descriptor: not msgpack"),
        (head(protocol=99), "protocol 99"),
        (head(job="another"), "job 'another' is not the one"),
        (head(slot=4), "expected 0 to 3, got 4"),
        (head(slot=True), "expected 0 to 3"),
        (head(instance=""), "expected a name"),
    ],
)
def test_a_descriptor_that_makes_no_sense(command: bytes, words: str) -> None:
    with coordinator() as it:
        writer, reader = it.raw(command)
        writer.done_writing()
        with pytest.raises(pa.ArrowException, match=words):
            reader.read_chunk()
        assert it.lost.empty()


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([b"\xc1"], "control message: not msgpack"),
        ([encode(PeersDropped(1))], "expected Hello as the first message"),
        ([encode(hello()), encode(hello())], "only there"),
        ([encode(hello(slot=2))], "Hello names slot 2, the stream slot 1"),
        ([encode(hello()), encode(Cancel("me"))], "no message 'Cancel' in this direction"),
    ],
)
def test_garbage_ends_the_stream(frames: list[bytes], words: str) -> None:
    with coordinator() as it:
        writer, reader = it.raw(head())
        writer.begin(NO_COLUMNS)
        for frame in frames:
            writer.write_metadata(pa.py_buffer(frame))
        with pytest.raises(pa.ArrowException, match=words):
            reader.read_chunk()
        slot, instance, reason = it.lost.get(timeout=WAIT_S)
        assert (slot, instance) == (1, "a")
        assert "cannot be read" in reason


def test_an_instance_does_not_come_back() -> None:
    with coordinator() as it:
        first = it.client()
        first.client.send(hello())
        it.messages.get(timeout=WAIT_S)
        second = it.client()
        assert "cannot come back" in second.lost.get(timeout=WAIT_S)
        first.client.close()
        it.lost.get(timeout=WAIT_S)
        assert "cannot come back" in it.client().lost.get(timeout=WAIT_S)


def test_tls() -> None:
    with coordinator(make_certificate(["ftlayer-job"])) as it:
        slot = it.client()
        slot.client.send(hello())
        assert it.messages.get(timeout=WAIT_S) == (1, "a", hello())
        other = make_certificate(["ftlayer-job"]).cert
        assert "broke" in it.client("b", root_certs=other).lost.get(timeout=WAIT_S)
        assert "broke" in it.client("c", tls_name="another-name").lost.get(timeout=WAIT_S)
