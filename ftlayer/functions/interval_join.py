"""An interval join in event time on keyed state, for graphs whose state is taken into checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from ftlayer.errors import UnsupportedError
from ftlayer.functions.handles import MapHandle
from ftlayer.functions.process import MAX_MS, MIN_MS, Context, CoProcessFunction


class IntervalJoin(CoProcessFunction):
    """Pairs records of equal keys where left.time + ``lower_ms`` <= right.time <= left.time + ``upper_ms``.

    ``function(left, right)`` makes the record of a pair; its time is the later one of the two. A record waits until
    the watermark has passed the last time that could match it; one that comes after that is joined with what is
    there and not kept. Keys with a null match nothing.

    State of a key: for each side a mapping of time → records.

    Attributes:
        function, lower_ms, upper_ms: see above.
    """

    needs_event_time = True
    gives_times = True
    copies_values = True

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        lower_ms: int,
        upper_ms: int,
        schema: pa.Schema,
        inputs: tuple[pa.Schema, ...] = (),
    ) -> None:
        """``schema`` is that of the pairs, ``inputs`` are those of the records: only nested ones can be changed."""
        self.function = function
        self.lower_ms = lower_ms
        self.upper_ms = upper_ms
        self._width = len(schema)
        self._can_change = any(pa.types.is_nested(field.type) for taken in inputs for field in taken)

    def open(self, ctx: Context) -> None:
        self._left = ctx.map("left")
        self._right = ctx.map("right")

    def process_left(self, record: Any, ctx: Context) -> list[Any]:
        time_ms = _time_of(ctx)
        if _has_null(ctx.key):
            return []
        first_ms, last_ms = time_ms + self.lower_ms, time_ms + self.upper_ms
        kept = ctx._owned(record) if self._can_change else record
        pairs = [
            self._timed(self.function(record, other), max(time_ms, other_ms))
            for other_ms, other in self._others(self._right, first_ms, last_ms, ctx)
        ]
        _keep(self._left, kept, time_ms, last_ms, ctx)
        return pairs

    def process_right(self, record: Any, ctx: Context) -> list[Any]:
        time_ms = _time_of(ctx)
        if _has_null(ctx.key):
            return []
        first_ms, last_ms = time_ms - self.upper_ms, time_ms - self.lower_ms
        kept = ctx._owned(record) if self._can_change else record
        pairs = [
            self._timed(self.function(other, record), max(time_ms, other_ms))
            for other_ms, other in self._others(self._left, first_ms, last_ms, ctx)
        ]
        _keep(self._right, kept, time_ms, last_ms, ctx)
        return pairs

    def on_timer(self, time_ms: int, ctx: Context) -> None:
        _forget(self._left, time_ms, self.upper_ms)
        _forget(self._right, time_ms, -self.lower_ms)

    def _others(self, side: MapHandle, first_ms: int, last_ms: int, ctx: Context) -> list[tuple[int, Any]]:
        found = _between(side, first_ms, last_ms)
        return [(time_ms, ctx._owned(each)) for time_ms, each in found] if self._can_change else found

    def _timed(self, record: Any, time_ms: int) -> tuple[Any, ...]:
        if self._width == 1:
            return record, time_ms
        if not isinstance(record, tuple):
            raise TypeError(f"a {type(record).__name__} is not a tuple of {self._width} values")
        if len(record) != self._width:
            raise TypeError(f"a tuple of {len(record)} values is not one of {self._width}")
        return *record, time_ms


def _time_of(ctx: Context) -> int:
    if ctx.timestamp is None:
        raise UnsupportedError(
            f"{ctx.uid!r}: the record has no event time, and a join goes by it; put assign_watermarks before the "
            "join, behind every operator with timers"
        )
    return ctx.timestamp


def _has_null(key: Any) -> bool:
    return key is None or (type(key) is tuple and None in key)


def _between(side: MapHandle, first_ms: int, last_ms: int) -> list[tuple[int, Any]]:
    """Return the records of the current key from a time to another, by time, then in the order in which they came."""
    # Whichever is the shorter way: the times that are possible, or those that there are.
    if last_ms - first_ms < len(side):
        times = [time_ms for time_ms in range(first_ms, last_ms + 1) if time_ms in side]
    else:
        times = sorted(time_ms for time_ms in side if first_ms <= time_ms <= last_ms)
    return [(time_ms, record) for time_ms in times for record in side[time_ms]]


def _keep(side: MapHandle, record: Any, time_ms: int, last_ms: int, ctx: Context) -> None:
    """Keep a record until the watermark has passed ``last_ms``, unless it has."""
    over_ms = _over_ms(last_ms)
    if over_ms <= ctx.watermark:
        return
    records = side.get(time_ms)
    if records is None:
        ctx.timers.event(over_ms)
        side[time_ms] = [record]
    else:
        records.append(record)
        side[time_ms] = records


def _forget(side: MapHandle, now_ms: int, after_ms: int) -> None:
    """Remove what could be matched up to ``after_ms`` after its own time, and is over now."""
    if MIN_MS + 1 < now_ms < MAX_MS:
        side.pop(now_ms - 1 - after_ms, None)
        return
    # Times at both ends stand for all that lie beyond them.
    for time_ms in [time_ms for time_ms in side if _over_ms(time_ms + after_ms) == now_ms]:
        del side[time_ms]


def _over_ms(last_ms: int) -> int:
    """Return the watermark that has passed a time: records of the watermark's own time may come."""
    return max(MIN_MS + 1, min(last_ms, MAX_MS - 1) + 1)
