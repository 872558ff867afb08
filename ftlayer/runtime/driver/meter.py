"""Counters of all instances together, and how fast they grow."""

from __future__ import annotations

from collections import Counter, deque

from ftlayer.vertex.calls import StreamStatus

# Rates are those of the last seconds: long enough to be steady at one heartbeat a second.
WINDOW_MS = 5_000

IN = "records_in"
"""The counter of records that sources have read."""

NOW = ("waiting/", "waiting_bytes/", "paused/", "lag/", "away/")
"""What counters begin with that say how it is now, and are no totals; the uid of a chain follows, or of a source."""

DONE = "done"
"""The counter of a tracked job's records that came to be done."""


class Meter:
    """Sums the totals that instances and the vertex report; what a lost one had counted stays in."""

    def __init__(self) -> None:
        self._latest: dict[str, dict[str, int]] = {}
        self._totals: Counter[str] = Counter()
        self._before: StreamStatus | None = None
        self._done_in_vertex = 0
        self._done = 0
        self._taken = 0
        self._samples: deque[tuple[int, Counter[str]]] = deque()

    def update(self, instance: str, counters: dict[str, int], now_ms: int) -> None:
        """Take an instance's totals, which only grow; what is no total is left out."""
        before = self._latest.get(instance, {})
        counters = {name: value for name, value in counters.items() if not name.startswith(NOW)}
        for name, value in counters.items():
            self._totals[name] += value - before.get(name, 0)
        self._latest[instance] = counters
        if not self._samples or now_ms - self._samples[-1][0] >= WINDOW_MS // 20:
            self._samples.append((now_ms, self._totals.copy()))
        while len(self._samples) > 2 and now_ms - self._samples[1][0] >= WINDOW_MS:
            self._samples.popleft()

    def update_vertex(self, status: StreamStatus, now_ms: int) -> None:
        """Take what the vertex holds, and has seen done since its start, which may be later than the last time.

        The first time is that of before the job.
        """
        if self._before is None:
            self._before, self._done_in_vertex = status, status.done
        self._done += status.done - (self._done_in_vertex if status.done >= self._done_in_vertex else 0)
        self._done_in_vertex = status.done
        self._taken = self._done + _held(status) - _held(self._before)
        self.update("", {DONE: self._done}, now_ms)

    @property
    def totals(self) -> dict[str, int]:
        """All counters.

        The records that came in are at least those that the vertex has taken: reports of slots are up to a heartbeat
        old, and what a lost one had read since its last is in none.
        """
        totals = dict(self._totals)
        if self._before is not None:
            totals[IN] = max(totals.get(IN, 0), self._taken)
        return totals

    def rates(self, now_ms: int) -> dict[str, float]:
        """Return the counters per second, over the last seconds up to now."""
        if not self._samples:
            return {}
        since_ms, then = self._samples[0]
        passed = max(now_ms - since_ms, 1)
        return {name: (value - then[name]) * 1_000 / passed for name, value in self._totals.items()}


def _held(status: StreamStatus) -> int:
    """Return how many records the vertex holds, in whatever state."""
    return status.pending + status.due + status.waiting + status.dead
