"""Functions in one chain: each is one more Python call a record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.keyed_count import ID
from bench.scale.curve import Curve, Point, ends
from bench.scale.in_slots import Discard, ids, same
from bench.scale.jobs import Setting, run_to_end
from bench.scale.lab import Lab

LENGTHS = (1, 2, 5, 10, 20)
SLOTS = 2


def build(records: int, length: int, env: Any, folder: Path) -> None:
    """A source, ``length`` functions that do nothing, and a sink."""
    from ftlayer import partitions

    parts = [partial(ids, str(folder), first, records, SLOTS) for first in range(SLOTS)]
    stream = env.source(partitions(*parts), ID)
    for _ in range(length):
        stream = stream.map(same, ID)
    stream.sink(Discard(str(folder)))


def measure(lab: Lab, quick: bool) -> Iterator[Point]:
    records = 500_000 if quick else 4_000_000
    for mode in ("untracked", "tracked"):
        for length in LENGTHS[::4] if quick else LENGTHS:
            setting = Setting(mode, SLOTS)  # type: ignore[arg-type]
            yield Point(mode, length, run_to_end(lab, setting, partial(build, records, length), records))


def metrics(points: Sequence[Point]) -> dict[str, float]:
    short, long = ends(points, "untracked")
    return {
        "chain_ns_a_function": (long.figures["cpu_us"] - short.figures["cpu_us"]) / (long.x - short.x) * 1_000
    }


CURVE = Curve("chain", "Functions in a chain", "functions", {"cpu_us": "CPU µs a record"}, measure, metrics)
