"""The vertex as a child process of the driver: started, watched, and started again."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import secrets
import select
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ftlayer.config import CLIENT_DEADLINE_MS, ServeOptions, VertexOptions
from ftlayer.errors import FTLayerError, StorePathError, VertexError, error_for_code
from ftlayer.transport.address import Address, is_loopback, parse_address
from ftlayer.transport.sockets import SocketDirectory
from ftlayer.vertex.client.client import VertexClient
from ftlayer.vertex.service import directory

logger = logging.getLogger(__name__)


# A process forked by the driver may hold the other end of stdin, so that its end does not come.
PARENT_CHECK_S = 1.0


@dataclass(frozen=True)
class ChildOrder:
    """What the vertex process is to do. It has the token, so it travels through a pipe and not in argv."""

    options: ServeOptions

    def to_line(self) -> bytes:
        fields = dataclasses.asdict(self.options)
        fields["vertex"]["path"] = str(fields["vertex"]["path"])
        for name in ("tls_cert", "tls_key", "tls_client_ca"):
            fields[name] = None if fields[name] is None else fields[name].decode()
        return json.dumps(fields).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> ChildOrder:
        fields = json.loads(line)
        for name in ("tls_cert", "tls_key", "tls_client_ca"):
            fields[name] = None if fields[name] is None else fields[name].encode()
        return cls(ServeOptions(**fields | {"vertex": VertexOptions(**fields["vertex"])}))


@dataclass(frozen=True)
class ChildReport:
    """How the start went: an address, or an error's code and message."""

    address: str = ""
    error: str = ""
    message: str = ""

    def tell(self) -> None:
        sys.stdout.write(json.dumps(dataclasses.asdict(self)) + "\n")
        sys.stdout.flush()
        # The pipe has no reader from now on; what is printed goes to the log.
        os.dup2(2, 1)

    @classmethod
    def from_line(cls, line: bytes) -> ChildReport | None:
        """Read a report; None if the process ended without one."""
        return cls(**json.loads(line)) if line.endswith(b"\n") else None


def read_line(pipe: IO[bytes], timeout_s: float) -> bytes:
    """Read up to a newline, the end, or the timeout."""
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([pipe], [], [], max(deadline - time.monotonic(), 0))
        data = os.read(pipe.fileno(), 65_536) if readable else b""
        if not data:
            break
        line += data
    return line


def watch_parent(parent: int, stop: threading.Event) -> None:
    """Set ``stop`` when stdin ends, or when the process ``parent`` is not this one's parent any more."""
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], PARENT_CHECK_S)
        if readable and not os.read(0, 4_096):
            break
    stop.set()


# Compiling the kernels on a machine's first start takes most of it.
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0
# A vertex that dies this often is not being killed from outside, it cannot run.
MAX_RESTARTS = 30
RESTARTS_WITHIN_S = 60.0
PAUSE_S = 1.0
LOG_LINES = 15


class _DiedAtStartError(VertexError):
    """The child ended without a word about its start: killed, or unable to run at all."""


class EmbeddedVertex:
    """A vertex for one job, on this machine, that ends with this process.

    The child has a token made for it. It listens on a Unix socket that other users cannot connect to, or where this
    machine has no room for one (which is logged) on loopback. With a ``host`` (this machine's address, where tasks run
    on other machines) it listens there on TCP; off loopback it has a certificate made for it too. When the child dies,
    another takes its place at the same address with what the store has; its clients go on. When this process dies,
    however that happens, the child stops and leaves the store in order. What it prints goes to ``vertex.log`` in the
    store's directory. While it runs, ``vertex.access`` beside that, which no other user can read, lets tools of this
    user in (`ftlayer.vertex.service.directory`); a killed process leaves it, which is told by its process id.

    Attributes:
        address: where clients find it; "" before `start`.
        token: what clients have to bring.
        root_certs: PEM that clients verify the vertex by; None on this machine.
        client_pem: PEM of the certificate and key that the vertex verifies its clients by; None on this machine.
    """

    def __init__(self, options: VertexOptions, *, host: str | None = None, visits: bool = False) -> None:
        """Start nothing yet. With ``visits``, in an ended program's store: log behind its log, hidden from tools."""
        self._visits = visits
        self._host = host
        self._sockets: SocketDirectory | None = None
        self._vertex_options = options
        self._path = Path(options.path).absolute()
        self.token = secrets.token_urlsafe(32)
        self.root_certs: bytes | None = None
        self.client_pem: bytes | None = None
        self._key: bytes | None = None
        self._client_ca: bytes | None = None
        if host is not None and not is_loopback(host):
            # Late, because most jobs need no certificate.
            from ftlayer.transport.tls import make_certificate

            certificate = make_certificate([host])
            self.root_certs, self._key = certificate.cert, certificate.key
            shown = make_certificate(["ftlayer-client"])
            self._client_ca, self.client_pem = shown.cert, shown.cert + shown.key
        self._lock = threading.Lock()  # guards what follows
        self.address = ""
        self._access: directory.AccessFile | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._failure: VertexError | None = None
        self._restarts: deque[float] = deque()
        self._supervisor: threading.Thread | None = None

    def __enter__(self) -> EmbeddedVertex:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self) -> str:
        """Start the child, return its address when it serves. Raises what kept it from that, or its last words."""
        with self._lock:
            if self._supervisor is not None:
                raise VertexError("this embedded vertex was started before; make another")
            directory.prepare_vertex(self._path)
            directory.check_unheld(self._path)
            try:
                if not self._visits:
                    (self._path / directory.LOG_FILE).unlink(missing_ok=True)
            except OSError as error:
                raise StorePathError(f"{self._path}: {error.strerror}") from error
            self.address = self._spawn(self._first_place())
            if not self._visits:
                self._let_tools_in()
            self._supervisor = threading.Thread(
                target=self._supervise, name="ftlayer-supervisor", daemon=True
            )
            self._supervisor.start()
            return self.address

    def client(self, *, client_id: str | None = None, deadline_ms: int = CLIENT_DEADLINE_MS) -> VertexClient:
        return VertexClient(
            self.address,
            self.token,
            root_certs=self.root_certs,
            client_pem=self.client_pem,
            client_id=client_id,
            deadline_ms=deadline_ms,
        )

    def check(self) -> None:
        """Raise the `VertexError` that ended the restarts, if there is one."""
        if self._failure is not None:
            raise self._failure

    def kill(self) -> None:
        """Kill the child with SIGKILL, as a fault would; the supervisor starts another."""
        process = self._process
        if process is not None:
            process.kill()

    def stop(self) -> None:
        """Let the child finish what it was asked, write everything down and end. A second call does nothing."""
        with self._lock:
            self._stopping = True
            process = self._process
        try:
            # While the child still has the store: the file of the next one must not go.
            self._shut_tools_out()
        finally:
            if process is not None:
                _end(process)
            if self._supervisor is not None:
                self._supervisor.join()
            if self._sockets is not None:
                self._sockets.remove()

    def _let_tools_in(self) -> None:
        access = directory.AccessFile(self.address, self.token, self.root_certs, self.client_pem, os.getpid())
        try:
            directory.write_access(self._path / directory.ACCESS_FILE, access)
            if self._sockets is not None:
                directory.link_access(Path(self._sockets.path), self._path / directory.ACCESS_FILE)
        except StorePathError:
            assert self._process is not None
            _end(self._process)
            raise
        self._access = access

    def _shut_tools_out(self) -> None:
        access, self._access = self._access, None
        if access is not None:
            directory.remove_access(self._path / directory.ACCESS_FILE, access)

    def _first_place(self) -> Address:
        if self._host is not None:
            self._sockets = SocketDirectory.make("tools find this vertex by its store's path alone")
            return Address(self._host)
        self._sockets = SocketDirectory.make()
        return Address("127.0.0.1") if self._sockets is None else self._sockets.socket("vertex")

    def _spawn(self, place: Address) -> str:
        order = ChildOrder(
            ServeOptions(
                vertex=self._vertex_options,
                token=self.token,
                listen=place.listen,
                tls_cert=self.root_certs,
                tls_key=self._key,
                tls_client_ca=self._client_ca,
            )
        )
        with _open_log(self._path / directory.LOG_FILE) as log:
            process = subprocess.Popen(
                # -P: the installed package, not a source tree that happens to be the working directory.
                [sys.executable, "-P", "-m", "ftlayer.vertex.service"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Ctrl-C is for the driver, which stops the vertex when it has done with it.
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self._process = process
        return self._await_report(process, order)

    def _await_report(self, process: subprocess.Popen[bytes], order: ChildOrder) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead, and has no report
            process.stdin.write(order.to_line())
            process.stdin.flush()
        with process.stdout as pipe:
            line = read_line(pipe, START_TIMEOUT_S)
        report = ChildReport.from_line(line)
        if report is not None and report.address:
            return report.address
        process.kill()
        process.wait()
        if report is not None:
            raise error_for_code(report.error)(report.message)
        raise _DiedAtStartError(f"the vertex process ended before it served ({self._last_words()})")

    def _supervise(self) -> None:
        place = parse_address(self.address, "address")
        while True:
            process = self._process
            assert process is not None
            code = process.wait()
            with self._lock:
                if self._stopping:
                    return
                logger.warning("the vertex process ended with code %s; starting another", code)
                self._failure = self._restart(place)
                if self._failure is not None:
                    logger.error("%s", self._failure)
                    return

    def _restart(self, place: Address) -> VertexError | None:
        while True:
            try:
                self._count_restart()
                try:
                    self._spawn(place)
                except OSError as error:
                    if error.errno not in (errno.EMFILE, errno.ENFILE):
                        raise
                    time.sleep(PAUSE_S)  # this process may have a descriptor again in a moment
                    raise _DiedAtStartError(f"the vertex cannot be started now: {error}") from error
                return None
            except _DiedAtStartError as error:
                logger.warning("%s", error)
            except (FTLayerError, OSError) as error:
                return VertexError(f"the vertex could not be started again: {error}")

    def _count_restart(self) -> None:
        now = time.monotonic()
        self._restarts.append(now)
        while self._restarts[0] < now - RESTARTS_WITHIN_S:
            self._restarts.popleft()
        if len(self._restarts) > MAX_RESTARTS:
            raise VertexError(
                f"it ended {len(self._restarts)} times within {RESTARTS_WITHIN_S:.0f} s ({self._last_words()})"
            )

    def _last_words(self) -> str:
        code = None if self._process is None else self._process.returncode
        lines = (self._path / directory.LOG_FILE).read_text("utf-8", "replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"exit code {code}, log {self._path / directory.LOG_FILE}:", *lines])


def _open_log(path: Path) -> IO[bytes]:
    """Open the log to write at its end; it quotes records, so no other user may read it."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def _end(process: subprocess.Popen[bytes]) -> None:
    _end_input(process)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        logger.warning("the vertex did not stop within %s s; killing it", STOP_TIMEOUT_S)
        process.kill()
        process.wait()


def _end_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is dead already
        process.stdin.close()
