"""Frames of calls, replies and control messages: msgpack maps, read strictly."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import typing
import weakref
from enum import IntEnum
from typing import Any

import msgpack
import pyarrow as pa
from pyarrow import Buffer

from ftlayer import _native
from ftlayer.errors import MalformedRequestError

# Msgpack that others have written: what it would cost as objects is counted before one is made.
#
# Sixty megabytes of empty maps are six gigabytes of objects. Here a value may cost `BASE_COST` units and one more for
# `BYTES_PER_UNIT` bytes: a number, a text or a nil costs one, an array or a map `msgpack_cost`'s eight. So long texts
# and bytes pass whatever their size, and small things in great numbers do not.

BASE_COST = 1 << 20
BYTES_PER_UNIT = 8


def unpack(data: bytes | Buffer) -> Any:
    """Return what was packed; ValueError that says what is wrong with bytes that cannot or should not be read."""
    size = len(data) if isinstance(data, bytes) else data.size
    most = BASE_COST + size // BYTES_PER_UNIT
    cost = _native.msgpack_cost(data, most)
    if cost < 0:
        raise ValueError("arrays and maps are nested too deep")
    if cost > most:
        raise ValueError(f"{size} bytes have too many values in them; send fewer at a time")
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ValueError(f"not msgpack ({error or type(error).__name__})") from None


# Frames over a Unix socket: eight bytes that say what comes and how long it is, then the frame.
#
# The eight bytes are, little-endian: the kind (`FrameKind`) in one, three zeros, and the length in four.

MAX_FRAME_BYTES = (1 << 31) - 1
"""As long as a message of Flight may be."""

AHEAD_BYTES = 16 << 10
"""So much is read at once where it has come: one call for several small frames; large ones go where they stay."""

_HEAD = struct.Struct("<B3sI")
_ZEROS = bytes(3)
_DRAINED_BYTES = 65_536
# The process is not ended by a peer that is gone, whatever a user's function has made of the signal.
_SEND_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)


class FrameKind(IntEnum):
    DATA = 0
    END = 1
    """None comes behind it; it is empty."""
    ERROR = 2
    """The stream is refused, or breaks here: as `ftlayer.transport.flight_connection.error_frame`."""


class FrameSocket:
    """One end of a connection. One thread may read while another writes; `shut` is of any thread.

    Methods raise OSError when the connection breaks, `MalformedRequestError` for what is no frame.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._start = self._end = 0  # of what was read ahead
        close_in_children(connected)

    def send(self, kind: FrameKind, body: bytes = b"") -> None:
        """Write a frame: nothing is copied on the way to the system. Waits while the other side does not read."""
        size = len(body)
        if size > MAX_FRAME_BYTES:
            raise OSError(errno.EMSGSIZE, f"a frame of {size} bytes; {MAX_FRAME_BYTES} are the most")
        head = _HEAD.pack(kind, _ZEROS, size)
        sent = self._socket.sendmsg((head, body), (), _SEND_FLAGS)
        # Nearly always all of it is: a signal, and the system's own bounds, may cut it.
        if sent < len(head):
            self._socket.sendall(head[sent:], _SEND_FLAGS)
            sent = len(head)
        if sent < len(head) + size:
            self._socket.sendall(memoryview(body)[sent - len(head) :], _SEND_FLAGS)

    def receive(self, most: int = MAX_FRAME_BYTES) -> tuple[FrameKind, pa.Buffer]:
        """Wait for the next frame, of ``most`` bytes; the buffer is its own, and begins at a multiple of 64.

        Raises `ConnectionResetError` where the connection has ended, even between two frames.
        """
        while self._end - self._start < _HEAD.size:
            self._read_ahead()
        number, zeros, size = _HEAD.unpack_from(self._ahead, self._start)
        self._start += _HEAD.size
        if number > max(FrameKind) or zeros != _ZEROS:
            raise MalformedRequestError(
                f"frame: a head that says nothing, {_HEAD.pack(number, zeros, size).hex()}"
            )
        kind = FrameKind(number)
        if size > (0 if kind is FrameKind.END else most):
            raise MalformedRequestError(f"frame: {kind.name} of {size} bytes, more than there may be")
        body = pa.allocate_buffer(size)
        if size:
            here = min(size, self._end - self._start)
            view = memoryview(body).cast("B")
            view[:here] = self._ahead[self._start : self._start + here]
            self._start += here
            self._fill(view[here:])
        return kind, body

    def drain(self) -> None:
        """Write nothing more, and read, for nothing, to the other side's end: what was written is not lost so."""
        self._socket.shutdown(socket.SHUT_WR)
        scratch = bytearray(_DRAINED_BYTES)
        while self._socket.recv_into(scratch):
            pass

    def shut(self) -> None:
        """Break the connection: a thread that waits in a method is freed."""
        # One that is broken, or closed, already is as good.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket, when no other thread waits in a method."""
        self._socket.close()

    def _read_ahead(self) -> None:
        """Read the bytes behind the few that are left, at least one."""
        left = bytes(self._ahead[self._start : self._end])
        self._ahead[: len(left)] = left
        self._start, self._end = 0, len(left)
        got = self._socket.recv_into(self._ahead[len(left) :])
        if not got:
            raise _gone()
        self._end += got

    def _fill(self, view: memoryview[Any]) -> None:
        filled = 0
        while filled < len(view):
            got = self._socket.recv_into(view[filled:], 0, socket.MSG_WAITALL)
            if not got:
                raise _gone()
            filled += got


def _gone() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, "the other side has gone without a word")


def close_in_children(each: socket.socket) -> None:
    """Have forked processes close their copies: the end of this process is to be seen by who is connected to it."""
    _live.add(each)


_live: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for each in list(_live):
        each.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def pack(value: Any, what: str) -> bytes:
    """Return ``value`` as msgpack; `MalformedRequestError` for an integer or a text it cannot hold."""
    try:
        return typing.cast(bytes, msgpack.packb(value))
    except UnicodeEncodeError as error:
        raise MalformedRequestError(
            f"{what}: a text with a lone surrogate, which UTF-8 does not have: {error.object!r}"
        ) from None
    except (ValueError, OverflowError, TypeError) as error:
        raise MalformedRequestError(f"{what}: {error}") from None


def unpack_map(
    data: bytes | pa.Buffer, what: str, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Read a msgpack map with exactly these keys; `MalformedRequestError` names what is wrong in ``what``."""
    try:
        value = unpack(data)
    except ValueError as error:
        raise MalformedRequestError(f"{what}: {error}") from None
    if type(value) is not dict:
        raise malformed(what, "a msgpack map", value)
    for key in required:
        if key not in value:
            raise MalformedRequestError(f"{what}: {key!r} is missing")
    for key in value:
        if key not in required and key not in optional:
            raise MalformedRequestError(f"{what}: unknown key {key!r}")
    return value


def malformed(where: str, wanted: str, got: object) -> MalformedRequestError:
    return MalformedRequestError(f"{where}: expected {wanted}, got {_shown(got)}")


def _shown(value: object) -> str:
    if isinstance(value, (bytes, str, list, tuple, dict)):
        return f"{type(value).__name__} of length {len(value)}"
    return f"{type(value).__name__} {value!r}" if value is not None else "nothing"
