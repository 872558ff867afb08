"""Exactly once, with barriers that may overtake records, from the beginning or when a checkpoint takes too long.

Flink's `SingleCheckpointBarrierHandler` with its alternating states is the model. A checkpoint begins aligned, and
turns unaligned at one stroke: when an UNALIGNED barrier of it arrives, or when its time is up. It never turns back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ftlayer.checkpoint.barrier import Alignment, Barrier, SnapshotKind
from ftlayer.checkpoint.handlers.aligned import AlignedHandler, AlignmentProgress
from ftlayer.checkpoint.handlers.contract import AllBarriers, Decision, GiveUp, StopCapture, Unblock
from ftlayer.checkpoint.handlers.reasons import SUBSUMED


class AlternatingHandler(AlignedHandler):
    """`BarrierHandler` of tasks whose checkpoints are unaligned, or turn so.

    Once a checkpoint is unaligned, a barrier counts as come when it arrives: what waits in front of it was captured
    at its arrival, so an aligned barrier of the checkpoint that comes to its turn later is nothing new. A snapshot
    that was taken is given up (`GiveUp`) if a later checkpoint comes before all barriers have.
    """

    def __init__(self, channels: int) -> None:
        """``channels`` is their number, 1 at least."""
        super().__init__(channels)
        # Barriers that have arrived and not come to their turn; channels without one are not in it.
        self._waiting: dict[int, deque[Barrier]] = {}

    def announced(self, channel: int, barrier: Barrier, now_ms: int) -> list[Decision]:
        """Note a barrier that will come to its turn; begin, or turn to, an unaligned checkpoint if it is one."""
        if barrier.alignment is not Alignment.UNALIGNED:
            self._waiting.setdefault(channel, deque()).append(barrier)
        if self._is_over(barrier.checkpoint):
            return []
        decisions: list[Decision] = []
        if barrier.alignment is Alignment.UNALIGNED:
            decisions = self._turn(barrier, now_ms)
        current = self._current
        if current is not None and current.captures and current.checkpoint == barrier.checkpoint:
            return [*decisions, *self._through(current, channel, now_ms)]
        return [*decisions, *self.on_time(now_ms)]

    def barrier(self, channel: int, barrier: Barrier, now_ms: int) -> list[Decision]:
        """A barrier that is not UNALIGNED has come to its turn."""
        self._taken(channel, barrier.checkpoint)
        return [*super().barrier(channel, barrier, now_ms), *self.on_time(now_ms)]

    def cancelled(self, channel: int, checkpoint: int, now_ms: int) -> list[Decision]:
        """A `CancelMarker` has come to its turn."""
        self._taken(channel, checkpoint)
        return super().cancelled(channel, checkpoint, now_ms)

    def ended(self, channel: int, now_ms: int) -> list[Decision]:
        """The channel has ended: it is no longer waited for."""
        self._waiting.pop(channel, None)
        return super().ended(channel, now_ms)

    def on_time(self, now_ms: int) -> list[Decision]:
        """Turn checkpoints unaligned whose time is up."""
        decisions: list[Decision] = []
        while (barrier := self._may_turn()) is not None and _due_ms(barrier) <= now_ms:
            decisions += self._turn(barrier, now_ms)
        return decisions

    @property
    def due_ms(self) -> int | None:
        """When a checkpoint turns unaligned, if its barriers have not come by then."""
        barrier = self._may_turn()
        return None if barrier is None else _due_ms(barrier)

    # ------------------------------------------------------------ turning

    def _may_turn(self) -> Barrier | None:
        """Return the barrier of the next checkpoint that time may turn.

        That is the one under way, if it is still aligned: a savepoint that aligns is left in peace, whatever waits.
        Otherwise it is the earliest one that waits behind records.
        """
        current = self._current
        if current is not None and not current.captures:
            first: Barrier | None = current.barrier
        else:
            begun = 0 if current is None else current.checkpoint
            later = [barrier for barrier in self._live() if barrier.checkpoint > begun]
            first = min(later, key=lambda barrier: barrier.checkpoint, default=None)
        return first if first is not None and _turns(first) else None

    def _live(self) -> list[Barrier]:
        """Return the barriers that wait, of checkpoints that are not over."""
        return [
            barrier
            for barriers in self._waiting.values()
            for barrier in barriers
            if not self._is_over(barrier.checkpoint)
        ]

    def _turn(self, barrier: Barrier, now_ms: int) -> list[Decision]:
        """Take the snapshot now if it is not taken, with what waits in front of barriers and is still to come."""
        decisions = self._overtake(barrier.checkpoint)
        current = self._current or self._begin(barrier, now_ms)
        if current.captures:
            return decisions
        unaligned = replace(barrier, alignment=Alignment.UNALIGNED)
        decisions.append(current.snapshot(unaligned, now_ms, tuple(sorted(current.missing))))
        decisions += [Unblock(channel) for channel in current.blocked]
        current.blocked.clear()
        current.captures = True
        here = [
            channel
            for channel, barriers in sorted(self._waiting.items())
            if any(waits.checkpoint == barrier.checkpoint for waits in barriers)
        ]
        for channel in here:
            decisions += self._through(current, channel, now_ms)
        return decisions

    def _overtake(self, checkpoint: int) -> list[Decision]:
        """Give up all that is earlier than an unaligned checkpoint: what is under way, and what waits."""
        decisions = self._make_way(checkpoint)
        earlier = {barrier.checkpoint for barrier in self._live() if barrier.checkpoint < checkpoint}
        return decisions + [GiveUp(overtaken, SUBSUMED) for overtaken in sorted(earlier)]

    def _through(self, current: AlignmentProgress, channel: int, now_ms: int) -> list[Decision]:
        """As without captures; with them, what is captured of the channel is complete."""
        if not current.captures:
            return super()._through(current, channel, now_ms)
        if channel not in current.missing:
            return []
        current.missing.discard(channel)
        decisions: list[Decision] = [StopCapture(current.checkpoint, channel)]
        if not current.missing:
            decisions += self._drop(current)
            decisions.append(AllBarriers(current.checkpoint, current.alignment_ms(now_ms)))
        return decisions

    def _drop(self, current: AlignmentProgress) -> list[Decision]:
        """As without captures; those that are open are stopped."""
        still = sorted(current.missing) if current.captures else []
        stops = [StopCapture(current.checkpoint, channel) for channel in still]
        return [*stops, *super()._drop(current)]

    def _taken(self, channel: int, checkpoint: int) -> None:
        """Barriers that wait in ``channel`` up to ``checkpoint`` wait no more."""
        barriers = self._waiting.get(channel)
        while barriers and barriers[0].checkpoint <= checkpoint:
            barriers.popleft()
        if not barriers:
            self._waiting.pop(channel, None)


def _turns(barrier: Barrier) -> bool:
    return barrier.timeout_ms is not None and barrier.kind is not SnapshotKind.SAVEPOINT


def _due_ms(barrier: Barrier) -> int:
    return barrier.started_ms + (barrier.timeout_ms or 0)
