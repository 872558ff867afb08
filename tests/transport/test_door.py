"""Who has shown no token takes neither the descriptors nor the memory of those who have."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import flight

from ftlayer.transport import sockets
from ftlayer.transport.address import parse_listen
from ftlayer.transport.flight_connection import NO_COLUMNS, TokenServer, call_options
from ftlayer.transport.sockets import Doorkeeper, Peer

TOKEN = "t" * 32
PATIENCE_S = 300.0
EXCHANGE = flight.FlightDescriptor.for_command(b"x")


class Echo(TokenServer):
    """Answers an action with its body, and each message of a stream."""

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[bytes]:
        self.admitted(context)
        yield action.body.to_pybytes()

    def do_exchange(self, context: flight.ServerCallContext, descriptor, reader, writer) -> None:  # type: ignore[no-untyped-def]
        self.admitted(context)
        for chunk in reader:
            writer.write_metadata(chunk.app_metadata)


Step = tuple[dict[int, int], set[int], int, int]
STEPS: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(
        st.dictionaries(st.integers(1, 30), st.integers(0, 60 << 20), max_size=30),
        st.sets(st.integers(1, 30)),
        st.integers(0, 40),
        st.integers(0, 15),
    ),
    max_size=8,
)


@given(STEPS)
def test_who_ends(steps: list[Step]) -> None:
    """Nobody with the token; of the others the silent ones, and as many as are too many, or hold too much."""
    keeper = Doorkeeper()
    now = 0.0
    shown: set[Peer] = set()
    unshown: dict[Peer, tuple[float, float, int]] = {}  # came, last sent, bytes
    for ports, showing, free, passed in steps:
        now += passed
        there = {("::1", str(port)): sent for port, sent in ports.items()}
        showing_peers = {("::1", str(port)) for port in showing}
        ended = keeper.look(there, showing_peers, free, now)
        shown = (shown | showing_peers) & set(there)
        known = {
            peer: unshown.get(peer, (now, now, sent)) for peer, sent in there.items() if peer not in shown
        }
        unshown = {
            peer: (came, last if there[peer] == sent else now, there[peer])
            for peer, (came, last, sent) in known.items()
        }
        assert len(set(ended)) == len(ended)
        assert set(ended) <= set(unshown)
        left = {peer: unshown[peer] for peer in unshown if peer not in ended}
        silent = {peer for peer, (_, last, _) in unshown.items() if now - last >= sockets.REQUEST_S}
        most = max(sockets.LEAST_UNSHOWN, (free + len(unshown)) // 2)
        assert silent <= set(ended)
        assert len(left) <= most
        assert sum(sent for _, _, sent in left.values()) <= sockets.UNSHOWN_BYTES
        talking = {peer: each for peer, each in unshown.items() if peer not in silent}
        if len(talking) <= most:  # then they ended for what they hold, the largest first
            over = sum(sent for _, _, sent in talking.values()) - sockets.UNSHOWN_BYTES
            cut = sorted(sent for peer, (_, _, sent) in talking.items() if peer in ended)
            assert sum(cut) - (cut[0] if cut else 0) < over if cut else over <= 0
            assert not cut or cut[0] >= max((sent for _, _, sent in left.values()), default=0)
        elif sum(sent for _, _, sent in talking.values()) <= sockets.UNSHOWN_BYTES:
            assert len(left) == most
            oldest = max((unshown[peer][0] for peer in ended if peer in talking), default=0.0)
            assert oldest <= min(came for came, _, _ in left.values())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Echo]:
    monkeypatch.setattr(sockets, "UNSHOWN_BYTES", 4 << 20)
    monkeypatch.setattr(sockets, "MOST_UNSHOWN", 8)
    echo = Echo(parse_listen("127.0.0.1:0", "listen"), token=TOKEN, certificate=None, client_ca=None)
    yield echo
    echo.stop(PATIENCE_S)


def test_what_is_sent_without_the_token_is_bounded(server: Echo) -> None:
    """Without the token a call of any size was read whole, before it was refused."""
    body = bytes(256 << 20)
    with flight.FlightClient(str(server.address)) as stranger, pytest.raises(flight.FlightUnavailableError):
        list(stranger.do_action(flight.Action("x", body)))
    with flight.FlightClient(str(server.address)) as client:
        options = call_options(TOKEN, PATIENCE_S)
        list(client.do_action(flight.Action("x", b""), options))
        [answer] = client.do_action(flight.Action("x", body[: 32 << 20]), options)
    assert answer.body.size == 32 << 20


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_flood_without_the_token_ends_and_locks_nobody_out(host: str) -> None:
    """It had all descriptors, for as long as it liked."""
    if host == "::1" and not socket.has_dualstack_ipv6():
        host = "127.0.0.2"
    name = f"[{host}]" if ":" in host else host
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, __file__, f"{name}:0"], stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        early = flight.FlightClient(f"grpc://{name}:{port}")
        writer, reader = early.do_exchange(EXCHANGE, call_options(TOKEN))
        writer.begin(NO_COLUMNS)
        ended = threading.Semaphore(0)

        def idle(connection: socket.socket) -> None:
            while connection.recv(1 << 16):
                pass
            ended.release()

        for _ in range(160):
            connection = socket.create_connection((host, port), timeout=PATIENCE_S)
            threading.Thread(target=idle, args=(connection,), daemon=True).start()
        assert answer_of(f"grpc://{name}:{port}", b"late") == b"late"
        for _ in range(160):
            assert ended.acquire(timeout=PATIENCE_S)
        writer.write_metadata(b"early")
        assert reader.read_chunk().app_metadata.to_pybytes() == b"early"
        writer.close()
    finally:
        process.kill()
        process.communicate()


def answer_of(address: str, body: bytes) -> bytes:
    """Ask until there is an answer: a client that comes while the flood does is told that the server is away."""
    by = time.monotonic() + PATIENCE_S
    while True:
        try:
            with flight.FlightClient(address) as client:
                [answer] = client.do_action(flight.Action("x", body), call_options(TOKEN, PATIENCE_S))
                return bytes(answer.body.to_pybytes())
        except flight.FlightError:
            if time.monotonic() > by:
                raise


if __name__ == "__main__":
    sockets.REQUEST_S = 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
    listening = Echo(parse_listen(sys.argv[1], "listen"), token=TOKEN, certificate=None, client_ca=None)
    print(listening.port, flush=True)
    sys.stdin.read()
