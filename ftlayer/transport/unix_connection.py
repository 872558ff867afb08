"""A `Connection` over a Unix socket, whose server is a `UnixListener`."""

from __future__ import annotations

import socket
import threading

from ftlayer.errors import FTLayerError
from ftlayer.transport.failures import error_in
from ftlayer.transport.frame_socket import FrameKind, FrameSocket
from ftlayer.transport.frames import unpack_map
from ftlayer.transport.meeting import check_user, meet

SENDING_BYTES = 512 << 10
"""What the system may hold of what is sent: with its default of 208 KiB, a frame of 8,192 rows is several waits."""


class UnixConnection:
    """See `ftlayer.transport.connection.Connection`.

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
            raise _error_of(data)
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


def _error_of(data: bytes) -> FTLayerError:
    error = error_in(unpack_map(data, "error", ("error", "message"), ("sequence",)))
    assert error is not None
    return error
