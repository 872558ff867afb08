"""A `Connection` over a Unix socket, whose server is a `UnixListener`."""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from ftlayer.errors import FTLayerError, MalformedRequestError
from ftlayer.transport.flight_connection import TRANSPORT_ERRORS, error_frame, error_in
from ftlayer.transport.frames import FrameKind, FrameSocket, close_in_children, unpack_map
from ftlayer.transport.sockets import answer, check_user, meet

logger = logging.getLogger(__name__)

BACKLOG = 1_024
PAUSE_S = 0.1
"""Before connections are taken again, where there was no file descriptor for one."""


class UnixStream:
    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames

    def frames(self) -> Iterator[pa.Buffer]:
        """Yield the client's frames to the end that it has told.

        Raises OSError where it goes without a word, `MalformedRequestError` for what is no frame.
        """
        while True:
            kind, body = self._frames.receive()
            if kind is FrameKind.END:
                return
            if kind is not FrameKind.DATA:
                raise MalformedRequestError("frame: an error, which a client does not send")
            yield body

    def write(self, frame: bytes) -> None:
        self._frames.send(FrameKind.DATA, frame)


class UnixListener:
    """Serves each client in a thread of its own, from the moment it is made. Other users' are refused.

    ``path`` has to be in a directory that no other user can enter.
    """

    def __init__(self, path: str, token: str, serve: Callable[[bytes, UnixStream], None]) -> None:
        """``serve(command, stream)`` serves a client that has the token, and ends its stream by returning.

        An `FTLayerError` that it raises is told to the client. Raises OSError if ``path`` cannot be listened at.
        """
        self.path = path
        self._token = token
        self._serve = serve
        self._lock = threading.Lock()
        self._open: dict[FrameSocket, threading.Thread] = {}
        self._closing = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        close_in_children(self._listening)
        try:
            self._listening.bind(path)
            self._listening.listen(BACKLOG)
        except OSError:
            self._free()
            raise
        self._thread = threading.Thread(target=self._accept, name="ftlayer-unix", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Take no more clients; wait for those there are, ``timeout_s`` at the longest, and then break with them.

        A second call does nothing.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake.send(b"\0")
        self._thread.join()
        with self._lock:
            threads = list(self._open.values())
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            for frames in self._open:
                frames.shut()
        Path(self.path).unlink(missing_ok=True)
        self._free()

    def _free(self) -> None:
        for each in (self._listening, self._wake, self._woken):
            each.close()

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listening, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._closing.is_set():
                selector.select()
                if self._closing.is_set():
                    return
                try:
                    connected, _ = self._listening.accept()
                except OSError as error:
                    logger.warning("a client's connection could not be taken: %s", error)
                    self._closing.wait(PAUSE_S)
                    continue
                connected.setblocking(True)
                frames = FrameSocket(connected)
                thread = threading.Thread(
                    target=self._run, args=(connected, frames), name="ftlayer-unix-client", daemon=True
                )
                with self._lock:
                    self._open[frames] = thread
                thread.start()

    def _run(self, connected: socket.socket, frames: FrameSocket) -> None:
        try:
            check_user(connected)
            command = answer(frames, self._token)
            self._converse(command, frames)
        except (FTLayerError, *TRANSPORT_ERRORS) as error:
            logger.info("a client's connection broke: %s", error)
        finally:
            with self._lock:
                del self._open[frames]
            frames.close()

    def _converse(self, command: bytes, frames: FrameSocket) -> None:
        try:
            self._serve(command, UnixStream(frames))
            frames.send(FrameKind.END)
        except FTLayerError as error:
            frames.send(FrameKind.ERROR, error_frame(error))
            # A socket that is closed with frames unread takes the error with it.
            frames.drain()


def remove_dead_sockets(directory: Path, pattern: str) -> None:
    """Remove sockets at which nothing listens any more: what killed processes have left."""
    for path in directory.glob(pattern):
        with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except OSError as error:
                if error.errno == errno.ECONNREFUSED:
                    path.unlink()


SENDING_BYTES = 512 << 10
"""What the system may hold of what is sent: with its default of 208 KiB, a frame of 8,192 rows is several waits."""


class UnixConnection:
    """See `ftlayer.transport.flight_connection.Connection`.

    `open` raises OSError or an `FTLayerError` where the server is not met: it is on another machine, or it is gone.
    """

    def __init__(self, path: str, token: str, command: bytes) -> None:
        """Prepare a connection to the socket at ``path``, which begins with ``command``."""
        self._path, self._token, self._command = path, token, command
        self._lock = threading.Lock()
        self._cancelled = False
        self._frames: FrameSocket | None = None

    def open(self) -> None:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with self._lock:
            self._frames = frames = FrameSocket(connected)
            if self._cancelled:
                raise ConnectionAbortedError("the stream was cancelled before it began")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENDING_BYTES)
        connected.connect(self._path)
        check_user(connected)
        meet(frames, self._token, self._command)

    def read(self) -> bytes | None:
        assert self._frames is not None
        kind, body = self._frames.receive()
        if kind is FrameKind.END:
            return None
        data: bytes = body.to_pybytes()
        if kind is FrameKind.ERROR:
            error = error_in(unpack_map(data, "error", ("error", "message"), ("sequence",)))
            assert error is not None
            raise error
        return data

    def write(self, frame: bytes) -> None:
        assert self._frames is not None
        self._frames.send(FrameKind.DATA, frame)

    def end(self) -> None:
        assert self._frames is not None
        self._frames.send(FrameKind.END)

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._frames is not None:
                self._frames.shut()

    def close(self) -> None:
        with self._lock:
            if self._frames is not None:
                self._frames.close()
