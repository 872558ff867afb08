"""Topologies of one slot each on one vertex; all together they have as many records at each point."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from bench.scale.curve import Curve, Point, ends
from bench.scale.curves.slots import build
from bench.scale.jobs import Setting, environment, figures_of
from bench.scale.lab import Lab, footprint
from bench.scale.vertices import pid_of, warm

TOPOLOGIES = (1, 2, 5, 10, 20)


def run_all(lab: Lab, topologies: int, records: int) -> dict[str, float]:
    """Run them beside each other to their ends; return the figures of all."""
    from ftlayer import FTLayer

    each = records // topologies
    with lab.folder() as folder, FTLayer.embedded(folder / "ft") as layer:
        layer.address  # noqa: B018 - starts the vertex
        with layer.vertex.client(client_id="warm") as client:
            warm(client)
        pid = pid_of(layer.vertex)
        begun, driver = footprint(pid), footprint(os.getpid())
        jobs: list[Any] = []
        for number in range(topologies):
            env = environment(lab, layer, folder, Setting("tracked", 1), f"{lab.job_name}-{number}")
            build(each, 1, env, folder)
            jobs.append(env.execute_async())
        for job in jobs:
            job.wait()
        ended = footprint(pid)
        figures = figures_of(folder, each * topologies)
    return figures | {
        "vertex_us": (ended.cpu_s - begun.cpu_s) / (each * topologies) * 1e6,
        "vertex_mib": (ended.anonymous - begun.anonymous) / (1 << 20),
        "driver_ms": (footprint(os.getpid()).cpu_s - driver.cpu_s) * 1_000,
    }


def measure(lab: Lab, quick: bool) -> Iterator[Point]:
    records = 400_000 if quick else 4_000_000
    for topologies in TOPOLOGIES[::2] if quick else TOPOLOGIES:
        yield Point("tracked", topologies, run_all(lab, topologies, records))


def metrics(points: Sequence[Point]) -> dict[str, float]:
    one, many = ends(points, "tracked")
    return {
        "topologies_cpu_most_vs_one": many.figures["cpu_us"] / one.figures["cpu_us"],
        "topologies_vertex_most_vs_one": many.figures["vertex_us"] / one.figures["vertex_us"],
        "topologies_driver_ms_each": many.figures["driver_ms"] / many.x,
    }


CURVE = Curve(
    "topologies",
    "Topologies on one vertex",
    "topologies",
    {"cpu_us": "CPU µs a record, all slots", "vertex_us": "the vertex's CPU µs a record"},
    measure,
    metrics,
)
