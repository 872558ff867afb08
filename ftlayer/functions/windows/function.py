"""What windows of all kinds have in common: lateness, and when they fire and go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ftlayer.errors import UnsupportedError
from ftlayer.functions.context import Context
from ftlayer.functions.handles import MapHandle
from ftlayer.functions.process import LAST_WATERMARK_MS, ProcessFunction
from ftlayer.functions.windows.assigners import Window, WindowKind
from ftlayer.functions.windows.contents import Content

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
    """

    needs_event_time = True

    def __init__(self, windows: WindowKind, content: Content, lateness_ms: int, late_tag: str | None) -> None:
        """``late_tag`` None: late records are dropped."""
        self.kind = windows
        self._content = content
        self._lateness_ms = lateness_ms
        self._late_tag = late_tag

    def open(self, ctx: Context) -> None:
        """See `ProcessFunction.open`."""
        self._windows: MapHandle = ctx.map(TABLE)

    def process(self, record: Any, ctx: Context) -> None:
        """See `ProcessFunction.process`."""
        if ctx.timestamp is None:
            raise UnsupportedError(
                f"{ctx.uid!r} works on event time, and the record has none; use assign_watermarks(column, …) before "
                "key_by, behind every operator with timers of processing time"
            )
        if not self._take(record, ctx.timestamp, ctx) and self._late_tag is not None:
            ctx.output(self._late_tag, record)

    def on_timer(self, time_ms: int, ctx: Context) -> Iterator[Any]:
        """See `ProcessFunction.on_timer`."""
        for window, content in self._ending(time_ms):
            yield from self._content.emitted(ctx.key, window, content)
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
