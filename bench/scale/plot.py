"""Draw the curves of JSON files: ``python -m bench.scale.plot DIRECTORY FILE…`` (matplotlib; extra ``bench``).

Each curve becomes ``scale-<name>.svg``: its first cost over x, both axes logarithmic, with the exponent of each series.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST_LABELLED = 200.0
"""An axis whose ends are so far apart, as a ratio, has powers of ten alone."""


def drawn(curve: Mapping[str, Any]) -> dict[str, tuple[list[float], list[float], str]]:
    """Return what is drawn of a curve: series → (x, its first cost, label), without points that have none above 0."""
    cost = next(iter(curve["costs"]))
    found = {}
    for name, series in curve["series"].items():
        points = [point for point in series["points"] if point["x"] > 0 and point.get(cost, 0) > 0]
        if points:
            fitted = series["fits"].get(cost)
            label = name if fitted is None else f"{name}: x^{fitted['exponent']:.2f}"
            found[name] = [point["x"] for point in points], [point[cost] for point in points], label
    return found


def draw(curve: Mapping[str, Any], path: Path) -> None:
    """Write a curve's plot; the same points give the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure, axes = pyplot.subplots(figsize=(6, 3.6))
        for xs, costs, label in drawn(curve).values():
            axes.plot(xs, costs, marker="o", label=label)
        axes.set(xscale="log", yscale="log", title=curve["title"], xlabel=curve["x"])
        axes.set_ylabel(next(iter(curve["costs"].values())))
        for axis in (axes.xaxis, axes.yaxis):
            _label(axis)
        axes.grid(visible=True, which="both", alpha=0.2)
        axes.legend()
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)


def _label(axis: Any) -> None:
    """Write numbers at 1, 2 and 5 of each decade where there are few; powers of ten where there are many."""
    from matplotlib import ticker

    low, high = axis.get_view_interval()
    if high / low < MOST_LABELLED:
        for which in (axis.set_major_formatter, axis.set_minor_formatter):
            which(ticker.StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
    else:
        axis.set_minor_formatter(ticker.NullFormatter())


def main(directory: Path, files: list[Path]) -> None:
    """Draw all curves of the files; those of a later file replace those of an earlier one."""
    for file in files:
        for name, curve in json.loads(file.read_text())["curves"].items():
            if drawn(curve):
                draw(curve, directory / f"scale-{name}.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
