"""Exchanges, one behind the other: at each one half of the records goes to the other slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.keyed_count import ID
from bench.scale.curve import Curve, Point, ends
from bench.scale.in_slots import Discard, ids, same
from bench.scale.jobs import MODES, Setting, run_to_end
from bench.scale.lab import Lab

SHUFFLES = (1, 2, 4, 8)
SLOTS = 2


def build(records: int, shuffles: int, env: Any, folder: Path) -> None:
    """A source, then ``shuffles`` times: to the slot of a key, and a function."""
    from ftlayer import partitions

    parts = [partial(ids, str(folder), first, records, SLOTS) for first in range(SLOTS)]
    stream = env.source(partitions(*parts), ID)
    for _ in range(shuffles):
        stream = stream.key_by("id").map(same, ID)
    stream.sink(Discard(str(folder)))


def measure(lab: Lab, quick: bool) -> Iterator[Point]:
    records = 500_000 if quick else 3_000_000
    for mode in MODES:
        for shuffles in SHUFFLES[::3] if quick else SHUFFLES:
            yield Point(
                mode,
                shuffles,
                run_to_end(lab, Setting(mode, SLOTS), partial(build, records, shuffles), records),
            )


def metrics(points: Sequence[Point]) -> dict[str, float]:
    found = {}
    for mode in MODES:
        few, many = ends(points, mode)
        more = many.figures["cpu_us"] - few.figures["cpu_us"]
        found[f"shuffle_us_{mode}"] = more / (many.x - few.x)
    return found


CURVE = Curve("shuffles", "Exchanges in a row", "exchanges", {"cpu_us": "CPU µs a record"}, measure, metrics)
