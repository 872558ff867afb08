"""Whose turn it is in a slot: one task after the other, each for as many elements as it has channels that wait.

A turn for each task alone would be unfair to those that many send to: a task behind an exchange gets records from
every slot, and would have as much time as the one task here that makes some of them. What the others send would pile
up until they have no credit left and wait, while this slot reads on.
"""

from __future__ import annotations

from collections.abc import Sequence

from ftlayer.runtime.slot.seat import Seat


class Turns:
    """Goes round the tasks of a slot."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        """``seats`` in the order in which they are served."""
        self._seats = seats
        self._at = 0
        self._left = 0  # turns of the one that it is at; 0: it has not begun

    def next(self) -> Seat | None:
        """Return a task that has something to do and room for what comes of it; None if there is none.

        Every such task comes round again before another one has had more turns than channels.
        """
        for step in range(len(self._seats)):
            at = (self._at + step) % len(self._seats)
            seat = self._seats[at]
            if seat.inbox and seat.has_room:
                if step or not self._left:
                    self._at, self._left = at, seat.inbox.ready
                self._left -= 1
                if not self._left:
                    self._at = (at + 1) % len(self._seats)
                return seat
        return None
