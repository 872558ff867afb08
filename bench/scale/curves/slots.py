"""Slots, on the cores that there are: every slot has a channel to every other one, so channels grow with the square."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import Target
from bench.keyed_count import COUNTED, ID, KEYED, count, none_yet
from bench.peers.functions import last, with_key
from bench.scale.curve import Curve, Point, ends, figure
from bench.scale.in_slots import Discard, ids
from bench.scale.jobs import MODES, Setting, run_to_end
from bench.scale.lab import Lab

SLOTS = (2, 4, 8, 16)
ROUNDS = 3


def build(records: int, slots: int, env: Any, folder: Path) -> None:
    """The job of `bench.topology`, with a source and a sink in each slot."""
    from ftlayer import partitions

    parts = [partial(ids, str(folder), first, records, slots) for first in range(slots)]
    keyed = env.source(partitions(*parts), ID).map(with_key, KEYED).key_by("key")
    counted = keyed.aggregate(none_yet, count, COUNTED, volatile_state=True)
    counted.map(last, COUNTED).sink(Discard(str(folder)))


def measure(lab: Lab, quick: bool) -> Iterator[Point]:
    records = 500_000 if quick else 16_000_000
    run_to_end(lab, Setting(), partial(build, 100_000, 2), 100_000)
    for mode in MODES:
        for slots in SLOTS[::3] if quick else SLOTS:
            runs = [
                run_to_end(lab, Setting(mode, slots), partial(build, records, slots), records)
                for _ in range(1 if quick else ROUNDS)
            ]
            yield Point(mode, slots, {name: statistics.median(run[name] for run in runs) for name in runs[0]})


def metrics(points: Sequence[Point]) -> dict[str, float]:
    found: dict[str, float] = {}
    for mode in MODES:
        few, many = ends(points, mode)
        name = f"slots_{many.x:.0f}_vs_{few.x:.0f}_{mode}"
        found[name] = many.figures["records_per_s"] / few.figures["records_per_s"]
        found[f"{name}_by_cpu"] = figure(points, mode, few.x, "cpu_us") / figure(
            points, mode, many.x, "cpu_us"
        )
    return found


CURVE = Curve(
    "slots",
    "Slots on two cores",
    "slots",
    {"cpu_us": "CPU µs a record, all slots", "peak_mib": "peak memory of a slot, MiB"},
    measure,
    metrics,
    {f"slots_16_vs_2_{mode}": Target(at_least=0.7) for mode in MODES},
)
