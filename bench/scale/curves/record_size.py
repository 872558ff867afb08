"""The size of a record: source, exchange, sink; in acker mode each goes through the vertex, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.scale.curve import Curve, Point, series_of
from bench.scale.in_slots import Discard, bodies, same
from bench.scale.jobs import MODES, Setting, run_to_end
from bench.scale.lab import MIB, Lab

SIZES = (10, 100, 1_000, 10_000, 100_000, MIB)
SLOTS = 2
SCHEMA = "id bigint, body binary"
MOST_RECORDS = 1_000_000


def build(records: int, size: int, env: Any, folder: Path) -> None:
    """A source of records of ``size`` bytes, a function, an exchange, a sink."""
    from ftlayer import partitions

    parts = [partial(bodies, str(folder), first, records, SLOTS, size) for first in range(SLOTS)]
    env.source(partitions(*parts), SCHEMA).key_by("id").map(same, SCHEMA).sink(Discard(str(folder)))


def measure(lab: Lab, quick: bool) -> Iterator[Point]:
    total = (32 if quick else 512) * MIB
    for mode in MODES:
        for size in SIZES[::5] if quick else SIZES:
            records = min(MOST_RECORDS // (5 if quick else 1), total // size)
            setting = Setting(mode, SLOTS)
            figures = run_to_end(lab, setting, partial(build, records, size), records)
            figures["mib_per_s"] = figures["records_per_s"] * size / MIB
            yield Point(mode, size, figures)


def metrics(points: Sequence[Point]) -> dict[str, float]:
    found = {}
    for mode, each in series_of(points).items():
        found[f"record_us_{mode}"] = each[0].figures["cpu_us"]
        found[f"record_us_a_mib_{mode}"] = each[-1].figures["cpu_us"] / each[-1].x * MIB
    return found


CURVE = Curve(
    "record_size",
    "Size of a record",
    "bytes",
    {"cpu_us": "CPU µs a record", "peak_mib": "peak memory of a slot, MiB"},
    measure,
    metrics,
)
