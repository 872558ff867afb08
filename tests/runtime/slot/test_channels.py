from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from ftlayer.errors import CodecError, PeerRefusedError
from ftlayer.runtime.protocol.messages import Peer
from ftlayer.runtime.slot.links import FLIGHT, UNIX, ChannelServer, PeerLink, Roster, StreamHeader
from ftlayer.runtime.slot.rules.events import CreditCame, Event, FrameCame, LinkBroke
from ftlayer.transport.address import Address
from ftlayer.transport.flight_connection import NO_COLUMNS, Endpoint
from ftlayer.transport.sockets import SocketDirectory
from ftlayer.transport.tls import make_certificate
from ftlayer.transport.unix_connection import UnixListener, remove_dead_sockets

TOKEN = "a-token-of-the-job"
WAIT_S = 600
HEADER = StreamHeader("job", 1, "one", "zero", 1)
ONE = Peer(1, "one", "")


LOOPBACK = Address("127.0.0.1")


class Receiver:
    """Slot 0, instance "zero", that knows instance "one" of slot 1. ``socket``: path of its Unix socket."""

    def __init__(
        self, tls: bool = False, admit_timeout_s: float = WAIT_S, listen: Address = LOOPBACK, socket: str = ""
    ) -> None:
        self.roster = Roster("job", "zero")
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.certificate = make_certificate(["127.0.0.1"]) if tls else None
        self.server = ChannelServer(
            listen,
            token=TOKEN,
            roster=self.roster,
            admit_timeout_s=admit_timeout_s,
            post=self.events.put,
            certificate=(self.certificate.cert, self.certificate.key) if self.certificate else None,
            socket=socket,
        )
        self.address = str(self.server.address)
        self.sent: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.links: list[PeerLink] = []

    def link(self, header: StreamHeader = HEADER, token: str = TOKEN, *, shown: bool = True) -> PeerLink:
        certificate = self.certificate
        endpoint = Endpoint("", token)
        if certificate:
            endpoint = Endpoint("", token, certificate.cert, "127.0.0.1")
            if shown:
                endpoint = replace(endpoint, client_cert=certificate.cert, client_key=certificate.key)
        link = PeerLink(Peer(0, "zero", self.address, self.server.socket), endpoint, header, self.sent.put)
        self.links.append(link)
        return link

    def deploy(self) -> None:
        self.roster.deploy(1, [ONE, Peer(0, "zero", self.address)])

    def frame(self) -> bytes:
        event = self.events.get(timeout=WAIT_S)
        assert isinstance(event, FrameCame)
        assert (event.slot, event.instance) == (1, "one")
        return event.data.to_pybytes()

    def broken(self) -> LinkBroke:
        event = self.sent.get(timeout=WAIT_S)
        assert isinstance(event, LinkBroke)
        return event

    def close(self) -> None:
        for link in self.links:
            link.discard()
        self.server.close()


@pytest.fixture
def sockets() -> Iterator[SocketDirectory]:
    sockets = SocketDirectory.make()
    assert sockets is not None
    yield sockets
    sockets.remove()


def receiver_at(how: str, sockets: SocketDirectory, admit_timeout_s: float = WAIT_S) -> Receiver:
    """Return one that is reached by ``how``: Flight over TCP, with TLS, over a Unix socket, or a socket alone."""
    listen = sockets.socket("0-zero") if how == "flight-unix" else LOOPBACK
    socket = f"{sockets.path}/0-zero-unix" if how == "unix" else ""
    return Receiver(how == "tls", admit_timeout_s, listen, socket)


@pytest.fixture(params=["tcp", "unix"])
def receiver(request: pytest.FixtureRequest, sockets: SocketDirectory) -> Iterator[Receiver]:
    receiver = receiver_at(request.param, sockets)
    yield receiver
    receiver.close()


@pytest.mark.parametrize("how", ["tcp", "tls", "flight-unix", "unix"])
def test_frames_one_way_and_credit_the_other(how: str, sockets: SocketDirectory) -> None:
    receiver = receiver_at(how, sockets)
    receiver.deploy()
    link = receiver.link()
    frames = [b"a", bytes(5_000), bytes(40 << 20)]
    for frame in frames:
        link.send(frame)
    assert [receiver.frame() for _ in frames] == frames
    receiver.server.grant(1, b"credit")
    assert receiver.sent.get(timeout=WAIT_S) == CreditCame(0, "zero", b"credit")
    assert link.transport == (UNIX if how == "unix" else FLIGHT)
    receiver.server.grant(2, b"there is no slot 2")
    link.send(b"last")
    link.close()
    assert receiver.frame() == b"last"
    assert link.waiting() == []
    assert receiver.sent.empty(), "an end that was meant is not told"
    receiver.close()


def test_with_tls_a_sender_without_the_jobs_certificate_is_not_heard() -> None:
    receiver = Receiver(tls=True)
    receiver.deploy()
    receiver.link(shown=False).send(b"x")
    assert receiver.broken().reason
    assert receiver.events.empty()
    receiver.close()


def test_what_comes_before_the_deployment_waits_for_it(receiver: Receiver) -> None:
    receiver.link().send(b"early")
    receiver.deploy()
    assert receiver.frame() == b"early"


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (StreamHeader("another", 1, "one", "zero", 1), "another job"),
        (StreamHeader("job", 1, "one", "earlier", 1), "earlier instance"),
        (StreamHeader("job", 1, "zombie", "zero", 0), "does not count"),
    ],
)
def test_who_is_refused(receiver: Receiver, header: StreamHeader, reason: str) -> None:
    receiver.deploy()
    receiver.link(header).send(b"x")
    assert reason in receiver.broken().reason
    assert receiver.events.empty()


def test_a_wrong_token_is_refused(receiver: Receiver) -> None:
    receiver.deploy()
    receiver.link(token="another-token-of-16").send(b"x")
    assert "token is missing or wrong" in receiver.broken().reason
    assert receiver.events.empty()


def test_an_instance_that_is_dropped_in_the_middle_is_cut_off(receiver: Receiver) -> None:
    receiver.deploy()
    link = receiver.link()
    link.send(b"counts")
    assert receiver.frame() == b"counts"
    receiver.roster.drop(2, [1])
    link.send(b"does not")
    assert "replaced" in receiver.broken().reason
    assert receiver.events.empty()


@pytest.mark.parametrize("how", ["tcp", "unix"])
def test_an_unannounced_instance_is_refused_in_the_end(how: str, sockets: SocketDirectory) -> None:
    receiver = receiver_at(how, sockets, admit_timeout_s=0.05)
    receiver.deploy()
    receiver.link(StreamHeader("job", 1, "new", "zero", 1)).send(b"x")
    assert "has not told of it" in receiver.broken().reason
    receiver.close()


@pytest.mark.parametrize("how", ["tcp", "flight-unix", "unix"])
def test_a_receiver_that_is_not_there_is_told(how: str, sockets: SocketDirectory) -> None:
    receiver = receiver_at(how, sockets)
    receiver.server.close()
    link = receiver.link()
    link.send(b"x")
    assert not receiver.broken().reached
    assert link.waiting() == [b"x"]


@pytest.mark.parametrize("how", ["tcp", "unix"])
def test_a_link_that_is_discarded_or_closed_early(how: str, sockets: SocketDirectory) -> None:
    receiver = receiver_at(how, sockets)
    never = receiver.link()
    never.send(b"is not deployed yet")
    never.discard()
    never.close()
    receiver.deploy()
    receiver.link().send(b"later")
    while receiver.frame() != b"later":
        pass  # what was discarded may have been written before
    receiver.close()
    assert receiver.sent.empty(), "what was discarded tells nothing"


@pytest.mark.parametrize("how", ["tcp", "unix"])
def test_credit_that_was_given_before_the_end_arrives(how: str, sockets: SocketDirectory) -> None:
    receiver = receiver_at(how, sockets)
    receiver.deploy()
    link = receiver.link()
    link.send(b"x")
    assert receiver.frame() == b"x"
    for number in range(100):
        receiver.server.grant(1, b"%d" % number)
    link.close()
    came = [receiver.sent.get(timeout=WAIT_S) for _ in range(100)]
    assert came == [CreditCame(0, "zero", b"%d" % number) for number in range(100)]
    receiver.close()
    assert receiver.sent.empty()


def begin(writer: Any, reader: Any, schema: pa.Schema) -> None:
    """Write a schema and read; a refusal may come before it is written."""
    writer.begin(schema)
    reader.read_chunk()


def test_nonsense_on_a_stream_is_refused() -> None:
    receiver = Receiver()
    receiver.deploy()
    client = flight.FlightClient(receiver.address)
    options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {TOKEN}".encode())])
    columns = pa.schema([("n", pa.int64())])
    for command, schema, code in ((b"\xc1", NO_COLUMNS, "CODEC"), (HEADER.pack(), columns, "MALFORMED")):
        descriptor = flight.FlightDescriptor.for_command(command)
        writer, reader = client.do_exchange(descriptor, options)
        with pytest.raises(flight.FlightServerError, match=code):
            begin(writer, reader, schema)
        with pytest.raises((pa.ArrowException, OSError)):
            writer.close()
    client.close()
    assert receiver.events.empty()
    receiver.close()


# ---------------------------------------------------------------- the way that is taken


def test_a_slot_of_another_machine_is_reached_by_flight(sockets: SocketDirectory) -> None:
    """Its path does not exist here, or is that of another slot: whose secret is another."""
    receiver, stranger = Receiver(), Receiver()
    stranger.server.close()
    path = f"{sockets.path}/0-zero"
    receiver.deploy()
    for listener in (None, UnixListener(path, "another-job", lambda command, stream: None)):
        peer = Peer(0, "zero", receiver.address, path)
        link = PeerLink(peer, Endpoint("", TOKEN), HEADER, receiver.sent.put)
        link.send(b"x")
        assert receiver.frame() == b"x"
        assert link.transport == FLIGHT
        link.close()
        if listener is not None:
            listener.close(WAIT_S)
    receiver.close()


def test_a_slot_that_was_met_is_not_looked_for_elsewhere(sockets: SocketDirectory) -> None:
    """What was on its way over the socket may have arrived: only a new instance begins afresh."""
    receiver = receiver_at("unix", sockets)
    receiver.deploy()
    link = receiver.link()
    link.send(b"x")
    assert receiver.frame() == b"x"
    receiver.roster.drop(2, [1])
    link.send(b"y")
    broken = receiver.broken()
    assert broken.reached
    assert link.transport == UNIX
    receiver.close()
    assert not Path(receiver.server.socket).exists()


@pytest.mark.parametrize("how", ["tcp", "unix"])
def test_a_receiver_that_is_killed_is_noticed(how: str, sockets: SocketDirectory) -> None:
    socket = f"{sockets.path}/0-zero" if how == "unix" else ""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, socket], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    told: queue.SimpleQueue[Event] = queue.SimpleQueue()
    link = PeerLink(Peer(0, "zero", address, socket), Endpoint("", TOKEN), HEADER, told.put)
    link.send(b"x")
    assert told.get(timeout=WAIT_S) == CreditCame(0, "zero", b"taken")
    process.kill()
    process.wait()
    event = told.get(timeout=WAIT_S)
    assert isinstance(event, LinkBroke)
    link.discard()
    if socket:
        assert Path(socket).exists()
        remove_dead_sockets(Path(sockets.path), "0-*")
        assert not Path(socket).exists()
    process.communicate()


KILLED = f"""
import os
import sys
import time
from ftlayer.transport.address import Address
from ftlayer.runtime.protocol.messages import Peer
from ftlayer.runtime.slot.links import Roster
from ftlayer.runtime.slot.links import ChannelServer

roster = Roster("job", "zero")
server = ChannelServer(
    Address("127.0.0.1"),
    token="{TOKEN}",
    roster=roster,
    admit_timeout_s=600,
    post=lambda event: server.grant(1, b"taken"),
    socket=sys.argv[1],
)
roster.deploy(1, [Peer(1, "one", "")])
if sys.argv[1] and os.fork() == 0:
    sys.stdin.read()  # a child that outlives it holds no connection
    os._exit(0)
print(server.address, flush=True)
time.sleep(600)
"""


# ---------------------------------------------------------------- the roster


def admitted(roster: Roster, header: StreamHeader, timeout_s: float = 0.0) -> bool:
    try:
        roster.admit(header, timeout_s)
    except PeerRefusedError:
        return False
    return True


def test_who_counts() -> None:
    roster = Roster("job", "zero")
    roster.deploy(3, [ONE])
    assert admitted(roster, HEADER), "it was there before, in whatever epoch it began"
    assert not admitted(roster, StreamHeader("job", 2, "old", "zero", 2))
    roster.drop(4, [1])
    assert not admitted(roster, HEADER)
    assert not roster.is_current(1, "one")
    new = StreamHeader("job", 1, "two", "zero", 4)
    assert not admitted(roster, new)
    roster.up(4, [Peer(1, "two", "")])
    assert admitted(roster, new)
    assert not admitted(roster, HEADER)
    roster.up(4, [Peer(1, "three", "")])
    assert not admitted(roster, new), "replaced"
    assert roster.epoch == 4
    roster.close()
    assert not admitted(roster, StreamHeader("job", 1, "three", "zero", 4))


def waits(roster: Roster, header: StreamHeader, then: Callable[[], None]) -> bool:
    """Return the verdict on a sender that ``then`` decides on."""
    verdict: list[bool] = []
    thread = threading.Thread(target=lambda: verdict.append(admitted(roster, header, WAIT_S)))
    thread.start()
    then()
    thread.join(WAIT_S)
    return verdict[0]


def test_a_new_instance_that_others_know_already_waits() -> None:
    roster = Roster("job", "zero")
    assert waits(roster, HEADER, lambda: roster.deploy(1, [ONE]))
    new = StreamHeader("job", 1, "two", "zero", 2)
    assert waits(roster, new, lambda: roster.up(2, [Peer(1, "two", "")]))
    assert not waits(roster, StreamHeader("job", 1, "three", "zero", 3), roster.close)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91\x01", b"\x95\x01\x02\x03\x04\x05"])
def test_a_header_that_is_none(data: bytes) -> None:
    with pytest.raises(CodecError):
        StreamHeader.unpack(data)
    assert StreamHeader.unpack(HEADER.pack()) == HEADER


DISCARDED_AT_ONCE = """
import queue
import subprocess
import sys
from ftlayer.transport.address import Address
from ftlayer.runtime.protocol.messages import Peer
from ftlayer.transport.flight_connection import Endpoint
from ftlayer.runtime.slot.links import PeerLink
from ftlayer.runtime.slot.links import Roster, StreamHeader
from ftlayer.runtime.slot.links import ChannelServer

roster, token = Roster("job", "zero"), "a-token-of-the-job"
frames, socket = queue.SimpleQueue(), sys.argv[1]
server = ChannelServer(
    Address("127.0.0.1"), token=token, roster=roster, admit_timeout_s=600, post=frames.put, socket=socket
)
address = str(server.address)
for number in range(200):
    name = f"one-{number}"
    roster.deploy(number + 1, [Peer(1, name, ""), Peer(0, "zero", address)])
    header = StreamHeader("job", 1, name, "zero", number + 1)
    link = PeerLink(Peer(0, "zero", address, socket), Endpoint("", token), header, lambda event: None)
    link.send(b"frame")
    frames.get()
    link.discard()
    link.close()
print("alive")
"""


@pytest.mark.parametrize("how", ["tcp", "unix"])
def test_streams_that_are_discarded_while_both_threads_use_them(how: str, sockets: SocketDirectory) -> None:
    """Arrow half-closed some of them twice, and gRPC aborts a process that does so."""
    socket = f"{sockets.path}/0-zero" if how == "unix" else ""
    ran = subprocess.run([sys.executable, "-c", DISCARDED_AT_ONCE, socket], capture_output=True, text=True)
    assert ran.stdout == "alive\n", ran.stderr
    assert ran.returncode == 0, ran.stderr
