"""How much may be in flight towards a task: what it works off in a given time, as Flink's buffer debloating has it.

The less is in flight, the sooner an aligned barrier is through. How fast a task is, is measured while it has
something to do: bytes it was given, over the time until it asked for more.
"""

from __future__ import annotations

WINDOW_MS = 1_000
"""A measurement is over no less than this."""

LEAST_BYTES = 16 << 10
"""Less on a channel would make batches so small that the task is slow because of them."""

_SMOOTHING = 0.5
_WORTH_TELLING = 0.25
"""A limit that is wrong by less than a quarter stays: telling the senders costs a message each."""


class Debloater:
    """Measures one task.

    The time a byte takes is smoothed, not its inverse: a task that has become slow has too much in flight at
    once, one that has become fast is fed as before for some windows.

    Attributes:
        limit: bytes that may be in flight on each of the task's channels: between `LEAST_BYTES` (or ``most``, if that
            is less) and ``most``, where it begins.
    """

    def __init__(self, target_ms: int, channels: int, most: int) -> None:
        """What is in flight on so many ``channels`` together should be worked off within ``target_ms``."""
        self.limit = most
        self._target_ms = target_ms
        self._channels = channels
        self._least, self._most = min(LEAST_BYTES, most), most
        self._ms_a_byte: float | None = None
        self._began_ms: int | None = None  # when this window did
        self._busy_since_ms: int | None = None
        self._busy_ms = 0
        self._bytes = 0

    def taken(self, size: int, now_ms: int) -> bool:
        """The task is given ``size`` bytes, and is done with those before; whether ``limit`` has changed."""
        changed = self._look(now_ms)
        self._busy_since_ms = now_ms
        if self._began_ms is None:
            self._began_ms = now_ms
        self._bytes += size
        return changed

    def rested(self, now_ms: int) -> bool:
        """The task is done with what it was given, and there is nothing more; whether ``limit`` has changed."""
        if self._busy_since_ms is None:
            return False
        changed = self._look(now_ms)
        self._busy_since_ms = None
        return changed

    def _look(self, now_ms: int) -> bool:
        if self._busy_since_ms is not None:
            self._busy_ms += now_ms - self._busy_since_ms
        if not self._bytes or self._began_ms is None or now_ms - self._began_ms < WINDOW_MS:
            return False
        measured = max(1, self._busy_ms) / self._bytes
        before = measured if self._ms_a_byte is None else self._ms_a_byte
        self._ms_a_byte = before + _SMOOTHING * (measured - before)
        self._began_ms, self._busy_ms, self._bytes = None, 0, 0
        return self._adjust(self._target_ms / self._ms_a_byte / self._channels)

    def _adjust(self, wanted: float) -> bool:
        limit = int(min(max(wanted, self._least), self._most))
        at_an_end = limit in (self._least, self._most) and limit != self.limit
        if not at_an_end and abs(limit - self.limit) < _WORTH_TELLING * self.limit:
            return False
        self.limit = limit
        return True
