"""The process functions of windows (tumbling, sliding, sessions, which grow and merge), and of interval joins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.common.checks import in_words
from ftlayer.common.failures import PermanentFailure
from ftlayer.errors import UnsupportedError
from ftlayer.functions.aggregates import I32, AggregatePlan, AggregatesPerRecord, AggregateTable
from ftlayer.functions.current import has_failed_before
from ftlayer.functions.failures import I64
from ftlayer.functions.handles import NOTHING, MapHandle
from ftlayer.functions.keyed import Key, MapTable, Timers, owned
from ftlayer.functions.process import (
    LAST_WATERMARK_MS,
    MAX_MS,
    MIN_MS,
    Context,
    CoProcessFunction,
    ProcessFunction,
    results_of,
)
from ftlayer.functions.undo import UndoLog


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
        return self._joined(record, ctx, self._left, self._right, self.lower_ms, self.upper_ms)

    def process_right(self, record: Any, ctx: Context) -> list[Any]:
        return self._joined(record, ctx, self._right, self._left, -self.upper_ms, -self.lower_ms)

    def _joined(
        self, record: Any, ctx: Context, own: MapHandle, others: MapHandle, lower_ms: int, upper_ms: int
    ) -> list[Any]:
        if ctx.timestamp is None:
            raise UnsupportedError(
                f"{ctx.uid!r}: the record has no event time, and a join goes by it; put assign_watermarks before the "
                "join, behind every operator with timers"
            )
        if ctx.key is None or (type(ctx.key) is tuple and None in ctx.key):
            return []
        time_ms = ctx.timestamp
        kept = ctx._owned(record) if self._can_change else record
        pairs = []
        for other_ms, other in _between(others, time_ms + lower_ms, time_ms + upper_ms):
            other = ctx._owned(other) if self._can_change else other
            pair = self.function(record, other) if own is self._left else self.function(other, record)
            pairs.append(self._timed(pair, max(time_ms, other_ms)))
        _keep(own, kept, time_ms, time_ms + upper_ms, ctx)
        return pairs

    def on_timer(self, time_ms: int, ctx: Context) -> None:
        _forget_matched(self._left, time_ms, self.upper_ms)
        _forget_matched(self._right, time_ms, -self.lower_ms)

    def _timed(self, record: Any, time_ms: int) -> tuple[Any, ...]:
        if self._width == 1:
            return record, time_ms
        if not isinstance(record, tuple):
            raise TypeError(f"a {type(record).__name__} is not a tuple of {self._width} values")
        if len(record) != self._width:
            raise TypeError(f"a tuple of {len(record)} values is not one of {self._width}")
        return *record, time_ms


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


def _forget_matched(side: MapHandle, now_ms: int, after_ms: int) -> None:
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


@dataclass(frozen=True, slots=True)
class Window:
    """The times from ``start_ms`` on, ``end_ms`` not included; milliseconds since 1970."""

    start_ms: int
    end_ms: int


@dataclass(frozen=True)
class Fixed:
    """Windows of ``size_ms``, one beginning every ``every_ms``, counted from ``offset_ms``.

    They overlap if ``every_ms`` is less than ``size_ms``, and leave gaps if it is more.
    """

    size_ms: int
    every_ms: int
    offset_ms: int = 0

    def __repr__(self) -> str:
        offset = f" from {in_words(self.offset_ms)} on" if self.offset_ms else ""
        if self.every_ms == self.size_ms:
            return f"tumbling {in_words(self.size_ms)}{offset}"
        return f"sliding {in_words(self.size_ms)} every {in_words(self.every_ms)}{offset}"

    def starts(self, time_ms: int) -> list[int]:
        """Return the starts of the windows that a time lies in, ascending."""
        last = time_ms - (time_ms - self.offset_ms) % self.every_ms
        if self.every_ms == self.size_ms:
            return [last]
        first = last - (self.size_ms - 1 - (time_ms - last)) // self.every_ms * self.every_ms
        return list(range(first, last + 1, self.every_ms))


@dataclass(frozen=True)
class Session:
    """Windows that begin with a record, and end ``gap_ms`` after the last one that came within the gap."""

    gap_ms: int

    def __repr__(self) -> str:
        return f"session {in_words(self.gap_ms)}"


WindowKind = Fixed | Session


# Built-in aggregates of windows of fixed times over whole batches, in the C extension's memory.
#
# A window of a key is numbered there as a key is that has its start as one column more, and its aggregates go from
# there into the state that `FixedWindows` has: before timers read it, before a snapshot, and when much has changed.


FARTHEST_MS = 2**61
"""Times, and sizes of windows, up to which no sum of them is beyond 64 bits."""

MOST_ASSIGNED = 1 << 20
"""Rows and their windows that are worked out at a time: 8 MiB for each number of them."""

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Assigned:
    """The windows of a batch's rows.

    Attributes:
        rows: int64[m], ascending: which row; one for each window that it is in and that is not over.
        starts: int64[m], ms since 1970: which window.
        late: int64[k]: the rows all of whose windows are over.
    """

    rows: I64
    starts: I64
    late: I64


class WindowAggregates(AggregateTable):
    """The aggregates of an operator's windows: `ftlayer.functions.keyed.StateCache`."""

    def __init__(
        self, windows: Fixed, lateness_ms: int, plan: AggregatePlan, maps: MapTable, timers: Timers
    ) -> None:
        """``maps`` is the keyed state, start → aggregates; ``timers`` those of the operator."""
        super().__init__(plan, _Contents(maps))
        self._windows = windows
        self._lateness_ms = lateness_ms
        self._timers = timers

    def _begin(self) -> None:
        super()._begin()
        # By slot: whether the window has the timer of its end, as far as is known.
        self._timed: Bools = np.zeros(0, np.bool_)

    @property
    def rows_at_once(self) -> int:
        """So many rows may be assigned at once: each is in so many windows."""
        return max(1, MOST_ASSIGNED // self._most)

    @property
    def _most(self) -> int:
        return -(-self._windows.size_ms // self._windows.every_ms)

    def takes(self, times: I64) -> bool:
        """Whether times, and those of their windows, can be reckoned with in 64 bits."""
        farthest = FARTHEST_MS - self._windows.size_ms - self._lateness_ms
        return not len(times) or (int(times.min()) > -farthest and int(times.max()) < farthest)

    def assign(self, times: I64, watermark_ms: int) -> Assigned:
        """Return the windows of rows by their event times: int64[n], ms since 1970, which `takes` has taken."""
        size, every = self._windows.size_ms, self._windows.every_ms
        last = times - (times - self._windows.offset_ms) % every
        starts = last[:, None] - every * np.arange(self._most - 1, -1, -1, dtype=np.int64)
        inside = times[:, None] - starts < size
        over = np.minimum(starts + (size + self._lateness_ms), LAST_WATERMARK_MS)
        live = inside & ((starts + size > watermark_ms) | (over > watermark_ms))
        late = inside.any(axis=1) & ~live.any(axis=1)
        return Assigned(np.nonzero(live)[0], starts[live], np.flatnonzero(late))

    def add_to(
        self, rows: pa.RecordBatch, assigned: Assigned, watermark_ms: int, log: UndoLog | None
    ) -> list[tuple[int, int]]:
        """Add rows to their windows. A row that an aggregate of one of them cannot take changes none.

        Returns pairs of such a row, and that aggregate's number. With ``log``, what is changed is noted there.
        """
        refused: list[tuple[int, int]] = []
        windows, starts = assigned.rows, assigned.starts
        while len(windows):
            failed = self._add_all(rows, windows, starts, watermark_ms, log)
            refused += failed
            if not failed or self._most == 1:
                break
            # What lies before the row stands as it is added now; what lies behind may have failed for the row alone.
            row, _ = failed[0]
            before, behind = np.searchsorted(windows, [row, row + 1])
            if before:
                self._add_all(rows, windows[:before], starts[:before], watermark_ms, log)
            windows, starts = windows[behind:], starts[behind:]
        return refused

    def _add_all(
        self, rows: pa.RecordBatch, windows: I64, starts: I64, watermark_ms: int, log: UndoLog | None
    ) -> list[tuple[int, int]]:
        """Add rows to windows, and return those that cannot be added, and for which aggregate.

        Where a row may be in several windows, the first such row alone: nothing is changed then.
        """
        taken = rows if len(windows) == rows.num_rows and self._most == 1 else rows.take(pa.array(windows))
        slots, are_kept = self.number([*self.plan.key_columns(taken), pa.array(starts)])
        _, failed, kept = self._values.add(slots, taken, results=False, undo=True)
        assert kept is not None
        if failed and self._most > 1:
            self.restore(kept, None)
            place, number = failed[0]
            return [(int(windows[place]), number)]
        if log is not None:
            log.add((self.restore, kept, None))
        if failed:
            # What was refused sets no timer.
            added = np.ones(len(slots), np.bool_)
            added[[place for place, _ in failed]] = False
            slots, starts = slots[added], starts[added]
        self._set_timers(slots, starts, are_kept, watermark_ms, log)
        return [(int(windows[place]), number) for place, number in failed]

    def _set_timers(
        self, slots: I32, starts: I64, are_kept: Bools, watermark_ms: int, log: UndoLog | None
    ) -> None:
        """Set the timers of windows' ends; ``are_kept`` says of the last slots whether state had them."""
        known = len(self._keys)
        if known > len(self._timed):
            self._timed = np.concatenate([self._timed, np.zeros(max(known, 1024), np.bool_)])
        if not self._lateness_ms:
            self._timed[known - len(are_kept) : known] = are_kept
        without = ~self._timed[slots]
        if self._lateness_ms:
            # One that is kept for late records may have been emitted, and behind a restore no watermark says so.
            without |= starts + self._windows.size_ms <= watermark_ms
        if not without.any():
            return
        due = np.unique(slots[without])
        for named in self._keys.of(due):
            key, start = _apart(named)
            self._timers.event.add(key, min(start + self._windows.size_ms, LAST_WATERMARK_MS))
        self._timed[due] = True
        if log is not None:
            log.add((_forget, self._timed, due))

    def settle(self) -> None:
        """Write what has changed into the state, which a timer is about to read.

        It removes windows there. Those are over, so no row comes to them; their slots go when all is given back.
        """
        if self._values.accumulators.dirty:
            self.write_back()

    def give_back(self) -> None:
        """Write everything into the state, and know nothing of it any more: a row is added there."""
        if len(self._keys):
            self.write_back()
            self._begin()


class _Contents:
    def __init__(self, maps: MapTable) -> None:
        self._maps = maps

    def get(self, named: Key, default: Any) -> Any:
        key, start = _apart(named)
        return self._maps.items(key).get(start, default)

    def update(self, pairs: Iterable[tuple[Key, Any]]) -> None:
        for named, content in pairs:
            self._maps.put(*_apart(named), content)


def _apart(named: Any) -> tuple[Key, int]:
    *key, start = named
    return (key[0] if len(key) == 1 else tuple(key)), start


def _forget(timed: Bools, due: I32) -> None:
    timed[due] = False


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Result = Callable[[Any, Window, Any], Any]
"""``result(key, window, value)`` returns the record that a window emits."""


class Content(Protocol):
    """Puts records together; `NOTHING` is the content of a window without records.

    Attributes:
        described: what is kept, in words: `ftlayer.functions.keyed.KeyedState.describe`; "": a function makes it.
        is_given: whether a user's function makes the content itself, and may keep it.
    """

    is_given: bool

    @property
    def described(self) -> str:
        """See the class."""

    def added(self, content: Any, record: Any) -> Any:
        """Return the content with one more record."""

    def merged(self, content: Any, other: Any) -> Any:
        """Return the content of two windows that have become one; ``other`` is the later one's."""

    def emitted(self, key: Any, window: Window, content: Any) -> Iterable[Any]:
        """Return the records that a window emits."""


class _OneRecord:
    """What a user's functions make, and a window emits as one record."""

    result: Result | None
    described = ""
    is_given = True

    def emitted(self, key: Any, window: Window, content: Any) -> Iterable[Any]:
        return [content if self.result is None else self.result(key, window, content)]


@dataclass(frozen=True)
class Reduced(_OneRecord):
    """The first record, then ``function(reduced, record)``."""

    function: Callable[[Any, Any], Any]
    result: Result | None = None

    def added(self, content: Any, record: Any) -> Any:
        return record if content is NOTHING else self.function(content, record)

    def merged(self, content: Any, other: Any) -> Any:
        return self.function(content, other)


@dataclass(frozen=True)
class Aggregated(_OneRecord):
    """``add(create(), record)``, then ``add(aggregate, record)``. ``merge`` is needed where windows merge."""

    create: Callable[[], Any]
    add: Callable[[Any, Any], Any]
    merge: Callable[[Any, Any], Any] | None = None
    result: Result | None = None

    def added(self, content: Any, record: Any) -> Any:
        return self.add(self.create() if content is NOTHING else content, record)

    def merged(self, content: Any, other: Any) -> Any:
        assert self.merge is not None
        return self.merge(content, other)


@dataclass(frozen=True)
class BuiltIn:
    """Built-in aggregates. A window emits its key's columns, its start and end, and a column for each of them."""

    plan: AggregatePlan
    is_given = False

    @property
    def described(self) -> str:
        return self.plan.described()

    @cached_property
    def _model(self) -> AggregatesPerRecord:
        return AggregatesPerRecord(self.plan)

    def added(self, content: Any, record: Any) -> Any:
        return self._model.add(self._model.create() if content is NOTHING else content, record)

    def merged(self, content: Any, other: Any) -> Any:
        return self._model.merge(content, other)

    def emitted(self, key: Any, window: Window, content: Any) -> Iterable[Any]:
        own = (key,) if len(self.plan.keys) == 1 else key
        times = (
            _EPOCH + timedelta(milliseconds=window.start_ms),
            _EPOCH + timedelta(milliseconds=window.end_ms),
        )
        return [(*own, *times, *self._model.results(content))]


@dataclass(frozen=True)
class Collected:
    """All records, in the order in which they came; ``function(key, window, records)`` returns what is emitted."""

    function: Callable[[Any, Window, list[Any]], Iterable[Any] | None]
    described = ""
    is_given = False

    def added(self, content: Any, record: Any) -> Any:
        if content is NOTHING:
            return [record]
        content.append(record)
        return content

    def merged(self, content: Any, other: Any) -> Any:
        return content + other

    def emitted(self, key: Any, window: Window, content: Any) -> Iterable[Any]:
        return results_of(self.function(key, window, list(content)))


TABLE = "windows"
"""Name of the table of keyed state that windows lie in."""


class WindowFunction(ProcessFunction):
    """Gathers a key's records in windows, and emits a window's result when the watermark reaches its end.

    A record that comes after that is *late*. It is added as long as the watermark has not reached the window's end
    plus the allowed lateness, and the window is emitted again: once for all the late records of a batch. After that
    the window is forgotten, and a record that would belong to no other window goes to the side output for late
    records, or nowhere. A result's event time is the last one of its window, ``end_ms - 1``.

    Attributes:
        kind: which windows these are.
        late: records that went nowhere. One that is run again counts again.
    """

    needs_event_time = True
    copies_values = True

    def __init__(
        self, windows: WindowKind, content: Content, lateness_ms: int = 0, late_tag: str | None = None
    ) -> None:
        self.kind = windows
        self._content = content
        self._lateness_ms = lateness_ms
        self._late_tag = late_tag
        self.late = 0

    def open(self, ctx: Context) -> None:
        self._windows: MapHandle = ctx.map(TABLE)
        self._is_given = self._content.is_given
        if self._content.described:
            ctx._describe(TABLE, self._content.described)

    def process(self, record: Any, ctx: Context) -> None:
        if ctx.timestamp is None:
            raise UnsupportedError(
                f"{ctx.uid!r} works on event time, and the record has none; use assign_watermarks(column, …) before "
                "key_by, behind every operator with timers of processing time"
            )
        if self._take(record, ctx.timestamp, ctx):
            return
        if self._late_tag is not None:
            ctx.output(self._late_tag, record)
        elif has_failed_before():
            raise PermanentFailure("late: its windows were over when it was tried again")
        else:
            self.late += 1

    def on_timer(self, time_ms: int, ctx: Context) -> Iterator[Any]:
        for window, content in self._ending(time_ms):
            # It may be kept, and stay here for late records.
            own = content if isinstance(self._content, BuiltIn) else owned(content)
            yield from self._content.emitted(ctx.key, window, own)
            over_ms = self._over_ms(window.end_ms)
            if over_ms > time_ms:
                ctx.timers.event(over_ms)
        ctx.timestamp = time_ms - 1
        self._tidy(time_ms, ctx)

    def _take(self, record: Any, time_ms: int, ctx: Context) -> bool:
        """Put a record into its windows; return False if it is too late for all of them."""
        raise NotImplementedError

    def _ending(self, time_ms: int) -> Iterable[tuple[Window, Any]]:
        """Return the key's windows that end at a time (those that end later, at the last time of all)."""
        raise NotImplementedError

    def _tidy(self, time_ms: int, ctx: Context) -> None:
        raise NotImplementedError

    def _over_ms(self, end_ms: int) -> int:
        return in_time(end_ms + self._lateness_ms)


def in_time(time_ms: int) -> int:
    """Return a time that a watermark reaches: all that is beyond the last one is over with it."""
    return min(time_ms, LAST_WATERMARK_MS)


class FixedWindows(WindowFunction):
    """Windows whose times are known beforehand. State of a key: start → content."""

    kind: Fixed
    _aggregates: WindowAggregates | None = None

    def vectorized(self, maps: MapTable, timers: Timers) -> WindowAggregates | None:
        """Return what takes whole batches from now on, where a window's content is built-in aggregates; else None.

        `process` is then for records alone that are late. ``maps`` is the table of name `TABLE`.
        """
        if isinstance(self._content, BuiltIn):
            self._aggregates = WindowAggregates(
                self.kind, self._lateness_ms, self._content.plan, maps, timers
            )
        return self._aggregates

    def _take(self, record: Any, time_ms: int, ctx: Context) -> bool:
        windows, content, watermark = self._windows, self._content, ctx.watermark
        starts = self.kind.starts(time_ms)
        filled = []
        for start in starts:
            end = start + self.kind.size_ms
            if end <= watermark and self._over_ms(end) <= watermark:
                continue
            held = windows.get(start, NOTHING)
            filled.append((start, end, held, content.added(held, record)))
        # A record that one of its windows does not take is in none of them.
        for start, end, held, added in filled:
            windows[start] = ctx._owned(added) if self._is_given else added
            # One that is kept for late records may have been emitted, and behind a restore no watermark says so.
            if held is NOTHING or self._lateness_ms:
                ctx.timers.event(in_time(end))
        return bool(filled) or not starts

    def _ending(self, time_ms: int) -> Iterable[tuple[Window, Any]]:
        if self._aggregates is not None:
            self._aggregates.settle()
        size = self.kind.size_ms
        starts = self._due(time_ms, size)
        return [(Window(start, in_time(start + size)), self._windows[start]) for start in starts]

    def _tidy(self, time_ms: int, ctx: Context) -> None:
        for start in self._due(time_ms, self.kind.size_ms + self._lateness_ms):
            del self._windows[start]

    def _due(self, time_ms: int, after_ms: int) -> list[int]:
        """Return the starts of windows for which something is due ``after_ms`` later, now."""
        start = time_ms - after_ms
        if time_ms == LAST_WATERMARK_MS:
            return sorted(later for later in self._windows if later >= start)
        return [start] if start in self._windows else []


class SessionWindows(WindowFunction):
    """Windows that end when no record came for a while. State of a key: start → (end, content, whether emitted).

    A record begins a window from its time to ``gap_ms`` later; windows that overlap, or touch, are one. Sessions of a
    key so never have a time in common. A session has one timer, which stays where it is while the session grows: when
    it fires too early it is set again. One that was emitted has none for its end, and gets it with the next record;
    that it was is kept with it, since behind a restore no watermark says so.
    """

    kind: Session

    def _take(self, record: Any, time_ms: int, ctx: Context) -> bool:
        windows = self._windows
        start, end = time_ms, in_time(time_ms + self.kind.gap_ms)
        touching = [begun for begun, (until, *_) in windows.items() if begun <= end and start <= until]
        if not touching and self._over_ms(end) <= ctx.watermark:
            return False
        content: Any = NOTHING
        has_timer = False
        for begun in sorted(touching):
            until, held, was_emitted = windows[begun]
            content = held if content is NOTHING else self._content.merged(content, held)
            start, end = min(start, begun), max(end, until)
            has_timer = has_timer or not was_emitted
        content = self._content.added(content, record)
        for begun in touching:
            if begun != start:
                del windows[begun]
        windows[start] = (end, ctx._owned(content) if self._is_given else content, False)
        if not has_timer:
            ctx.timers.event(end)
        return True

    def _ending(self, time_ms: int) -> Iterable[tuple[Window, Any]]:
        ending = [start for start, (end, *_) in self._windows.items() if end == time_ms]
        return [(Window(start, time_ms), self._windows[start][1]) for start in ending]

    def _tidy(self, time_ms: int, ctx: Context) -> None:
        for start, (end, content, _) in list(self._windows.items()):
            if self._over_ms(end) == time_ms:
                del self._windows[start]
            elif end == time_ms:
                self._windows[start] = (end, content, True)
            elif start < time_ms < end:
                ctx.timers.event(end)


def window_function(
    windows: WindowKind, content: Content, lateness_ms: int = 0, late_tag: str | None = None
) -> WindowFunction:
    """Return the function of a kind of window; late records go to the side output ``late_tag``, or nowhere."""
    kind = FixedWindows if isinstance(windows, Fixed) else SessionWindows
    return kind(windows, content, lateness_ms, late_tag)
