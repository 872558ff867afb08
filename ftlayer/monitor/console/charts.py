"""Small charts as SVG: a series over the last hour, batches by phase, and a bar for a share.

They have no text in them, so that they can be stretched to any width; what they say stands in words beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 240
HEIGHT = 56


def area(values: Sequence[float], label: str) -> Markup:
    """Draw a series from left to right, zero at the bottom and its largest value at the top; NaN is a gap.

    ``label`` says in words what is to be seen.
    """
    largest = largest_of(values)
    step = WIDTH / max(len(values) - 1, 1)
    drawn = []
    for start, run in _runs(values):
        points = [
            (round((start + index) * step, 1), round(HEIGHT - value / largest * (HEIGHT - 2), 1))
            for index, value in enumerate(run)
        ]
        if len(points) == 1:  # a line needs two ends
            points.append((round(min(points[0][0] + step, WIDTH), 1), points[0][1]))
        line = " ".join(f"{x:g},{y:g}" for x, y in points)
        drawn.append(f'<polygon points="{points[0][0]:g},{HEIGHT} {line} {points[-1][0]:g},{HEIGHT}"/>')
        drawn.append(f'<polyline points="{line}"/>')
    return _svg("chart", label, "".join(drawn))


def largest_of(values: Sequence[float]) -> float:
    """Return the value at the top of a chart: the largest, or 1 where none is above 0."""
    return max((value for value in values if math.isfinite(value)), default=0.0) or 1.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of `stack`: its parts from the bottom up, and what it says when somebody points at it."""

    parts: tuple[float, ...]
    title: str


def stack(bars: Sequence[Bar], label: str) -> Markup:
    """Draw bars side by side, the last one at the right: parts on top of each other, of classes ``p0``, ``p1`` …"""
    largest = max((sum(bar.parts) for bar in bars), default=0.0) or 1.0
    step = WIDTH / max(len(bars), 24)  # a few batches do not become walls
    drawn = []
    for index, bar in enumerate(bars):
        x, top = WIDTH - (len(bars) - index) * step, float(HEIGHT)
        drawn.append(f"<g><title>{escape(bar.title)}</title>")
        for number, part in enumerate(bar.parts):
            height = part / largest * (HEIGHT - 2)
            top -= height
            drawn.append(
                f'<rect class="p{number}" x="{x:.1f}" y="{top:.1f}" width="{step * 0.84:.1f}" height="{height:.1f}"/>'
            )
        drawn.append("</g>")
    return _svg("chart stack", label, "".join(drawn))


def meter(share: float, label: str, kind: str = "") -> Markup:
    """Draw a share from 0 to 1 as a bar; ``kind`` is a class for its colour."""
    width = round(min(max(share, 0.0), 1.0) * 100, 1) if math.isfinite(share) else 0.0
    return Markup(
        '<svg class="meter {}" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<rect class="track" width="100" height="6"/><rect class="fill" width="{}" height="6"/></svg>'
    ).format(kind, label, f"{width:g}")


def _runs(values: Sequence[float]) -> Iterator[tuple[int, list[float]]]:
    """Yield the stretches without a gap: where each begins, and its values."""
    run: list[float] = []
    for index, value in enumerate([*values, math.nan]):
        if math.isfinite(value):
            run.append(max(value, 0.0))
        elif run:
            yield index - len(run), run
            run = []


def _svg(kind: str, label: str, drawn: str) -> Markup:
    """Wrap shapes that are made of numbers and escaped text alone."""
    return Markup(
        '<svg class="{}" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(kind, WIDTH, HEIGHT, label, Markup(drawn))
