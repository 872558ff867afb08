"""At least once: channels are never blocked; barriers are counted.

Flink's `CheckpointBarrierTracker` is the model. Records behind a channel's barrier reach the task before its
snapshot, so after a restore they are in its state, and come again.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.handlers.aligned import refuse_unaligned
from ftlayer.checkpoint.handlers.contract import Decision, GiveUp, TakeSnapshot
from ftlayer.checkpoint.handlers.reasons import GIVEN_UP_BEFORE, SUBSUMED, TOO_MANY

MAX_TRACKED = 50
"""Checkpoints that are remembered at a time, those included that were given up and have barriers to come.

As many as Flink's tracker has. Beyond it the earliest is given up: barriers are missing, or it was given up.
"""


@dataclass(slots=True)
class Tracked:
    """A checkpoint some of whose barriers have not come.

    ``barrier`` and ``first_ms`` are those of the first one; None and 0: it was given up before one came.
    """

    missing: set[int]
    barrier: Barrier | None = None
    first_ms: int = 0
    is_over: bool = False


class TrackingHandler:
    """`BarrierHandler` of tasks that may see a record again after a failure."""

    def __init__(self, channels: int) -> None:
        """``channels`` is their number, 1 at least."""
        self._open = set(range(channels))
        # Those after ``_over``, by id, ascending.
        self._tracked: dict[int, Tracked] = {}
        self._over = 0

    def announced(self, channel: int, barrier: Barrier, now_ms: int) -> list[Decision]:
        """Wait for its turn; `CheckpointError` for an UNALIGNED one, which nothing here would count."""
        refuse_unaligned(channel, barrier)
        return []

    def barrier(self, channel: int, barrier: Barrier, now_ms: int) -> list[Decision]:
        """A barrier has come to its turn."""
        if barrier.checkpoint <= self._over:
            return []
        decisions = self._pass_over(channel, barrier.checkpoint)
        tracked = self._track(barrier.checkpoint)
        if tracked.barrier is None:
            tracked.barrier, tracked.first_ms = barrier, now_ms
        decisions += self._through(barrier.checkpoint, channel, now_ms)
        return decisions + self._limit()

    def cancelled(self, channel: int, checkpoint: int, now_ms: int) -> list[Decision]:
        """A `CancelMarker` has come to its turn."""
        if checkpoint <= self._over:
            return []
        decisions = self._pass_over(channel, checkpoint)
        tracked = self._track(checkpoint)
        if not tracked.is_over:
            tracked.is_over = True
            decisions.append(GiveUp(checkpoint, GIVEN_UP_BEFORE))
        decisions += self._through(checkpoint, channel, now_ms)
        return decisions + self._limit()

    def ended(self, channel: int, now_ms: int) -> list[Decision]:
        """The channel has ended: it is no longer waited for."""
        self._open.discard(channel)
        decisions: list[Decision] = []
        for checkpoint in list(self._tracked):
            decisions += self._through(checkpoint, channel, now_ms)
        return decisions

    def aborted(self, checkpoint: int, now_ms: int) -> list[Decision]:
        """The coordinator has given the checkpoint up; earlier ones go on."""
        if checkpoint <= self._over:
            return []
        self._track(checkpoint).is_over = True
        return self._limit()

    def on_time(self, now_ms: int) -> list[Decision]:
        """Nothing here goes by time."""
        return []

    @property
    def due_ms(self) -> int | None:
        return None

    def _track(self, checkpoint: int) -> Tracked:
        tracked = self._tracked.get(checkpoint)
        if tracked is None:
            tracked = self._tracked[checkpoint] = Tracked(set(self._open))
            self._tracked = dict(sorted(self._tracked.items()))
        return tracked

    def _through(self, checkpoint: int, channel: int, now_ms: int) -> list[Decision]:
        """Wait for ``channel`` no longer; with the last one the checkpoint is complete, or forgotten."""
        tracked = self._tracked.get(checkpoint)
        if tracked is None:
            return []
        tracked.missing.discard(channel)
        if tracked.missing:
            return []
        # All channels are past it, so all that is earlier has been decided too.
        self._forget(checkpoint)
        if tracked.is_over or tracked.barrier is None:
            return []
        delay = max(0, tracked.first_ms - tracked.barrier.started_ms)
        return [TakeSnapshot(tracked.barrier, max(0, now_ms - tracked.first_ms), delay)]

    def _pass_over(self, channel: int, checkpoint: int) -> list[Decision]:
        """Give up what is earlier than ``checkpoint`` and misses ``channel``'s barrier: it will not come any more."""
        decisions: list[Decision] = []
        for earlier, tracked in self._tracked.items():
            if earlier < checkpoint and channel in tracked.missing:
                tracked.missing.discard(channel)
                if not tracked.is_over:
                    tracked.is_over = True
                    decisions.append(GiveUp(earlier, SUBSUMED))
        return decisions

    def _limit(self) -> list[Decision]:
        """Let the earliest ones go if there are too many."""
        decisions: list[Decision] = []
        while len(self._tracked) > MAX_TRACKED:
            earliest = next(iter(self._tracked))
            if not self._tracked[earliest].is_over:
                decisions.append(GiveUp(earliest, TOO_MANY))
            self._forget(earliest)
        return decisions

    def _forget(self, checkpoint: int) -> None:
        """Nothing up to ``checkpoint`` matters any more."""
        self._over = max(self._over, checkpoint)
        self._tracked = {later: tracked for later, tracked in self._tracked.items() if later > self._over}
