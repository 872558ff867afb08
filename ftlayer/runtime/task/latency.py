"""End-to-end latency: sources send markers behind their batches, and sinks see how long these took.

A marker goes where records go and waits where they wait, so its age at a sink is that of the records before it. It is
one frame a second for each source's subtask, whatever the rate of records; no record and no batch carries a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ftlayer.clock import Now
from ftlayer.functions.failures import RowFailure
from ftlayer.handler.xor import XorHandler
from ftlayer.histogram import Histogram
from ftlayer.records.ids import U64Array
from ftlayer.runtime.protocol.elements import LatencyMarker
from ftlayer.runtime.task.actions import Acknowledge, Action, FailRoots, Send
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.vertex.calls import Failure


def reports(xor: XorHandler) -> list[Action]:
    """Take what failed and what was settled since the last call; failures first, so that no root of theirs is open."""
    actions: list[Action] = []
    failures = xor.failures()
    if failures:
        actions.append(FailRoots(failures))
    events = xor.events()
    if events is not None:
        actions.append(Acknowledge(events.roots, events.values, events.ids))
    return actions


def failures_of(roots: U64Array, failures: Iterable[RowFailure]) -> tuple[Failure, ...]:
    """Return failures of new roots; ``row`` counts in ``roots``."""
    return tuple(Failure.of(int(roots[failure.row]), failure) for failure in failures)


EVERY_MS = 1_000
"""A subtask of a source sends one marker in so long, at most."""


class SourceMarkers:
    """Says when a source's subtask sends a marker: behind a batch alone, so that what rests goes on resting."""

    def __init__(self, emitter: Emitter, uid: str) -> None:
        """``uid`` is the source's; ``emitter`` is that of its subtask."""
        self._emitter = emitter
        self._uid = uid
        self._next_ms: int | None = None

    def behind(self, rows: int, now: Now, root: int = 0) -> list[Send]:
        """Return what is to be sent behind the batches of so many rows that were read now; ``root`` is one of them."""
        if not rows or (self._next_ms is not None and now.mono_ms < self._next_ms):
            return []
        self._next_ms = now.mono_ms + EVERY_MS
        return self._emitter.marker(LatencyMarker(self._uid, now.wall_ms, root))


class SinkLatencies:
    """How old the records of each source are when a sink is done with them.

    Attributes:
        histograms: by source. Another thread may look.
    """

    def __init__(self) -> None:
        self.histograms: dict[str, Histogram] = {}
        self._waiting: deque[tuple[int, LatencyMarker]] = (
            deque()
        )  # with how many rows have to be settled first

    def came(self, marker: LatencyMarker, now: Now, *, given: int = 0, settled: int = 0) -> None:
        """Take a marker; the sink was given so many rows before it, and has settled some of them."""
        if given > settled:
            self._waiting.append((given, marker))
        else:
            self._observe(marker, now)

    def look(self, settled: int, now: Now) -> None:
        """Observe markers all of whose rows the sink has settled before ``now``."""
        while self._waiting and self._waiting[0][0] <= settled:
            self._observe(self._waiting.popleft()[1], now)

    def is_due(self, settled: int) -> bool:
        return bool(self._waiting) and self._waiting[0][0] <= settled

    def _observe(self, marker: LatencyMarker, now: Now) -> None:
        # A new dict: another thread may go through the old one.
        if marker.source not in self.histograms:
            self.histograms = {**self.histograms, marker.source: Histogram()}
        seconds = (now.wall_ms - marker.wall_ms) / 1_000
        self.histograms[marker.source].observe(seconds, root=marker.root, at_ms=now.wall_ms)
