"""What happened to a job: its losses, restarts and changes of state, the last of them. No clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from ftlayer.runtime.driver.events import JobState
from ftlayer.runtime.driver.slot_record import SlotRecord
from ftlayer.vertex.calls.jobs import Incident

KEPT = 50


class Incidents:
    """Of one execution. Times are of one monotone clock (ms)."""

    def __init__(self) -> None:
        self._last: deque[Incident] = deque(maxlen=KEPT)
        self._state = JobState.STARTING
        self._restarts: dict[int, int] = {}
        self._lost = ""

    def loss(self, text: str, now_ms: int, slot: int = -1) -> None:
        """Something failed. What is said twice in a row is one failure that two have heard of."""
        if text != self._lost:
            self._lost = text
            self._last.append(Incident(now_ms, "loss", text, slot))

    def look(self, state: JobState, slots: Sequence[SlotRecord], reason: str, now_ms: int) -> None:
        """See what has changed; ``reason`` is the last failure, "" for none."""
        for slot in slots:
            if slot.restarts > self._restarts.get(slot.number, 0):
                self._restarts[slot.number] = slot.restarts
                self._lost = ""
                text = f"slot {slot.number} is started again ({slot.restarts})"
                self._last.append(Incident(now_ms, "restart", text, slot.number))
        if state is not self._state:
            why = f": {reason}" if reason and state in (JobState.RECOVERING, JobState.FAILED) else ""
            self._last.append(Incident(now_ms, "state", f"{self._state} → {state}{why}"))
            self._state = state

    def at(self, offset_ms: int) -> tuple[Incident, ...]:
        """Return them, the oldest first, at times later by ``offset_ms``."""
        return tuple(replace(incident, at_ms=incident.at_ms + offset_ms) for incident in self._last)
