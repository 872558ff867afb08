"""Servers of the tests' own: programs on a free port and in a directory of their own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from programs import find_program

DEADLINE_S = 600.0
POLL_S = 0.02
PORTS = range(10_000, 30_000)


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition; returns what it returned."""
    give_up = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < give_up, f"{what}: not in time"
        time.sleep(POLL_S)
    return found


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """Return a port that is free, below those that the system gives to connections: a server takes seconds to start."""
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class Server:
    """A program that listens on a port of its own and keeps its data in a directory of its own."""

    program: str
    directory: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def is_ready(self) -> bool:
        raise NotImplementedError

    @property
    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        until(self._is_up, f"start of {self.program}")

    def _is_up(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.directory / "log").read_text("utf-8", "replace")
        return self.is_ready()

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait(60)

    def close(self) -> None:
        """End what was started beside the server."""

    def restart(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.end(how)
        self.start()


class Link:
    """A port that leads to another one, until it is cut: to who has connected the server is away, and has not ended."""

    def __init__(self, to: int) -> None:
        self.port, self._to = free_port(), to
        self._ends: list[socket.socket] = []
        self.mend()

    def mend(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        self._ends = [listener]
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        """End all connections; none is taken any more."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends[0].close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._ends += (near, far)
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)


def started(kind: type[Server], named: str, library: str) -> Iterator[Any]:
    """A running server for the tests of a file. It ends with them: some take up half a core while nothing is asked."""
    pytest.importorskip(library)
    found = find_program(named)
    directory = Path(tempfile.mkdtemp(prefix=f"ftlayer-{Path(found).name}-"))
    server = kind(found, directory)
    try:
        server.start()
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.end(signal.SIGKILL)
        server.close()
        shutil.rmtree(directory, ignore_errors=True)
