"""Keys of a state: a count for each, in memory and in LMDB."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.scale.curve import Curve, Point, ends
from bench.scale.curves.keyed import BACKENDS, state_figures
from bench.scale.in_slots import Discard, one_more, zero
from bench.scale.lab import Lab

KEYS = (10_000, 100_000, 1_000_000, 10_000_000)


def counted(stream: Any, folder: Path) -> None:
    """Count each key."""
    stream.aggregate(zero, one_more, "n bigint").sink(Discard(str(folder)))


def measure(lab: Lab, quick: bool) -> Iterator[Point]:
    for backend in BACKENDS:
        for keys in KEYS[:2] if quick else KEYS:
            updates = 500_000 if quick else 2_000_000
            yield Point(backend, keys, state_figures(lab, backend, keys, updates, counted))


def metrics(points: Sequence[Point]) -> dict[str, float]:
    found = {}
    for backend in BACKENDS:
        few, many = ends(points, backend)
        found[f"keys_update_{backend}_most_vs_fewest"] = many.figures["update_us"] / few.figures["update_us"]
        found[f"keys_bytes_a_key_{backend}"] = (
            (many.figures["peak_mib"] - few.figures["peak_mib"]) * (1 << 20) / ((many.x - few.x) / 2)
        )
    return found


CURVE = Curve(
    "keys",
    "Keys of a state",
    "keys",
    {
        "update_us": "CPU µs an update",
        "fill_us": "CPU µs a new key",
        "peak_mib": "peak memory of a slot, MiB",
        "checkpoint_ms": "a full checkpoint, ms",
    },
    measure,
    metrics,
)
