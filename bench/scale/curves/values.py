"""The size of a state's values, in memory and in LMDB: large ones are of fewer keys, so that all are as much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.scale.curve import Curve, Point, series_of
from bench.scale.curves.keyed import BACKENDS, state_figures
from bench.scale.in_slots import Discard, NewValue, no_value, number_of
from bench.scale.lab import MIB, Lab

SIZES = (10, 100, 1_000, 10_000, 100_000, MIB)
MOST_KEYS = 100_000


def kept(size: int, stream: Any, folder: Path) -> None:
    """Keep the latest value of each key; it does not leave the state."""
    values = stream.aggregate(no_value, NewValue(size), "id bigint, value binary")
    values.map(number_of, "id bigint").sink(Discard(str(folder)))


def measure(lab: Lab, quick: bool) -> Iterator[Point]:
    total = (32 if quick else 256) * MIB
    for backend in BACKENDS:
        for size in SIZES[::5] if quick else SIZES:
            keys = min(MOST_KEYS, total // size)
            updates = max(min(1_000_000, 8 * total // size) // (4 if quick else 1), 2 * keys)
            yield Point(backend, size, state_figures(lab, backend, keys, updates, partial(kept, size)))


def metrics(points: Sequence[Point]) -> dict[str, float]:
    found = {}
    for backend, each in series_of(points).items():
        found[f"value_us_{backend}"] = each[0].figures["update_us"]
        found[f"value_us_a_mib_{backend}"] = each[-1].figures["update_us"] / each[-1].x * MIB
    return found


CURVE = Curve(
    "values",
    "Size of a value",
    "bytes",
    {"update_us": "CPU µs an update", "peak_mib": "peak memory of a slot, MiB"},
    measure,
    metrics,
)
