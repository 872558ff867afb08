"""How two processes find out that they are on one machine, and that each is who the other takes it for.

The client opens the path of a socket that the server has named. It answers only on the server's own machine, and each
side shows that it has the token, without saying it. ``C`` and ``S`` are fresh random bytes:

| from | frame |
| --- | --- |
| client | ``C`` and the command |
| server | ``S`` and a MAC by the token of ``server``, ``C``, ``S`` and the command |
| client | a MAC by the token of ``client``, ``C``, ``S`` and the command |

Both also have the system say whose process the other one is (Linux: ``SO_PEERCRED``), and refuse another user's. What
comes before these proofs is of bounded size.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct

from ftlayer.errors import UnauthorizedError
from ftlayer.transport.frame_socket import FrameKind, FrameSocket

MAX_COMMAND_BYTES = 4_096

_NONCE_BYTES = 32
_MAC_BYTES = hashlib.sha256().digest_size
_CLIENT, _SERVER = b"client", b"server"
_CREDENTIALS = struct.Struct("iII")


def meet(frames: FrameSocket, token: str, command: bytes) -> None:
    """Be the client. Raises `UnauthorizedError` if the server has not the token, and what a `FrameSocket` does."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    frames.send(FrameKind.DATA, nonce + command)
    answer = _receive(frames, _NONCE_BYTES + _MAC_BYTES)
    other, mac = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    said = nonce + other + command
    if not hmac.compare_digest(mac, _mac(token, _SERVER, said)):
        raise UnauthorizedError("what answers at the socket has not the token")
    frames.send(FrameKind.DATA, _mac(token, _CLIENT, said))


def answer(frames: FrameSocket, token: str) -> bytes:
    """Be the server, and return the client's command. Raises as `meet`."""
    first = _receive(frames, _NONCE_BYTES + MAX_COMMAND_BYTES)
    nonce, command = first[:_NONCE_BYTES], first[_NONCE_BYTES:]
    own = secrets.token_bytes(_NONCE_BYTES)
    said = nonce + own + command
    frames.send(FrameKind.DATA, own + _mac(token, _SERVER, said))
    if not hmac.compare_digest(_receive(frames, _MAC_BYTES), _mac(token, _CLIENT, said)):
        raise UnauthorizedError("a client at the socket has not the token")
    return command


def check_user(connected: socket.socket) -> None:
    """Raise `UnauthorizedError` if another user's process is at the other end, where the system says whose it is."""
    if not hasattr(socket, "SO_PEERCRED"):
        return
    said = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(said)
    if user != os.geteuid():
        raise UnauthorizedError(f"a process of another user (id {user}) is at the socket")


def _receive(frames: FrameSocket, most: int) -> bytes:
    kind, body = frames.receive(most)
    if kind is not FrameKind.DATA:
        raise UnauthorizedError("the other side has not shown who it is")
    data: bytes = body.to_pybytes()
    return data


def _mac(token: str, role: bytes, said: bytes) -> bytes:
    return hmac.digest(token.encode(), role + said, "sha256")
