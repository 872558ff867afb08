"""The process functions of windows: tumbling and sliding ones, and sessions, which grow and merge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ftlayer.errors import UnsupportedError
from ftlayer.failures import PermanentFailure
from ftlayer.functions.context import Context
from ftlayer.functions.current import has_failed_before
from ftlayer.functions.handles import NOTHING, MapHandle
from ftlayer.functions.keyed import MapTable, Timers
from ftlayer.functions.process import LAST_WATERMARK_MS, ProcessFunction
from ftlayer.functions.values import owned
from ftlayer.functions.windows.aggregates import WindowAggregates
from ftlayer.functions.windows.assigners import Fixed, Session, Window, WindowKind
from ftlayer.functions.windows.contents import BuiltIn, Content

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

    def __init__(self, windows: WindowKind, content: Content, lateness_ms: int, late_tag: str | None) -> None:
        """``late_tag`` None: late records are dropped."""
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
        """Remove the key's windows that are over from a time on."""
        raise NotImplementedError

    def _over_ms(self, end_ms: int) -> int:
        """Return the watermark from which on a window is over."""
        return in_time(end_ms + self._lateness_ms)


def in_time(time_ms: int) -> int:
    """Return a time that a watermark reaches: all that is beyond the last one is over with it."""
    return min(time_ms, LAST_WATERMARK_MS)


class FixedWindows(WindowFunction):
    """Windows whose times are known beforehand. State of a key: start → content."""

    def __init__(
        self, windows: Fixed, content: Content, lateness_ms: int = 0, late_tag: str | None = None
    ) -> None:
        super().__init__(windows, content, lateness_ms, late_tag)
        self._fixed = windows
        self._aggregates: WindowAggregates | None = None

    def vectorized(self, maps: MapTable, timers: Timers) -> WindowAggregates | None:
        """Return what takes whole batches from now on, where a window's content is built-in aggregates; else None.

        `process` is then for records alone that are late. ``maps`` is the table of name `TABLE`.
        """
        if isinstance(self._content, BuiltIn):
            self._aggregates = WindowAggregates(
                self._fixed, self._lateness_ms, self._content.plan, maps, timers
            )
        return self._aggregates

    def _take(self, record: Any, time_ms: int, ctx: Context) -> bool:
        windows, content, watermark = self._windows, self._content, ctx.watermark
        starts = self._fixed.starts(time_ms)
        filled = []
        for start in starts:
            end = start + self._fixed.size_ms
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
        size = self._fixed.size_ms
        starts = self._due(time_ms, size)
        return [(Window(start, in_time(start + size)), self._windows[start]) for start in starts]

    def _tidy(self, time_ms: int, ctx: Context) -> None:
        for start in self._due(time_ms, self._fixed.size_ms + self._lateness_ms):
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

    def __init__(
        self, windows: Session, content: Content, lateness_ms: int = 0, late_tag: str | None = None
    ) -> None:
        super().__init__(windows, content, lateness_ms, late_tag)
        self._gap_ms = windows.gap_ms

    def _take(self, record: Any, time_ms: int, ctx: Context) -> bool:
        windows = self._windows
        start, end = time_ms, in_time(time_ms + self._gap_ms)
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
    if isinstance(windows, Fixed):
        return FixedWindows(windows, content, lateness_ms, late_tag)
    return SessionWindows(windows, content, lateness_ms, late_tag)
