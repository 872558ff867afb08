"""How cost grows with the work: curves of slots, chains, exchanges, keys, sizes, and of what waits in a vertex.

Each curve is a file of `bench.scale.curves`. A point is shown as soon as it is measured. A curve's exponent is that of
cost = factor · x ** exponent, by least squares over the logarithms; its residual says how far points are off that line.
CPU time is that of the slots' processes, or of the vertex: it is what a machine with other work distorts least.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from bench import harness
from bench.scale.curve import Curve, Point, as_json, fits
from bench.scale.curves import (
    chain,
    cluster,
    dead_letters,
    keys,
    pending,
    record_size,
    shuffles,
    slots,
    topologies,
    values,
    waiting,
)
from bench.scale.lab import Lab

_MODULES = (
    slots,
    chain,
    shuffles,
    keys,
    values,
    pending,
    record_size,
    waiting,
    topologies,
    dead_letters,
    cluster,
)
CURVES: dict[str, Curve] = {module.CURVE.name: module.CURVE for module in _MODULES}
PARTS = tuple(CURVES)
TARGETS: dict[str, harness.Target] = {}
"""Of the curves that were measured."""


def run(quick: bool, parts: Sequence[str] = ()) -> dict[str, float]:
    """Measure the curves named ``parts``, or all."""
    found: dict[str, float] = {}
    written = {}
    with Lab() as lab:
        for name in parts or PARTS:
            curve = CURVES[name]
            begin = time.monotonic()
            points = _measured(curve, lab, quick)
            found |= curve.metrics(points)
            for series, each in fits(curve, points).items():
                for cost, one in each.items():
                    found[f"{name}/{series}/{cost} exponent"] = one.exponent
            TARGETS.update(curve.targets)
            written[name] = as_json(curve, points)
            _say(f"{name}: {time.monotonic() - begin:.0f} s")
    harness.keep("curves", written)
    return found


def _measured(curve: Curve, lab: Lab, quick: bool) -> list[Point]:
    points = []
    for point in curve.measure(lab, quick):
        points.append(point)
        figures = ", ".join(f"{name} {harness.readable(value)}" for name, value in point.figures.items())
        _say(f"{curve.name} {point.series} {harness.readable(point.x)}: {figures}")
    return points


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
