"""How many records a rate lets through by now. The clock is the caller's."""

from __future__ import annotations

import math

BURST_MS = 100
"""A bucket holds what its rate gives in this time, one record at least: what was not used before is lost."""


class TokenBucket:
    """A token a record: ``rate`` come in a second, and the bucket begins empty.

    So in any stretch of s seconds at most ``rate`` × s + `capacity` records get through, and at most ``rate`` × s from
    the beginning: making it anew lets no record through earlier.
    """

    def __init__(self, rate: float, now_ms: float) -> None:
        """``now_ms`` is of a clock that never goes back."""
        self.capacity = max(1.0, rate * BURST_MS / 1_000)
        self._per_ms = rate / 1_000
        self._tokens = 0.0
        self._at_ms = now_ms

    def available(self, now_ms: float) -> int:
        self._tokens = min(self.capacity, self._tokens + (now_ms - self._at_ms) * self._per_ms)
        self._at_ms = now_ms
        return int(self._tokens)

    def take(self, records: int) -> None:
        """Let records go, no more than were `available`."""
        self._tokens -= records

    def wait_ms(self, records: float = 1) -> int:
        """Return how long after the last look so many records may go, at most `capacity`: at least 1 ms."""
        missing = min(records, self.capacity) - self._tokens
        return max(1, math.ceil(missing / self._per_ms))
