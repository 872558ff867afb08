"""Directories for Unix sockets that no other user of the machine can enter, and so cannot connect in."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import hmac
import logging
import os
import resource
import secrets
import shutil
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ftlayer.common.secret_files import is_private, unused
from ftlayer.errors import ConfigError, FTLayerError, MachineError, UnauthorizedError
from ftlayer.transport.address import Address, is_socket_path
from ftlayer.transport.frames import FrameKind, FrameSocket

logger = logging.getLogger(__name__)


# Two processes find out that they are on one machine, and that each is who the other takes it for: the client opens the
# path of a socket that the server has named. It answers only on the server's own machine, and each side shows that it
# has the token, without saying it. ``C`` and ``S`` are fresh random bytes:
#
# | from | frame |
# | --- | --- |
# | client | ``C`` and the command |
# | server | ``S`` and a MAC by the token of ``server``, ``C``, ``S`` and the command |
# | client | a MAC by the token of ``client``, ``C``, ``S`` and the command |
#
# Both also have the system say whose process the other one is (Linux: ``SO_PEERCRED``), and refuse another user's. What
# comes before these proofs is of bounded size.

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


class Notifier:
    """Tells systemd how this process is; says nothing where no one listens. For one thread.

    A process that is told to show life (``WatchdogSec=``) does so twice in the time that it is given.
    """

    def __init__(
        self, path: str, watchdog_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``path`` is the socket's ("" for none, "@…" for an abstract one), ``watchdog_s`` the time it is given."""
        self._path = f"\0{path[1:]}" if path.startswith("@") else path
        self._every_s = None if watchdog_s is None else watchdog_s / 2
        self._clock = clock
        self._told_s = -float("inf")

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Notifier:
        """Return what the variables ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID`` ask for."""
        path = environ.get("NOTIFY_SOCKET", "")
        watchdog_us = environ.get("WATCHDOG_USEC", "")
        is_meant = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        return cls(path, int(watchdog_us) / 1e6 if watchdog_us.isdigit() and is_meant else None)

    def ready(self, status: str) -> None:
        """Tell that the service serves; ``status`` is what ``systemctl status`` shows."""
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        self._send("STOPPING=1\nSTATUS=stopping")

    def alive(self, is_live: Callable[[], bool]) -> None:
        """Show life if it is time to, and if ``is_live`` says so."""
        now_s = self._clock()
        if self._every_s is None or now_s - self._told_s < self._every_s:
            return
        self._told_s = now_s
        if is_live():
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._path:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to_manager:
                to_manager.sendto(text.encode(), self._path)
        except OSError as error:
            # The service serves all the same; a manager that waits for READY=1 says itself that it got none.
            logger.warning("the service manager cannot be told (NOTIFY_SOCKET): %s", error)


FALLBACK = "/tmp"
"""Where they are made if the temporary directory has too long a path."""

ON_LOOPBACK = "listening on loopback, where every user of this machine can connect"

_PREFIX = "ftlayer-sockets-"
# Room for the longest name of a socket in it, a slot's.
_LONGEST_NAME = "n" * 24
# A directory that was just made is not locked yet.
_YOUNG_S = 60.0
KEPT_S = 7 * 24 * 3_600.0
"""So long what a killed process has left is spared if it links to something that is there."""

REQUEST_S = 10
"""How long the headers of a request may take to come, where who sends it has shown no token yet."""

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class SocketDirectory:
    """A directory of mode 0700 that is removed by `remove`, or with this process.

    It is in the temporary directory and not in ``XDG_RUNTIME_DIR``, which goes when its user logs out. For as long as
    it is in use it is locked: what a killed process has left is told by that and removed by the next one of its user,
    and systemd-tmpfiles spares it.
    """

    def __init__(self, path: str, lock: int) -> None:
        """Use `make` instead."""
        self.path = path
        self._removal = weakref.finalize(self, _remove, path, lock, os.getpid())

    @classmethod
    def make(cls, without: str = ON_LOOPBACK) -> SocketDirectory | None:
        """Make one; None, with a warning in the log, where no temporary directory can have sockets.

        ``without`` says there what that leads to.
        """
        reasons = []
        for parent, prefix in _places():
            try:
                _sweep(Path(parent))
                return cls._made_in(parent, prefix)
            except OSError as error:
                reasons.append(f"{parent}: {error.strerror or error}")
        text = "no Unix socket can be made (%s): %s; set TMPDIR to a short path on a local disk"
        logger.warning(text, "; ".join(reasons), without)
        return None

    def socket(self, name: str) -> Address:
        return Address(path=f"{self.path}/{name}")

    def remove(self) -> None:
        """Remove it with all that is in it; a second call does nothing."""
        self._removal()

    @classmethod
    def _made_in(cls, parent: str, prefix: str) -> SocketDirectory:
        path = tempfile.mkdtemp(prefix=prefix, dir=parent)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        made = cls(path, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try_socket(f"{path}/{_LONGEST_NAME}")
        except OSError:
            made.remove()
            raise
        return made


def socket_directories() -> tuple[Path, ...]:
    """Return those that processes of this user with this temporary directory have made, and no other user can enter.

    By name. What a killed process has left is among them until another one removes it.
    """
    return tuple(
        path
        for parent, prefix in _places()
        for path in sorted(Path(parent).glob(f"{prefix}*"))
        if "-" not in path.name.removeprefix(prefix) and is_private(path)
    )


def _places() -> list[tuple[str, str]]:
    """Return where directories are made, and what their names begin with there: a mark of the temporary directory."""
    own = os.path.realpath(tempfile.gettempdir())
    mark = hashlib.sha256(os.fsencode(own)).hexdigest()[:8]
    return [(own, _PREFIX), *([] if own == os.path.realpath(FALLBACK) else [(FALLBACK, f"{_PREFIX}{mark}-")])]


def bounded_http(base: Any, most: int, door: Door | None, *, bodies: bool = False) -> type[Any]:
    """Return uvicorn's protocol ``base`` with ``most`` connections, each with `REQUEST_S` for a request's headers.

    One more ends the oldest that waits for its request; where all are being answered, it is ended itself. They are no
    more than half of the descriptors. With ``bodies`` those have to come in that time too. ``door`` bounds connections
    that have not come so far, with TLS.
    """
    most = min(most, _most_files() // 2)

    class Bounded(base):  # type: ignore[misc]
        _by: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            ended = None
            if len(self.connections) >= most:
                waiting = (each for each in self.connections if each.waits)
                ended = min(waiting, key=Bounded.since, default=self)
            super().connection_made(transport)
            self.watch()
            if door is not None:
                door.shown("tcp:{}:{}".format(*transport.get_extra_info("peername")[:2]))
            if ended is not None:
                ended.transport.abort()

        def connection_lost(self, error: Exception | None) -> None:
            self._cancel()
            super().connection_lost(error)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.watch()

        @property
        def waits(self) -> bool:
            """Whether no request of it is being answered, or has its body read, which counts without ``bodies``."""
            return self.cycle is None or self.cycle.response_complete or (bodies and self.cycle.more_body)

        def since(self) -> float:
            return 0.0 if self._by is None else self._by.when()

        def watch(self) -> None:
            self._cancel()
            self._by = self.loop.call_later(REQUEST_S, self._too_late)

        def _cancel(self) -> None:
            if self._by is not None:
                self._by.cancel()

        def _too_late(self) -> None:
            if self.waits:
                self.transport.abort()

    return Bounded


UNSHOWN_BYTES = 128 << 20
"""So much may all connections have sent that have not shown the token: gRPC holds a message whole before it asks."""

MOST_UNSHOWN, LEAST_UNSHOWN = 1_024, 8

Peer = tuple[str, str]
"""A host and a port."""


class Doorkeeper:
    """Decides which connections to a server end that have not shown the token. Rules: the clock is passed in.

    All together they have half of the descriptors that nothing else uses, and `UNSHOWN_BYTES`; one that sends nothing
    for `REQUEST_S` ends as well.
    """

    def __init__(self) -> None:
        self._shown: Set[Peer] = set()
        # What each has sent, and since when no more; the oldest first.
        self._unshown: dict[Peer, tuple[int, float]] = {}

    def look(self, there: Mapping[Peer, int], shown: Set[Peer], free: int, now: float) -> list[Peer]:
        """Return whom to end.

        ``there`` has who is connected and how many bytes each has sent, ``shown`` who has shown the token since the
        last look, ``free`` how many descriptors are.
        """
        self._shown = there.keys() & (self._shown | shown)
        before, self._unshown = self._unshown, {}
        for peer in (*(each for each in before if each in there), *there):
            if peer not in self._shown:
                sent, since = before.get(peer, (-1, now))
                self._unshown[peer] = there[peer], (since if sent == there[peer] else now)
        ended = [peer for peer, (_, since) in self._unshown.items() if now - since >= REQUEST_S]
        left = [peer for peer, (_, since) in self._unshown.items() if now - since < REQUEST_S]
        most = max(LEAST_UNSHOWN, min(MOST_UNSHOWN, (free + len(self._unshown)) // 2))
        over = max(len(left) - most, 0)
        ended += left[:over]
        held = sum(there[peer] for peer in left[over:])
        for peer in sorted(left[over:], key=there.__getitem__, reverse=True):
            if held > UNSHOWN_BYTES:
                held -= there[peer]
                ended.append(peer)
        return ended


class Door:
    """Ends those connections to a TCP port of this process that a `Doorkeeper` names, by a thread, until `close`.

    It takes no descriptor while it works: there may be none.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._keeper = Doorkeeper()
        self._shown: deque[str] = deque()
        self._nothing, self._hand = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="ftlayer-door", daemon=True).start()

    def shown(self, peer: str) -> None:
        """Tell that ``peer``, as gRPC has it (``"ipv6:%5B::1%5D:80"``), has shown the token."""
        self._shown.append(peer)

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        with self._nothing, self._hand:
            took_s = 0.0
            while not self._closed.wait(max(_LOOK_S, 20 * took_s)):
                now = time.monotonic()
                self._look(now)
                took_s = time.monotonic() - now

    def _look(self, now: float) -> None:
        # First of all: who has shown the token by now is connected.
        said = {self._shown.popleft() for _ in range(len(self._shown))}
        shown = {_peer(*unquote(each.partition(":")[2]).rpartition(":")[::2]) for each in said}
        limit = _most_files()
        try:
            files: Collection[int] = [int(name) for name in os.listdir("/dev/fd")]
        except OSError:  # no descriptor is free
            files = range(min(limit, _MOST_FILES))
        found: dict[Peer, int] = {}
        there: dict[Peer, int] = {}
        for file in files:
            with contextlib.suppress(OSError):  # what is none of its connections, or has ended meanwhile
                peer, sent = _connection(file, self._port)
                found[peer], there[peer] = file, sent
        for peer in self._keeper.look(there, shown, max(limit - len(files), 0), now):
            self._end(found[peer], peer)

    def _end(self, file: int, peer: Peer) -> None:
        """End a connection by a copy of its descriptor, which may be another one's by now."""
        with contextlib.suppress(OSError):
            os.dup2(file, self._hand.fileno(), inheritable=False)
            if _peer(*self._hand.getpeername()[:2]) == peer:
                self._hand.shutdown(socket.SHUT_RDWR)
        os.dup2(self._nothing.fileno(), self._hand.fileno(), inheritable=False)


_LOOK_S = 0.2
_MOST_FILES = 1 << 16
_INFO_BYTES, _RECEIVED = 136, 128  # of Linux's struct tcp_info, and where tcpi_bytes_received is in it


def _most_files() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _connection(file: int, port: int) -> tuple[Peer, int]:
    """Return the other end of a connection to ``port``, and what that has sent (0 where the system does not say).

    OSError where the descriptor is none of one.
    """
    # Of a family whose addresses are long enough for all.
    looked_at = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, file)
    try:
        name = looked_at.getsockname()
        if not isinstance(name, tuple) or name[1] != port:
            raise OSError(errno.ENOTCONN, "a connection to somewhere else")
        sent = 0
        if sys.platform == "linux":
            info = looked_at.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            (sent,) = struct.unpack_from("Q", info, _RECEIVED)
        return _peer(*looked_at.getpeername()[:2]), sent
    finally:
        looked_at.detach()


def _peer(host: str, port: str | int) -> Peer:
    return host.strip("[]").partition("%")[0].removeprefix("::ffff:"), str(port)


def try_socket(path: str) -> None:
    if not is_socket_path(path):
        raise OSError(errno.ENAMETOOLONG, f"{path} is too long for a socket, or has odd characters")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(path)
    Path(path).unlink()


def check_socket_free(path: str, option: str) -> None:
    """Raise `ConfigError` unless a server may listen at ``path``, whose directory has to be private.

    `MachineError` where another server does; a socket that a killed one has left is no hindrance.
    """
    directory = Path(path).parent
    try:
        status = directory.stat()
    except OSError as error:
        raise ConfigError(f"{option}: {directory}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
        raise ConfigError(
            f"{option}: {directory} has to be a directory of yours that other users cannot enter, or they could "
            f"connect: mkdir -m 700, or chmod 700"
        )
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno == errno.ECONNREFUSED and Path(path).is_socket():
            return
        raise ConfigError(f"{option}: cannot listen at {path}: {error.strerror}") from error
    raise MachineError(
        f"{option}: cannot listen at {path}: another server does; stop that, or name another place"
    )


def cannot_listen(option: str, place: object, error: OSError) -> FTLayerError:
    """Return the error for an address that cannot be listened on: `MachineError` where another process has it."""
    if error.errno == errno.EADDRINUSE:
        return MachineError(
            f"{option}: cannot listen on {place}: another process does; stop that, or name another port"
        )
    return ConfigError(f"{option}: cannot listen on {place}: {error.strerror or error}")


def _remove(path: str, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # and not a process forked from it
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove what processes of this user have left that were killed.

    One that links to a file which is there, as to what lets tools in to a store, is spared for `KEPT_S`: by it tools
    tell who was killed.
    """
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _unused(path) as age_s:
            if age_s > KEPT_S or not any(each.is_symlink() and each.exists() for each in path.iterdir()):
                shutil.rmtree(path)


def remove_left(path: Path) -> None:
    """Remove a directory that a killed process has left; one that is in use, or was just made, stays."""
    with contextlib.suppress(OSError), _unused(path):
        shutil.rmtree(path)


@contextlib.contextmanager
def _unused(path: Path) -> Iterator[float]:
    """Lock a directory, and give its age in seconds; OSError where it is in use, or not one to be removed."""
    with unused(path, os.O_DIRECTORY) as status:
        age_s = time.time() - status.st_mtime
        if age_s < _YOUNG_S:
            raise PermissionError(errno.EPERM, "not left behind")
        yield age_s
