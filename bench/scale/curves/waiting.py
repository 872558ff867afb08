"""Records that wait for another attempt: a start of the vertex with all of them, its memory, and listing them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench.harness import Target
from bench.scale.curve import Curve, Point, ends
from bench.scale.lab import Lab
from bench.scale.vertices import FAR_MS, OPTIONS, STREAM, core_over, rows_of, start_figures
from ftlayer.common.clock import system_now
from ftlayer.vertex.calls import OpenStream
from ftlayer.vertex.store import dead_index as failed
from ftlayer.vertex.store.dead_index import FailedRecord, FailedTable
from ftlayer.vertex.store.rows import Payloads, StoredAttempt

WAITING = (1_000, 10_000, 100_000, 1_000_000, 5_000_000)
AT_ONCE = 50_000
PAYLOADS = 1_000
PAYLOAD_BYTES = 100


def fill(folder: Path, records: int) -> None:
    """Write a store in which so many records wait, as the rules write one, without a service in front of it."""
    now = system_now()
    rng = np.random.default_rng(records)
    with core_over(folder) as (store, core):
        with store.write(intake=True) as txn:
            core.apply(txn, OpenStream(STREAM, OPTIONS), None, now).after()
            rows = Payloads().rows(txn, rows_of(PAYLOADS, PAYLOAD_BYTES))
            digest, bodies = rows.digest, [rows.body(row) for row in range(PAYLOADS)]
        cause = StoredAttempt(1, now.wall_ms, "ValueError: no number", "parse", "", b"", "no traceback\n")
        for start in range(0, records, AT_ONCE):
            roots = rng.integers(1, 1 << 63, min(AT_ONCE, records - start)).tolist()
            with store.write(intake=True) as txn:
                for number, root in enumerate(roots, start):
                    key = failed.key_of(1, now.wall_ms + FAR_MS + number // 100, 1 << 32 | number)
                    body = bodies[number % PAYLOADS]
                    record = FailedRecord(root, root, 2, None, False, (cause,), digest, body)
                    failed.put(txn, FailedTable.WAITING, key, record)


def measure(lab: Lab, quick: bool) -> Iterator[Point]:
    for records in (0, *(WAITING[:3] if quick else WAITING)):
        with lab.folder() as folder:
            fill(folder, records)
            yield Point("waiting", records, start_figures(folder, "waiting"))


def metrics(points: Sequence[Point]) -> dict[str, float]:
    empty, many = ends(points, "waiting")
    few = next(point for point in sorted(points, key=lambda point: point.x) if point.x)
    more = many.figures["start_cpu_ms"] - empty.figures["start_cpu_ms"]
    return {
        "waiting_start_us_a_record": more / many.x * 1_000,
        "waiting_anonymous_mib_more": many.figures["anonymous_mib"] - empty.figures["anonymous_mib"],
        "waiting_list_most_vs_fewest": many.figures["list_us"] / few.figures["list_us"],
    }


CURVE = Curve(
    "waiting",
    "Records that wait",
    "waiting records",
    {
        "start_ms": "start of the vertex, ms",
        "list_us": "CPU µs a listed record",
        "anonymous_mib": "memory of the vertex, MiB",
    },
    measure,
    metrics,
    {
        "waiting_start_us_a_record": Target(at_most=0.5, unit="µs"),
        "waiting_anonymous_mib_more": Target(at_most=32, unit="MiB"),
        "waiting_list_most_vs_fewest": Target(at_most=1.5),
    },
    frozenset({"start_ms"}),
)
