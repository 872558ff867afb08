"""Between a driver and a child process of it: one line each way, and the end of one is that of the other."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import threading
import time
from dataclasses import dataclass
from typing import IO

from ftlayer.config import ServeOptions, VertexOptions

# A process forked by the driver may hold the other end of stdin, so that its end does not come.
PARENT_CHECK_S = 1.0


@dataclass(frozen=True)
class ChildOrder:
    """What the vertex process is to do. It has the token, so it travels through a pipe and not in argv."""

    options: ServeOptions

    def to_line(self) -> bytes:
        """Return the order as a line of JSON."""
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

    def to_line(self) -> str:
        """Return the report as a line of JSON."""
        return json.dumps(dataclasses.asdict(self)) + "\n"

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
