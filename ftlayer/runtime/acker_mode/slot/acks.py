"""XOR events of all tasks of a slot, gathered into few calls."""

from __future__ import annotations

import numpy as np

from ftlayer.handler.xor import joined_values
from ftlayer.records.ids import U64Array
from ftlayer.runtime.task.actions import Acknowledge
from ftlayer.vertex.calls import EventIds

CALL_ROOTS = 1 << 17
"""Events of one call: enough that the call itself costs nothing an event."""

MAX_WAIT_MS = 25
"""An event waits no longer for others: the vertex learns a little later that a record is done, and nothing waits
for that. A busy loop runs a few batches in it."""


class AckBuffer:
    """Events that wait for others."""

    def __init__(self) -> None:
        self._events: list[Acknowledge] = []
        self._count = 0
        self._since_ms: int | None = None

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(self, event: Acknowledge, now_ms: int) -> None:
        if not len(event.roots):
            return
        self._events.append(event)
        self._count += len(event.roots)
        if self._since_ms is None:
            self._since_ms = now_ms

    def roots(self) -> list[U64Array]:
        """Return the roots of the events that wait; may be called by any thread."""
        return [event.roots for event in self._events]

    def is_due(self, now_ms: int) -> bool:
        """Whether there are enough of them, or one has waited long enough."""
        return self._count >= CALL_ROOTS or (
            self._since_ms is not None and now_ms - self._since_ms >= MAX_WAIT_MS
        )

    @property
    def due_ms(self) -> int | None:
        """When the first one has waited long enough; None without any."""
        return None if self._since_ms is None else self._since_ms + MAX_WAIT_MS

    def take(self) -> Acknowledge:
        events, self._events = self._events, []
        self._count, self._since_ms = 0, None
        if len(events) == 1:
            return events[0]
        values = joined_values((event.roots, event.values) for event in events)
        roots = np.concatenate([event.roots for event in events])
        return Acknowledge(roots, values, _joined_ids(events))


def _joined_ids(events: list[Acknowledge]) -> EventIds | None:
    """Return the ids of all events; None unless all of them have ids."""
    parts = [event.ids for event in events if event.ids is not None]
    if len(parts) < len(events):
        return None
    names: dict[str, int] = {}
    owners, offsets, total = [], [np.zeros(1, np.int32)], 0
    for part in parts:
        # Each part numbers its operators itself; -1 means the event's own id, and stays.
        numbers = [names.setdefault(name, len(names)) for name in part.operators]
        owners.append(np.array([*numbers, -1], np.int32)[part.owners])
        offsets.append(part.offsets[1:] + np.int32(total))
        total += len(part.ids)
    ids: U64Array = np.concatenate([part.ids for part in parts])
    return EventIds(ids, np.concatenate(offsets), np.concatenate(owners), tuple(names))
