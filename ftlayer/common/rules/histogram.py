"""Durations, counted by how long they were: a classic histogram, as Prometheus means it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from ftlayer.common.checks import fast_dataclass

LATENCY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Of what a record or a call takes, in seconds."""

BATCH_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Of what a micro-batch, its phases or a checkpoint take, in seconds."""


@fast_dataclass
class Exemplar:
    """One observation that can be looked up: its value in seconds, the root it is of, and when it was made (Unix)."""

    value: float
    root: int
    at_ms: int


class Histogram:
    """Observations by bucket, their sum, and the last exemplar of each bucket. For one thread at a time.

    ``counts[i]`` are those above ``bounds[i - 1]`` and at most ``bounds[i]``; the last one those above all bounds.
    """

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self.exemplars: list[Exemplar | None] = [None] * len(self.counts)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, seconds: float, count: int = 1, *, root: int = 0, at_ms: int = 0) -> None:
        """Add ``count`` observations of one value; with a ``root``, that one is the bucket's exemplar.

        A negative value counts as 0: two hosts' clocks differ.
        """
        seconds = max(seconds, 0.0)
        bucket = bisect_left(self.bounds, seconds)
        self.counts[bucket] += count
        self.total += seconds * count
        if root:
            self.exemplars[bucket] = Exemplar(seconds, root, at_ms)

    def quantile(self, share: float) -> float:
        """Return the value that so large a share of the observations (0 to 1) is at most, NaN where there is none.

        Observations count as spread evenly over their bucket, as Prometheus has it: above all bounds it is the last.
        """
        wanted, below = share * self.count, 0
        for bucket, count in enumerate(self.counts):
            if count and below + count >= wanted:
                if bucket == len(self.bounds):
                    return self.bounds[-1]
                lower = self.bounds[bucket - 1] if bucket else 0.0
                return lower + (self.bounds[bucket] - lower) * (wanted - below) / count
            below += count
        return math.nan

    def merge(self, other: Histogram) -> None:
        """Add what ``other`` has, and its exemplars where they are later. `ValueError` for other bounds."""
        if other.bounds != self.bounds:
            raise ValueError(f"histograms of bounds {self.bounds} and {other.bounds} cannot be added")
        self.total += other.total
        for bucket, count in enumerate(other.counts):
            self.counts[bucket] += count
            mine, theirs = self.exemplars[bucket], other.exemplars[bucket]
            if theirs is not None and (mine is None or mine.at_ms <= theirs.at_ms):
                self.exemplars[bucket] = theirs
