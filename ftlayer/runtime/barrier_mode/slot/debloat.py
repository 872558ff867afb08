"""How much may be in flight towards a task: what it works off in a given time, as Flink's buffer debloating has it.

The less is in flight, the sooner an aligned barrier is through. How fast a task is, is measured while it has
something to do: what it was given, over the time until it asked for more.
"""

from __future__ import annotations

WINDOW_MS = 1_000
"""A measurement is over no less than this."""

FIRST_WINDOW_MS = 200
"""But the first one: until then as little as possible is in flight, since a slow task would need long for more."""

_SMOOTHING = 0.5
_WORTH_TELLING = 0.25
"""A limit that is wrong by less than a quarter stays: telling the senders costs a message each."""


class Debloater:
    """Measures one task.

    The time that a unit (a byte, a row) takes is smoothed, not its inverse: a task that has become slow has too much
    in flight at once, one that has become fast is fed as before for some windows.

    Attributes:
        limit: how much is worked off within the target, between ``least``, where it begins, and ``most``.
    """

    def __init__(self, target_ms: float, least: int, most: int) -> None:
        """What is in flight should be worked off within ``target_ms``."""
        self.limit = least = min(least, most)
        self._target_ms = target_ms
        self._least, self._most = least, most
        self._ms_a_unit: float | None = None
        self._began_ms: int | None = None  # when this window did
        self._busy_since_ms: int | None = None
        self._busy_ms = 0
        self._units = 0

    def taken(self, units: int, now_ms: int) -> bool:
        """The task is given so much, and is done with all before; whether ``limit`` has changed."""
        changed = self._look(now_ms)
        self._busy_since_ms = now_ms
        if self._began_ms is None:
            self._began_ms = now_ms
        self._units += units
        return changed

    def rested(self, now_ms: int) -> bool:
        """The task is done with what it was given, and there is nothing more; whether ``limit`` has changed."""
        if self._busy_since_ms is None:
            return False
        changed = self._look(now_ms)
        self._busy_since_ms = None
        return changed

    def stuck(self, now_ms: int) -> bool:
        """The task is not done with what it was given, and more waits for it; whether ``limit`` has changed.

        To be called now and then while that is so: who takes nothing for a window wants as little as possible.
        """
        if self._busy_since_ms is None:
            return False
        changed = self._look(now_ms)
        self._busy_since_ms = now_ms
        if self._began_ms is None:
            self._began_ms = now_ms
        return changed

    def _look(self, now_ms: int) -> bool:
        if self._busy_since_ms is not None:
            self._busy_ms += now_ms - self._busy_since_ms
        window_ms = FIRST_WINDOW_MS if self._ms_a_unit is None else WINDOW_MS
        if self._began_ms is None or now_ms - self._began_ms < window_ms:
            return False
        if self._units:
            # The clock counts milliseconds: less than one was one at most.
            measured = max(1, self._busy_ms) / self._units
            before = measured if self._ms_a_unit is None else self._ms_a_unit
            self._ms_a_unit = before + _SMOOTHING * (measured - before)
        elif self._busy_ms >= window_ms:
            # Nothing was taken: not the smoothed time, which nothing that is measured would ever bring down.
            self._ms_a_unit = max(self._ms_a_unit or 0.0, self._target_ms / self._least)
        else:
            return False
        self._began_ms, self._busy_ms, self._units = None, 0, 0
        return self._adjust(self._target_ms / self._ms_a_unit)

    def _adjust(self, wanted: float) -> bool:
        limit = int(min(max(wanted, self._least), self._most))
        at_an_end = limit in (self._least, self._most) and limit != self.limit
        if not at_an_end and abs(limit - self.limit) < _WORTH_TELLING * self.limit:
            return False
        self.limit = limit
        return True
