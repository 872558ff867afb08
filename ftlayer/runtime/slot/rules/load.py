"""How busy the subtasks of a slot are, what holds them up, and what waits for them: measured, never by record."""

from __future__ import annotations

from collections import Counter

from ftlayer.runtime.slot.rules.core import SlotCore
from ftlayer.runtime.slot.rules.subtask import Seat
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.vertex.calls.jobs import EdgeDetails, SubtaskDetails


class BusyTimes:
    """How long each task has run, in ns of one monotone clock. The loop's thread writes, any thread reads."""

    __slots__ = ("_running", "_totals")

    def __init__(self) -> None:
        self._totals: dict[TaskKey, int] = {}
        self._running: tuple[TaskKey, int] | None = None

    def began(self, key: TaskKey, now_ns: int) -> None:
        self._running = key, now_ns

    def ended(self, now_ns: int) -> None:
        running = self._running
        if running is not None:
            key, since_ns = running
            # First: one who reads in between misses this run until the next time, and never counts it twice.
            self._running = None
            self._totals[key] = self._totals.get(key, 0) + now_ns - since_ns

    def totals(self, now_ns: int) -> dict[TaskKey, int]:
        """Return how long each task has run; one that runs now, up to now."""
        running = self._running
        totals = dict(self._totals)
        if running is not None and running is self._running:
            key, since_ns = running
            totals[key] = totals.get(key, 0) + max(0, now_ns - since_ns)
        return totals


class LoadMeter:
    """Measures the subtasks of a slot between two calls of `measure`. One thread's, which is not the loop's."""

    def __init__(self, core: SlotCore, busy: BusyTimes, now_ns: int) -> None:
        self._core = core
        self._seats = seats = core.seats
        self._busy = busy
        self._since_ns = now_ns
        self._busy_before = busy.totals(now_ns)
        self._counted_before = [(seat.records_in, seat.records_out) for seat in seats]
        self._samples = 0
        self._stalled: Counter[TaskKey] = Counter()

    def sample(self) -> None:
        """Note who cannot go on: to be called some times a second."""
        self._samples += 1
        for seat in self._seats:
            if self._core.is_stalled(seat):
                self._stalled[seat.key] += 1

    def measure(self, now_ns: int) -> tuple[SubtaskDetails, ...]:
        passed_ns = max(1, now_ns - self._since_ns)
        busy = self._busy.totals(now_ns)
        loads = tuple(
            self._load(seat, before, busy.get(seat.key, 0), passed_ns)
            for seat, before in zip(self._seats, self._counted_before, strict=True)
        )
        self._since_ns, self._busy_before = now_ns, busy
        self._counted_before = [(load.records_in, load.records_out) for load in loads]
        self._samples = 0
        self._stalled.clear()
        return loads

    def _load(self, seat: Seat, before: tuple[int, int], busy_ns: int, passed_ns: int) -> SubtaskDetails:
        taken, sent = seat.records_in, seat.records_out
        worked_ns = busy_ns - self._busy_before.get(seat.key, 0)
        return SubtaskDetails(
            uid=seat.uid,
            slot=self._core.slot,
            records_in=taken,
            records_out=sent,
            in_per_s=(taken - before[0]) * 1e9 / passed_ns,
            out_per_s=(sent - before[1]) * 1e9 / passed_ns,
            busy=min(1.0, max(0.0, worked_ns / passed_ns)),
            back_pressured=self._stalled[seat.key] / max(1, self._samples),
            watermark_ms=seat.watermark_ms,
            late=seat.late,
        )


def edge_loads(core: SlotCore) -> tuple[EdgeDetails, ...]:
    """Return what waits for the subtasks of a slot, by the edges that lead to them; any thread may ask.

    Edges between the same two chains are one.
    """
    sizes, rows = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for seat in core.seats:
        for channel, size, count in seat.inbox.queued():
            ends = core.graph.edges[channel.edge].source, seat.uid
            sizes[ends] += size
            rows[ends] += count
    return tuple(EdgeDetails(*ends, core.slot, size, rows[ends]) for ends, size in sizes.items())
