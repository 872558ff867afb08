"""Which windows a record of a certain event time belongs to. Times are milliseconds since 1970, and may be negative."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """The times from ``start_ms`` on, ``end_ms`` not included; milliseconds since 1970."""

    start_ms: int
    end_ms: int


@dataclass(frozen=True)
class Fixed:
    """Windows of ``size_ms``, one beginning every ``every_ms``, counted from ``offset_ms``.

    They overlap if ``every_ms`` is less than ``size_ms``, and leave gaps if it is more.
    """

    size_ms: int
    every_ms: int
    offset_ms: int = 0

    def __str__(self) -> str:
        if self.every_ms == self.size_ms:
            return f"tumbling {self.size_ms} ms"
        return f"sliding {self.size_ms} ms every {self.every_ms} ms"

    def starts(self, time_ms: int) -> list[int]:
        """Return the starts of the windows that a time lies in, ascending."""
        last = time_ms - (time_ms - self.offset_ms) % self.every_ms
        if self.every_ms == self.size_ms:
            return [last]
        first = last - (self.size_ms - 1 - (time_ms - last)) // self.every_ms * self.every_ms
        return list(range(first, last + 1, self.every_ms))


@dataclass(frozen=True)
class Session:
    """Windows that begin with a record, and end ``gap_ms`` after the last one that came within the gap."""

    gap_ms: int

    def __str__(self) -> str:
        return f"session {self.gap_ms} ms"


WindowKind = Fixed | Session
