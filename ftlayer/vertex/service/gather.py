"""One answer out of those of several shards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ftlayer.errors import FTLayerError
from ftlayer.vertex.calls import Failed, Reply, StatsReply, Touched, Xored
from ftlayer.vertex.service.rules import Answer

# A share of one thing is no share of another: of these the largest tells the most.
_LARGEST = ("used_share",)


class Gather:
    """Takes ``parts`` answers from any threads and gives one: their sum, or the first error.

    An error of one shard does not undo what the others did; the call sent again is new to it alone.
    """

    def __init__(self, parts: int, answer: Answer, add: Callable[[Any, Any], Any]) -> None:
        self._left = parts
        self._answer = answer
        self._add = add
        self._lock = threading.Lock()
        self._sum: Reply | FTLayerError | None = None

    def __call__(self, answer: Reply | FTLayerError) -> None:
        """Take one shard's answer."""
        with self._lock:
            if self._sum is None or isinstance(answer, FTLayerError):
                if not isinstance(self._sum, FTLayerError):
                    self._sum = answer
            elif not isinstance(self._sum, FTLayerError):
                self._sum = self._add(self._sum, answer)
            self._left -= 1
            if self._left or self._sum is None:
                return
        self._answer(self._sum)


def add_xored(a: Xored, b: Xored) -> Xored:
    """Add what two shards completed."""
    return Xored(a.completed + b.completed, a.unknown + b.unknown)


def add_touched(a: Touched, b: Touched) -> Touched:
    """Add what two shards touched."""
    return Touched(a.touched + b.touched)


def add_failed(a: Failed, b: Failed) -> Failed:
    """Add what two shards failed."""
    return Failed(a.waiting + b.waiting, a.dead + b.dead, a.unknown + b.unknown, a.held + b.held)


def add_stats(a: StatsReply, b: StatsReply) -> StatsReply:
    """Add counters and gauges; of shares the larger."""
    values = dict(a.values)
    for name, value in b.values.items():
        values[name] = (
            max(values.get(name, value), value) if name in _LARGEST else values.get(name, 0) + value
        )
    circuits = {
        name: {**a.circuits.get(name, {}), **b.circuits.get(name, {})}
        for name in {**a.circuits, **b.circuits}
    }
    return StatsReply(values, circuits)
