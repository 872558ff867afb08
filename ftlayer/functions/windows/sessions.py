"""Session windows: they grow with their records, and merge."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ftlayer.functions.context import Context
from ftlayer.functions.handles import NOTHING
from ftlayer.functions.windows.assigners import Session, Window
from ftlayer.functions.windows.contents import Content
from ftlayer.functions.windows.function import WindowFunction, in_time


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
        """See `WindowFunction`."""
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
        windows[start] = (end, content, False)
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
