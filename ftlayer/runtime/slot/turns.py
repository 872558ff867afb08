"""Whose turn it is in a slot: one task after the other, each for as many elements as it has channels that wait.

A turn for each task alone would be unfair to those that many send to: a task behind an exchange gets records from
every slot, and would have as much time as the one task here that makes some of them. What the others send would pile
up until they have no credit left and wait, while this slot reads on.

Tasks that a barrier waits in come first, though: the sooner it is through, the sooner channels that it has blocked go
on, and the younger is the checkpoint. Not without end: the barrier of one task may be stuck behind records for another
one, which has to take those before it can come.
"""

from __future__ import annotations

from collections.abc import Sequence

from ftlayer.runtime.slot.seat import Seat

IN_HASTE = 8
"""So many turns in a row go to tasks with barriers, if there are such tasks; the next one is an ordinary one."""


class Turns:
    """Goes round the tasks of a slot."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        """``seats`` from sinks to sources; so they are served, and those with barriers the other way round."""
        self._seats = seats
        self._upstream_first = tuple(reversed(seats))
        self._in_haste = 0
        self._at = 0
        self._left = 0  # turns of the one that it is at; 0: it has not begun

    def next(self) -> Seat | None:
        """Return a task that has something to do and room for what comes of it; None if there is none.

        Without barriers, every such task comes round again before another one has had more turns than channels.
        """
        if self._in_haste < IN_HASTE:
            for seat in self._upstream_first:
                if seat.inbox.has_barriers and seat.can_run:
                    self._in_haste += 1
                    return seat
        self._in_haste = 0
        return self._round()

    def _round(self) -> Seat | None:
        for step in range(len(self._seats)):
            at = (self._at + step) % len(self._seats)
            seat = self._seats[at]
            if seat.can_run:
                if step or not self._left:
                    self._at, self._left = at, seat.inbox.ready
                self._left -= 1
                if not self._left:
                    self._at = (at + 1) % len(self._seats)
                return seat
        return None
