"""A cost curve: points of one kind of work, and the exponent with which their cost grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.harness import Target

if TYPE_CHECKING:
    from bench.scale.lab import Lab


@dataclass(frozen=True)
class Point:
    """What one amount of work cost: figures by name, their unit at the name's end (``cpu_us``, ``peak_mib``)."""

    series: str
    x: float
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Fit:
    """The line through the logarithms of points, by least squares: cost = factor · x ** exponent.

    ``residual`` is the root mean square of what the logarithms are off: 0.1 is about ten percent.
    """

    exponent: float
    factor: float
    residual: float


@dataclass(frozen=True)
class Curve:
    """One curve of the benchmark.

    Attributes:
        name: what it is asked for by.
        title, x: of its plot, and what its points differ in.
        costs: the figures that are fitted, and drawn: name → axis.
        measure: makes its points, fewer and smaller ones if ``quick``.
        metrics: what is reported of its points, by name.
        targets: of some of these.
        above_zero: those of ``costs`` whose fit is of what a point costs more than the one at x = 0.
    """

    name: str
    title: str
    x: str
    costs: Mapping[str, str]
    measure: Callable[[Lab, bool], Iterator[Point]]
    metrics: Callable[[Sequence[Point]], dict[str, float]] = lambda points: {}
    targets: Mapping[str, Target] = field(default_factory=dict)
    above_zero: frozenset[str] = frozenset()


def fit(xs: Sequence[float], costs: Sequence[float]) -> Fit | None:
    """Return the fit of points (x, cost); None with fewer than two different x. All numbers have to be above 0."""
    logs = [math.log(x) for x in xs]
    if len(set(logs)) < 2:
        return None
    heights = [math.log(cost) for cost in costs]
    middle, height = sum(logs) / len(logs), sum(heights) / len(heights)
    spread = sum((log - middle) ** 2 for log in logs)
    exponent = sum((log - middle) * (each - height) for log, each in zip(logs, heights, strict=True)) / spread
    start = height - exponent * middle
    off = [each - start - exponent * log for log, each in zip(logs, heights, strict=True)]
    return Fit(exponent, math.exp(start), math.sqrt(sum(each * each for each in off) / len(off)))


def series_of(points: Iterable[Point]) -> dict[str, list[Point]]:
    """Return points by series, each in the order of x."""
    found: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: point.x):
        found.setdefault(point.series, []).append(point)
    return found


def fits(curve: Curve, points: Sequence[Point]) -> dict[str, dict[str, Fit]]:
    """Return the fits of a curve: series → figure → fit. Points without a figure, or with none above 0, are left out.

    A cost of `Curve.above_zero` has a part that does not depend on x, such as a process's start: what the point at
    x = 0 costs is taken off before.
    """
    found: dict[str, dict[str, Fit]] = {}
    for series, each in series_of(points).items():
        for cost in curve.costs:
            known = {point.x: point.figures[cost] for point in each if cost in point.figures}
            constant = known.get(0.0, 0.0) if cost in curve.above_zero else 0.0
            more = {x: value - constant for x, value in known.items() if x > 0 and value > constant}
            fitted = fit(list(more), list(more.values()))
            if fitted is not None:
                found.setdefault(series, {})[cost] = fitted
    return found


def figure(points: Iterable[Point], series: str, x: float, name: str) -> float:
    """Return a figure of the point at ``x``; KeyError if there is none."""
    for point in points:
        if point.series == series and point.x == x and name in point.figures:
            return point.figures[name]
    raise KeyError(f"{series} has no {name} at {x}")


def ends(points: Iterable[Point], series: str) -> tuple[Point, Point]:
    """Return the points of a series with the lowest and with the highest x."""
    ordered = series_of(points)[series]
    return ordered[0], ordered[-1]


def as_json(curve: Curve, points: Sequence[Point]) -> dict[str, Any]:
    """Return a curve as it is written down."""
    found: dict[str, Any] = {"title": curve.title, "x": curve.x, "costs": dict(curve.costs), "series": {}}
    fitted = fits(curve, points)
    for series, each in series_of(points).items():
        found["series"][series] = {
            "points": [{"x": point.x, **point.figures} for point in each],
            "fits": {
                cost: {"exponent": one.exponent, "factor": one.factor, "residual": one.residual}
                for cost, one in fitted.get(series, {}).items()
            },
        }
    return found
