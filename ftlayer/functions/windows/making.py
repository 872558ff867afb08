"""The process function of a kind of window."""

from __future__ import annotations

from ftlayer.functions.windows.assigners import Fixed, WindowKind
from ftlayer.functions.windows.contents import Content
from ftlayer.functions.windows.fixed import FixedWindows
from ftlayer.functions.windows.function import WindowFunction
from ftlayer.functions.windows.sessions import SessionWindows


def window_function(
    windows: WindowKind, content: Content, lateness_ms: int = 0, late_tag: str | None = None
) -> WindowFunction:
    """Return it; late records go to the side output ``late_tag``, or nowhere."""
    if isinstance(windows, Fixed):
        return FixedWindows(windows, content, lateness_ms, late_tag)
    return SessionWindows(windows, content, lateness_ms, late_tag)
