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
    """Windows that end when no record came for a while. State of a key: start → (end, content).

    A record begins a window from its time to ``gap_ms`` later; windows that overlap, or touch, are one. Sessions of a
    key so never have a time in common.
    """

    def __init__(
        self, windows: Session, content: Content, lateness_ms: int = 0, late_tag: str | None = None
    ) -> None:
        """See `WindowFunction`."""
        super().__init__(content, lateness_ms, late_tag)
        self._gap_ms = windows.gap_ms

    def _take(self, record: Any, time_ms: int, ctx: Context) -> bool:
        start, end = time_ms, in_time(time_ms + self._gap_ms)
        touching = self._touching(start, end)
        if not touching and self._over_ms(end) <= ctx.watermark:
            return False
        content: Any = NOTHING
        for window, held in touching:
            content = held if content is NOTHING else self._content.merged(content, held)
            start, end = min(start, window.start_ms), max(end, window.end_ms)
        added = self._content.added(content, record)
        for window, _ in touching:
            if window.start_ms != start:
                del self._windows[window.start_ms]
        self._windows[start] = (end, added)
        for window, _ in touching:
            if window.end_ms != end:
                self._take_timers_back(window.end_ms, ctx)
        self._set_timers(end, ctx)
        return True

    def _touching(self, start_ms: int, end_ms: int) -> list[tuple[Window, Any]]:
        """Return the sessions that overlap or touch a span of time, in their order."""
        found = [
            (Window(start, end), content)
            for start, (end, content) in self._windows.items()
            if start <= end_ms and start_ms <= end
        ]
        return sorted(found, key=lambda session: session[0].start_ms)

    def _take_timers_back(self, end_ms: int, ctx: Context) -> None:
        """Take the timers of a session that has another end now back, save those that others need."""
        needed = {time for end, _ in self._windows.values() for time in (end, self._over_ms(end))}
        for time_ms in {end_ms, self._over_ms(end_ms)} - needed:
            ctx.timers.delete_event(time_ms)

    def _ending(self, time_ms: int) -> Iterable[tuple[Window, Any]]:
        return [
            (Window(start, end), content)
            for start, (end, content) in sorted(self._windows.items(), key=lambda item: item[0])
            if end == time_ms
        ]

    def _forget(self, time_ms: int) -> None:
        for start in [start for start, (end, _) in self._windows.items() if self._over_ms(end) == time_ms]:
            del self._windows[start]
