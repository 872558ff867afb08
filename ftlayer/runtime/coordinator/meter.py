"""Counters of all instances together, and how fast they grow."""

from __future__ import annotations

from collections import Counter, deque

# Rates are those of the last seconds: long enough to be steady at one heartbeat a second.
WINDOW_MS = 5_000

DONE = "done"
"""The counter of a tracked job's records that came to be done."""


class Meter:
    """Sums the totals that instances and the vertex report; what a lost one had counted stays in."""

    def __init__(self) -> None:
        self._latest: dict[str, dict[str, int]] = {}
        self._totals: Counter[str] = Counter()
        self._done_in_vertex: int | None = None
        self._done = 0
        self._samples: deque[tuple[int, Counter[str]]] = deque()

    def update(self, instance: str, counters: dict[str, int], now_ms: int) -> None:
        """Take an instance's totals, which only grow."""
        before = self._latest.get(instance, {})
        for name, value in counters.items():
            self._totals[name] += value - before.get(name, 0)
        self._latest[instance] = counters
        if not self._samples or now_ms - self._samples[-1][0] >= WINDOW_MS // 20:
            self._samples.append((now_ms, self._totals.copy()))
        while len(self._samples) > 2 and now_ms - self._samples[1][0] >= WINDOW_MS:
            self._samples.popleft()

    def update_done(self, done: int, now_ms: int) -> None:
        """Take how many records the vertex has seen done since its start, which may be later than the last time.

        The first number is what was done before the job.
        """
        if self._done_in_vertex is not None:
            self._done += done - (self._done_in_vertex if done >= self._done_in_vertex else 0)
        self._done_in_vertex = done
        self.update("", {DONE: self._done}, now_ms)

    @property
    def totals(self) -> dict[str, int]:
        """All counters."""
        return dict(self._totals)

    def rates(self, now_ms: int) -> dict[str, float]:
        """Return the counters per second, over the last seconds up to now."""
        if not self._samples:
            return {}
        since_ms, then = self._samples[0]
        passed = max(now_ms - since_ms, 1)
        return {name: (value - then[name]) * 1_000 / passed for name, value in self._totals.items()}
