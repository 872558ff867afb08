"""The board of a program whose jobs no vertex tracks: the vertex's rules over memory, behind a small server.

It is found as an embedded vertex is: by an access file in a directory that no other user can enter. It ends with the
program, and what it knows with it.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from pyarrow import flight

from ftlayer import __version__
from ftlayer.checkpoint.storage.report import put_report
from ftlayer.common.clock import Now, system_now
from ftlayer.common.printable import shown_url
from ftlayer.errors import (
    FTLayerError,
    MalformedRequestError,
    ProtocolError,
    StaleOwnerError,
    StorePathError,
    UnknownJobError,
    UnsupportedError,
)
from ftlayer.monitor.announcer import JobAnnouncer, Telling
from ftlayer.transport.flight_connection import TokenServer, flight_error
from ftlayer.transport.sockets import SocketDirectory
from ftlayer.vertex import calls
from ftlayer.vertex.metrics.catalogue import Families
from ftlayer.vertex.rules import audit
from ftlayer.vertex.rules.board import Board
from ftlayer.vertex.service.directory import FOUND_ACCESS_FILE, AccessFile, write_access
from ftlayer.vertex.service.metrics import Metrics, board_families
from ftlayer.vertex.service.otlp import OtlpMetrics
from ftlayer.vertex.store.key_value import WriteTransaction
from ftlayer.vertex.store.memory import MemoryStore
from ftlayer.vertex.wire.frames import decode_call, encode_health, encode_reply

logger = logging.getLogger(__name__)


EVERY_S = 10.0


class ReportKeeper:
    """Keeps the reports of a program's jobs in their checkpoint directories, for when the driver is gone.

    It is a board that gives no orders: announced to by a thread of its own, since a file system may be slow.
    """

    def __init__(self, *, every_s: float = EVERY_S) -> None:
        """``every_s``: the pause between two reports of a job. Starts nothing."""
        self._lock = threading.Lock()
        self._directories: dict[str, str] = {}
        self._announcer = JobAnnouncer(self, every_s=every_s)

    def add(self, telling: Telling, directory: str) -> None:
        """Keep the reports of a job below ``directory`` from now on, until it is over."""
        with self._lock:
            self._directories[telling.run] = directory
        self._announcer.add(telling)

    def close(self) -> None:
        self._announcer.close()

    def call(self, call: calls.AnsweredBy[calls.R], *, deadline_ms: int = 0) -> calls.R:
        expected = call.expected
        if not isinstance(call, calls.AnnounceJob):
            raise UnsupportedError(f"{type(call).__name__}: reports are kept here, and nothing is asked for")
        job = call.job
        with self._lock:
            directory = self._directories[job.run]
        put_report(directory, job)
        if job.final:
            with self._lock:
                del self._directories[job.run]
        return expected(calls.Announced((), 0, wants_plan=True))


_program_of_kept_reports = ReportKeeper()


def kept_reports() -> ReportKeeper:
    return _program_of_kept_reports


MAX_MESSAGE_BYTES = 1 << 20
MAX_STORE_BYTES = 64 << 20
CLOSE_TIMEOUT_S = 2.0

# What the rules raise before they change anything.
_REFUSALS = (MalformedRequestError, ProtocolError, StaleOwnerError, UnknownJobError)

T = TypeVar("T")


class LocalBoard:
    """A board in this process; any thread may call it. It reads the clock that it is given."""

    def __init__(self, now: Callable[[], Now] = system_now) -> None:
        self._now = now
        self._store = MemoryStore(MAX_STORE_BYTES)
        self._lock = threading.Lock()
        self._board = self._recovered()
        self._run: dict[str, str] = {}
        self.on_jobs: Callable[[str], None] = lambda jobs: None

    def call(self, call: calls.AnsweredBy[calls.R], *, deadline_ms: int = 0) -> calls.R:
        """Answer one call, at once.

        Raises what the board raises, and `UnsupportedError` for what only a vertex can do.
        """
        expected = call.expected
        with self._lock:
            now = self._now()
            due_ms = self._board.next_tick_ms(now)
            if due_ms is not None and due_ms <= now.mono_ms:
                self._change(lambda txn: self._board.tick(txn, now))
            match call:
                case calls.AnnounceJob():
                    reply: calls.Reply = self._change(lambda txn: self._board.announce(txn, call, "", now))
                    self._note(call.job)
                case calls.AskJob():
                    reply = self._change(lambda txn: self._board.ask(txn, call, now))
                case calls.ListJobs():
                    reply = self._board.jobs(now)
                case calls.GetJob():
                    with self._store.read() as txn:
                        reply = self._board.job(txn, call, now)
                case calls.ListAudit():
                    with self._store.read() as txn:
                        reply = audit.page(txn, call)
                case calls.GetHour() if call.owner:
                    reply = self._board.hour(call.owner, now)
                case _:
                    raise UnsupportedError(
                        f"{type(call).__name__}: this is the board of a program without a vertex; it knows of jobs and "
                        "keeps no records"
                    )
        return expected(reply)

    def _note(self, job: calls.JobDetails) -> None:
        before = dict(self._run)
        if job.final:
            self._run.pop(job.run, None)
        else:
            kept = f" with checkpoints in {shown_url(job.kept_in)}" if job.kept_in else ""
            self._run[job.run] = f"{job.name or job.owner}{kept}"
        if self._run != before:
            self.on_jobs(", ".join(self._run.values()))

    def _change(self, change: Callable[[WriteTransaction], T]) -> T:
        """Let the rules change something. A refusal has changed nothing; after anything else memory is read anew."""
        refused: FTLayerError
        try:
            with self._store.write(intake=False) as txn:
                try:
                    return change(txn)
                except _REFUSALS as error:
                    refused = error
        except BaseException:
            self._board = self._recovered()
            raise
        raise refused

    def _recovered(self) -> Board:
        with self._store.read() as txn:
            return Board(self._store, txn, self._now())


class BoardServer(TokenServer):
    """Serves a `LocalBoard`, as a vertex serves calls (`ftlayer.vertex.service.serve`), by ``DoAction`` alone."""

    def __init__(self, board: LocalBoard, sockets: SocketDirectory) -> None:
        """Listen in a directory, with a token made for it, and let tools find it.

        Raises `StorePathError`, and what `TokenServer` raises.
        """
        self._board = board
        self._sockets = sockets
        self._pid = os.getpid()
        token = secrets.token_urlsafe(32)
        super().__init__(sockets.socket("board"), token=token, certificate=None, client_ca=None)
        # Behind Flight's own, so that it is called before that.
        atexit.register(self.close)
        self._access = AccessFile(str(self.address), token, None, None, os.getpid())
        try:
            write_access(Path(sockets.path) / FOUND_ACCESS_FILE, self._access)
        except StorePathError:
            self.close()
            raise
        board.on_jobs = self._name_jobs

    def _name_jobs(self, jobs: str) -> None:
        try:
            write_access(Path(self._sockets.path) / FOUND_ACCESS_FILE, replace(self._access, job=jobs))
        except StorePathError as error:
            logger.warning("tools do not know what this program runs once it is killed: %s", error)

    def close(self) -> None:
        """Answer no more, and leave nothing behind. In a forked process: do nothing."""
        if self._pid != os.getpid():
            return
        atexit.unregister(self.close)
        self.stop(CLOSE_TIMEOUT_S)
        self._sockets.remove()

    def list_actions(self, context: flight.ServerCallContext) -> list[tuple[str, str]]:
        return [("call", "one call about jobs, as a msgpack frame"), ("health", "whether the board is up")]

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[bytes]:
        try:
            if action.type == "call":
                yield self._run(action.body)
            elif action.type == "health":
                yield encode_health(incarnation=1, shards=1, max_message_bytes=MAX_MESSAGE_BYTES, exact=False)
            else:
                raise MalformedRequestError(f"action: no action {action.type!r}; there are call, health")
        except FTLayerError as error:
            raise flight_error(error) from error

    def _run(self, frame: pa.Buffer) -> bytes:
        if frame.size > MAX_MESSAGE_BYTES:
            raise MalformedRequestError(f"message of {frame.size} bytes: the limit is {MAX_MESSAGE_BYTES}")
        call, _ = decode_call(frame)
        return encode_reply(self._board.call(call))


class _Program:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._board = LocalBoard()
        self._announcer: JobAnnouncer | None = None
        self._server: BoardServer | None = None
        self._endpoints: dict[int, Metrics] = {}
        self._otlp: OtlpMetrics | None = None

    def tell(self, host: str, port: int) -> None:
        with self._lock:
            if port not in self._endpoints:
                self._endpoints[port] = Metrics(self._counted, host, port).__enter__()

    def push(self, endpoint: str | None) -> None:
        with self._lock:
            if self._otlp is None:
                self._otlp = OtlpMetrics(self._families, endpoint, "ftlayer-driver").__enter__()
                atexit.register(self._otlp.stop)

    def _counted(self) -> Families:
        return self._families() if self._otlp is None else self._otlp.counted()

    def _families(self) -> Families:
        return board_families(self._board.call, __version__)

    def announcer(self) -> JobAnnouncer:
        with self._lock:
            if self._announcer is None:
                self._server = _served(self._board)
                self._announcer = JobAnnouncer(self._board)
            return self._announcer


def _served(board: LocalBoard) -> BoardServer | None:
    """Let tools find a board; where that cannot be, jobs run all the same, and the log says it."""
    sockets = SocketDirectory.make("tools do not find the jobs of this program")
    if sockets is None:
        return None
    try:
        return BoardServer(board, sockets)
    except (pa.ArrowException, OSError, StorePathError) as error:
        logger.warning("tools do not find the jobs of this program: %s", error)
        sockets.remove()
        return None


_program = _Program()


def local_announcer() -> JobAnnouncer:
    return _program.announcer()


def tell_prometheus(host: str, port: int) -> None:
    """Let Prometheus ask, for as long as the program runs, what its jobs that no vertex tracks are doing.

    Raises `ConfigError` for a port that cannot be listened on.
    """
    _program.tell(host, port)


def push_otlp(endpoint: str | None) -> None:
    """Push to a collector, for as long as the program runs, what its jobs that no vertex tracks are doing.

    ``endpoint`` as `TopologyOptions.otlp_endpoint`; of two topologies of a program the first one's counts.
    Raises `ConfigError` where the SDK is missing and an option asks for it, and for odd variables.
    """
    _program.push(endpoint)


def _begin_anew() -> None:
    global _program
    _program = _Program()


os.register_at_fork(after_in_child=_begin_anew)
