"""Debloating in a slot: each task's senders hear how much it wants in flight, and sources read no more at a time."""

from __future__ import annotations

from dataclasses import dataclass

from ftlayer.config import TopologyOptions
from ftlayer.runtime.barrier_mode.slot.debloat import Debloater
from ftlayer.runtime.slot.crediting import Crediting
from ftlayer.runtime.slot.instructions import Grant
from ftlayer.runtime.slot.outputs import LIMIT_FRAMES
from ftlayer.runtime.slot.seat import Seat, Seating
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.topology.job_graph import Channel

LEAST_BYTES = 4 << 10
"""Less on a channel would make batches so small that the task is slow because of them."""

LEAST_ROWS = 64
"""And so would less from a source."""

SOURCE_PART = 8
"""A source reads what is worked off in this part of the target: all of it is in flight, on top of its channels."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """A task, what measures it, and its channels from other slots."""

    seat: Seat
    debloater: Debloater
    outside: tuple[Channel, ...]


class Debloating:
    """Measures every task: those with inputs by bytes for each channel, sources by rows."""

    def __init__(self, seating: Seating, credit: Crediting, target_ms: int, options: TopologyOptions) -> None:
        """What is in flight to a task should be worked off within ``target_ms``."""
        self._credit = credit
        self._tasks: dict[TaskKey, _Measured] = {}
        self._sources: dict[TaskKey, _Measured] = {}
        for key, seat in seating.seats.items():
            channels = seat.inbox.channels
            if channels:
                debloater = Debloater(target_ms / len(channels), LEAST_BYTES, options.channel_bytes)
                outside = [channel for channel in channels if seating.senders[channel] != seating.slot]
                self._tasks[key] = _Measured(seat, debloater, tuple(outside))
            else:
                debloater = Debloater(target_ms / SOURCE_PART, LEAST_ROWS, options.batch_rows)
                self._sources[key] = _Measured(seat, debloater, ())
        self._begin(seating)

    def worked(self, seat: Seat, size: int, now_ms: int) -> list[Grant]:
        """A task is given ``size`` bytes, or a source has emitted so many rows."""
        source = self._sources.get(seat.key)
        if source is not None:
            source.debloater.taken(size, now_ms)
            return []
        measured = self._tasks[seat.key]
        return self._tell(measured) if measured.debloater.taken(size, now_ms) else []

    def rows_wanted(self, key: TaskKey) -> int:
        """Return how many rows a source should read at a time."""
        return self._sources[key].debloater.limit

    def look(self, now_ms: int) -> list[Grant]:
        """No task is at work: those with nothing to do are idle from now on, and sources that are not held up.

        The others may be stuck: with no room for what they would send, or with state that waits for the disk.
        """
        told: list[Grant] = []
        for measured in self._tasks.values():
            debloater = measured.debloater
            changed = debloater.stuck(now_ms) if measured.seat.inbox else debloater.rested(now_ms)
            if changed:
                told += self._tell(measured)
        for measured in self._sources.values():
            if measured.seat.has_room:
                measured.debloater.rested(now_ms)
            else:
                measured.debloater.stuck(now_ms)
        return told

    def _begin(self, seating: Seating) -> None:
        """Let little be in flight until something is known; receivers in other slots begin so by themselves."""
        for measured in self._tasks.values():
            limit = measured.debloater.limit
            measured.seat.inbox.limit(limit, limit // LIMIT_FRAMES)
        for output in seating.remote.values():
            output.limit(LEAST_BYTES)

    def _tell(self, measured: _Measured) -> list[Grant]:
        limit = measured.debloater.limit
        measured.seat.inbox.limit(limit, limit // LIMIT_FRAMES)
        return self._credit.limit(dict.fromkeys(measured.outside, limit))
