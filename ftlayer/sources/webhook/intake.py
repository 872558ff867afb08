"""Requests between the server that takes them and the source's reader: each waits until it is durable."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

_ENTRY_BYTES = 512
"""What a request takes besides its body, about."""


@dataclass(eq=False, slots=True)
class Request:
    """What somebody has sent.

    Attributes:
        id: names it in answers and rows.
        time_us: wall clock, when all of it was there.
        path: with the query.
        headers: values of the source's headers; None where it has none.
        body: as it came.
        answer: is done with whether it is durable, in the loop that took it; False: that will not be known.
    """

    id: str
    time_us: int
    path: str
    headers: tuple[bytes | None, ...]
    body: bytes
    answer: asyncio.Future[bool]

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        return _ENTRY_BYTES + len(self.body)


class Intake:
    """See the module. For two threads: the server offers, the reader takes and stores."""

    def __init__(self, max_bytes: int) -> None:
        """Requests of ``max_bytes`` in all may wait, and always one."""
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._new: deque[Request] = deque()
        self._waiting: set[Request] = set()
        self._bytes = 0
        self._coming = 0
        self._is_woken = False
        self._is_closed = False

    def come(self, size: int) -> bool:
        """Bytes of bodies are there (below 0: are no more), whose requests are not; False: there is no room for them.

        One that comes alone always finds room.
        """
        with self._changed:
            if size > 0 and (self._bytes or self._coming) and self._taken + size > self._max_bytes:
                return False
            self._coming += size
        return True

    @property
    def _taken(self) -> int:
        return self._bytes + self._coming

    def offer(self, request: Request) -> bool:
        """Take a request in; False: there is no room now, or none are taken any more."""
        with self._changed:
            if self._is_closed or (self._waiting and self._taken + request.size > self._max_bytes):
                return False
            self._waiting.add(request)
            self._bytes += request.size
            self._new.append(request)
            if len(self._new) == 1:
                self._changed.notify()
        return True

    def take(self, most: int, wait_s: float) -> list[Request]:
        """Return up to ``most`` in the order in which they came; none if there was none for ``wait_s``."""
        with self._changed:
            if not self._new and not self._is_woken:
                self._changed.wait(wait_s)
            self._is_woken = False
            return [self._new.popleft() for _ in range(min(most, len(self._new)))]

    @property
    def untaken(self) -> int:
        """How many were not taken yet."""
        return len(self._new)

    def wake_up(self) -> None:
        """Let `take` return now, for any thread."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def stored(self, requests: Iterable[Request]) -> list[Request]:
        """These are durable. Returns those that wait to hear of it: behind `close` none does."""
        with self._changed:
            known = [request for request in requests if request in self._waiting]
            self._waiting.difference_update(known)
            self._bytes -= sum(request.size for request in known)
        return known

    def close(self) -> list[Request]:
        """Take nothing any more; returns what waits, of which it is not known what becomes."""
        with self._changed:
            self._is_closed = True
            left, self._waiting = list(self._waiting), set()
            self._new.clear()
            self._bytes = 0
        return left
