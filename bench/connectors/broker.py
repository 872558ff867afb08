"""What is measured of a source: a broker with messages, the client's bare loop, and ours."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

FETCHED = 1_000
"""Messages that the bare loops ask for at a time."""

BODY = b"x" * 100
"""Of each message."""


class Broker(Protocol):
    """A server with messages."""

    def fill(self, messages: int) -> None:
        """Have so many messages, and no others, for the next one who reads."""

    def bare(self, messages: int) -> float:
        """Read so many by the client alone; return how long it took, in seconds."""

    def source(self) -> Any:
        """Return ours."""


@dataclass(frozen=True)
class Served:
    """A broker that can be started: ``program`` has to be installed, ``start`` runs it with its data below a path.

    ``at_least``: target of ours ÷ the client's.
    """

    program: str
    start: Callable[[Path], AbstractContextManager[Broker]]
    at_least: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
