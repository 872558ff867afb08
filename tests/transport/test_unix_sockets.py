"""Unix sockets by themselves: frames, who is let in, and what comes of bytes that are neither."""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.errors import FTLayerError, MalformedRequestError, PeerRefusedError, UnauthorizedError
from ftlayer.transport import sockets as meeting
from ftlayer.transport.flight_connection import TRANSPORT_ERRORS
from ftlayer.transport.frames import AHEAD_BYTES, MAX_FRAME_BYTES, FrameKind, FrameSocket
from ftlayer.transport.sockets import SocketDirectory
from ftlayer.transport.unix_connection import UnixConnection, UnixListener, UnixStream

TOKEN = "a-token-of-the-tests"
WAIT_S = 600
REFUSALS = (FTLayerError, *TRANSPORT_ERRORS)


class Pair:
    """Two ends of one connection: as they are, and as frames."""

    def __init__(self) -> None:
        self.raw = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.one, self.other = map(FrameSocket, self.raw)

    def close(self) -> None:
        self.one.close()
        self.other.close()


@contextmanager
def listener(serve: Any) -> Iterator[UnixListener]:
    sockets = SocketDirectory.make()
    assert sockets is not None
    listening = UnixListener(f"{sockets.path}/s", TOKEN, serve)
    try:
        yield listening
    finally:
        listening.close(WAIT_S)
        sockets.remove()


def echo(command: bytes, stream: UnixStream) -> None:
    stream.write(b"command " + command)
    for frame in stream.frames():
        stream.write(frame.to_pybytes())


def echoed(path: str, *frames: bytes, token: str = TOKEN) -> list[bytes | None]:
    """Return what comes back for frames, to the end."""
    connection = UnixConnection(path, token, b"hello")
    try:
        connection.open()
        answers = [connection.read()]
        for frame in frames:
            connection.write(frame)
            answers.append(connection.read())
        connection.end()
        return [*answers, connection.read()]
    finally:
        connection.cancel()
        connection.close()


# ---------------------------------------------------------------- frames


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3 * AHEAD_BYTES) | st.integers(0, 40), max_size=30),
    st.sampled_from([4_096, 1 << 18]),
)
def test_frames_come_as_they_were_sent(sizes: list[int], buffered: int) -> None:
    frames = [os.urandom(size) for size in sizes]
    with closing(Pair()) as pair:
        pair.raw[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffered)
        sender = threading.Thread(target=lambda: [pair.one.send(FrameKind.DATA, frame) for frame in frames])
        sender.start()
        for frame in frames:
            kind, body = pair.other.receive()
            assert (kind, body.to_pybytes()) == (FrameKind.DATA, frame)
            assert body.address % 8 == 0, "it can be read as it is"
        sender.join(WAIT_S)
        pair.one.send(FrameKind.END)
        assert pair.other.receive()[0] is FrameKind.END


def receive_all(frames: FrameSocket, into: list[bytes]) -> None:
    while True:
        kind, body = frames.receive(1_000)
        into.append(struct.pack("<B3xI", kind, body.size) + body.to_pybytes())


@settings(deadline=None)
@given(st.binary(max_size=200) | st.binary(max_size=40).map(lambda data: struct.pack("<B3xI", 0, 9) + data))
def test_any_bytes_are_frames_or_an_error(data: bytes) -> None:
    with closing(Pair()) as pair:
        pair.raw[0].sendall(data)
        pair.raw[0].shutdown(socket.SHUT_WR)
        came: list[bytes] = []
        with pytest.raises((MalformedRequestError, ConnectionResetError)):
            receive_all(pair.other, came)
        assert data.startswith(b"".join(came))


@pytest.mark.parametrize(
    "head", [struct.pack("<B3xI", 3, 0), b"\0\0\1\0" + bytes(4), struct.pack("<B3xI", 1, 1)]
)
def test_a_head_that_says_nothing(head: bytes) -> None:
    with closing(Pair()) as pair:
        pair.raw[0].sendall(head)
        with pytest.raises(MalformedRequestError):
            pair.other.receive()


def test_a_frame_that_is_longer_than_there_may_be() -> None:
    with closing(Pair()) as pair:
        pair.raw[0].sendall(struct.pack("<B3xI", 0, MAX_FRAME_BYTES + 1))
        with pytest.raises(MalformedRequestError, match="more than there may be"):
            pair.other.receive()


def test_a_frame_of_which_the_end_never_comes() -> None:
    with closing(Pair()) as pair:
        pair.raw[0].sendall(struct.pack("<B3xI", 0, 1_000) + bytes(999))
        pair.raw[0].close()
        with pytest.raises(ConnectionResetError, match="without a word"):
            pair.other.receive()


def test_who_waits_is_freed() -> None:
    with closing(Pair()) as pair:
        errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

        def wait() -> None:
            try:
                pair.other.receive()
            except OSError as error:
                errors.put(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        pair.other.shut()
        assert isinstance(errors.get(timeout=WAIT_S), ConnectionResetError)
        waiting.join(WAIT_S)


# ---------------------------------------------------------------- who is let in


def test_a_client_is_served_and_told_the_end() -> None:
    with listener(echo) as served:
        assert echoed(served.path, b"", b"frame", bytes(5 << 20)) == [
            b"command hello",
            b"",
            b"frame",
            bytes(5 << 20),
            None,
        ]


def test_a_client_without_the_token_is_not_served() -> None:
    commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with listener(lambda command, stream: commands.put(command)) as served:
        with pytest.raises(UnauthorizedError, match="has not the token"):
            echoed(served.path, token="another")
        with closing(socket.socket(socket.AF_UNIX)) as raw:
            # As one would that does not look whether the server has it.
            raw.connect(served.path)
            frames = FrameSocket(raw)
            frames.send(FrameKind.DATA, bytes(32) + b"hello")
            frames.receive()
            frames.send(FrameKind.DATA, bytes(32))
            with pytest.raises(ConnectionResetError):
                frames.receive()
        assert commands.empty()
        assert served.path


def test_a_proof_is_good_for_one_connection() -> None:
    """What was heard on one connection opens no other, and not from the other side."""
    seen: list[bytes] = []
    with listener(echo) as served:
        for _ in range(2):
            with closing(socket.socket(socket.AF_UNIX)) as raw:
                raw.connect(served.path)
                frames = FrameSocket(raw)
                frames.send(FrameKind.DATA, bytes(32) + b"hello")
                proof = frames.receive()[1].to_pybytes()
                seen.append(proof)
                frames.send(FrameKind.DATA, proof[32:])
                with pytest.raises(ConnectionResetError):
                    frames.receive()
    assert seen[0] != seen[1]


def test_another_users_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Pair()) as pair:
        meeting.check_user(pair.raw[0])
        if not hasattr(socket, "SO_PEERCRED"):
            return
        user = os.geteuid()
        monkeypatch.setattr(meeting.os, "geteuid", lambda: user + 1)
        with pytest.raises(UnauthorizedError, match=f"id {user}"):
            meeting.check_user(pair.raw[0])


def test_an_error_of_the_server_is_told_whatever_the_client_has_sent() -> None:
    def refuse(command: bytes, stream: UnixStream) -> None:
        raise PeerRefusedError("not this one")

    with listener(refuse) as served:
        connection = UnixConnection(served.path, TOKEN, b"hello")
        connection.open()
        connection.write(bytes(4 << 20))
        with pytest.raises(PeerRefusedError, match="not this one"):
            connection.read()
        connection.cancel()
        connection.close()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.binary(max_size=120), max_size=4), st.booleans())
def test_nonsense_is_not_served_and_hurts_no_one(chunks: list[bytes], framed: bool) -> None:
    served = _shared()
    with closing(socket.socket(socket.AF_UNIX)) as raw:
        raw.connect(served.path)
        with suppress(*REFUSALS):
            for chunk in chunks:
                raw.sendall(struct.pack("<B3xI", 0, len(chunk)) + chunk if framed else chunk)
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(4_096):
                pass
    assert echoed(served.path) == [b"command hello", None]


_listeners: list[UnixListener] = []


def _shared() -> UnixListener:
    """Return one listener for all examples."""
    if not _listeners:
        sockets = SocketDirectory.make()
        assert sockets is not None
        _listeners.append(UnixListener(f"{sockets.path}/s", TOKEN, echo))
        _keep.append(sockets)
    return _listeners[0]


_keep: list[SocketDirectory] = []


@pytest.fixture(autouse=True, scope="module")
def close_shared() -> Iterator[None]:
    yield
    for each in _listeners:
        each.close(WAIT_S)
    for sockets in _keep:
        sockets.remove()


def test_a_stream_that_goes_on_after_its_handshake_as_nonsense() -> None:
    broken: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def serve(command: bytes, stream: UnixStream) -> None:
        try:
            for _ in stream.frames():
                pass
        except Exception as error:
            broken.put(error)
            raise

    with listener(serve) as served:
        connection = UnixConnection(served.path, TOKEN, b"hello")
        connection.open()
        assert connection._frames is not None
        connection._frames._socket.sendall(b"\xff" * 100)
        with pytest.raises(MalformedRequestError):
            connection.read()
        assert isinstance(broken.get(timeout=WAIT_S), MalformedRequestError)
        connection.cancel()
        connection.close()


# ---------------------------------------------------------------- ends


def test_what_is_cancelled_before_it_is_open() -> None:
    with listener(echo) as served:
        connection = UnixConnection(served.path, TOKEN, b"hello")
        connection.cancel()
        with pytest.raises(ConnectionAbortedError):
            connection.open()
        connection.close()


def test_a_listener_that_closes_leaves_no_file_and_breaks_with_who_stays() -> None:
    with listener(echo) as served:
        connection = UnixConnection(served.path, TOKEN, b"hello")
        connection.open()
        assert connection.read() == b"command hello"
        served.close(0.0)
        with pytest.raises(ConnectionResetError):
            connection.read()
        connection.close()
        assert not Path(served.path).exists()
        with pytest.raises(FileNotFoundError):
            echoed(served.path)


def test_a_path_that_is_taken() -> None:
    with listener(echo) as served, pytest.raises(OSError, match="in use"):
        UnixListener(served.path, TOKEN, echo)
