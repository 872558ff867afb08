"""Tumbling and sliding windows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ftlayer.functions.context import Context
from ftlayer.functions.handles import NOTHING
from ftlayer.functions.process import LAST_WATERMARK_MS
from ftlayer.functions.windows.assigners import Fixed, Window
from ftlayer.functions.windows.contents import Content
from ftlayer.functions.windows.function import WindowFunction, in_time


class FixedWindows(WindowFunction):
    """Windows whose times are known beforehand. State of a key: start → content."""

    def __init__(
        self, windows: Fixed, content: Content, lateness_ms: int = 0, late_tag: str | None = None
    ) -> None:
        """See `WindowFunction`."""
        super().__init__(windows, content, lateness_ms, late_tag)
        self._fixed = windows

    def _take(self, record: Any, time_ms: int, ctx: Context) -> bool:
        windows, content, watermark = self._windows, self._content, ctx.watermark
        starts = self._fixed.starts(time_ms)
        taken = not starts
        for start in starts:
            end = start + self._fixed.size_ms
            if end <= watermark and self._over_ms(end) <= watermark:
                continue
            held = windows.get(start, NOTHING)
            windows[start] = content.added(held, record)
            # One that is kept for late records may have been emitted, and behind a restore no watermark says so.
            if held is NOTHING or self._lateness_ms:
                ctx.timers.event(in_time(end))
            taken = True
        return taken

    def _ending(self, time_ms: int) -> Iterable[tuple[Window, Any]]:
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
