"""Debloating in a slot: each task's senders hear how much it wants in flight."""

from __future__ import annotations

from collections.abc import Iterable

from ftlayer.runtime.slot.crediting import Crediting
from ftlayer.runtime.slot.debloat import Debloater
from ftlayer.runtime.slot.outputs import LIMIT_FRAMES
from ftlayer.runtime.slot.seat import Seat, Seating
from ftlayer.stream.job_graph import Channel


class Debloating:
    """Measures every task with inputs, and tells its senders in this slot and in others."""

    def __init__(self, seating: Seating, credit: Crediting, target_ms: int, channel_bytes: int) -> None:
        """``target_ms``: what is in flight to a task should be worked off within it."""
        self._credit = credit
        self._tasks = {
            seat.key: (
                seat,
                Debloater(target_ms, len(seat.inbox.channels), channel_bytes),
                _outside(seating, seat),
            )
            for seat in seating.seats.values()
            if seat.inbox.channels
        }

    def taken(self, seat: Seat, size: int, now_ms: int) -> None:
        """A task is given ``size`` bytes."""
        _, debloater, outside = self._tasks[seat.key]
        if debloater.taken(size, now_ms):
            self._tell(seat, debloater.limit, outside)

    def look(self, now_ms: int) -> None:
        """No task is at work: those with nothing to do are idle from now on."""
        for seat, debloater, outside in self._tasks.values():
            if not seat.inbox and debloater.rested(now_ms):
                self._tell(seat, debloater.limit, outside)

    def _tell(self, seat: Seat, limit: int, outside: Iterable[Channel]) -> None:
        seat.inbox.limit(limit, limit // LIMIT_FRAMES)
        self._credit.limit(dict.fromkeys(outside, limit))


def _outside(seating: Seating, seat: Seat) -> tuple[Channel, ...]:
    """Return the channels that lead to a task from other slots."""
    return tuple(channel for channel in seat.inbox.channels if seating.senders[channel] != seating.slot)
