"""Slots on a cluster, four to a machine and a core for each, by the model of `bench.scale.cluster`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench import harness
from bench.scale.cluster.measured import costs
from bench.scale.cluster.model import Cluster, predicted
from bench.scale.curve import Curve, Point, figure
from bench.scale.jobs import MODES
from bench.scale.lab import Lab

SLOTS = (2, 4, 8, 16, 32, 64, 100, 200, 400)
ASKED = 100
"""Slots, on 25 machines: what is reported."""

SHARED = "untracked, two cores"
"""The slots of the curve `slots`, to compare it with."""


def measure(lab: Lab, quick: bool) -> Iterator[Point]:
    found = costs(lab, quick)
    harness.keep("cluster_costs", found.written())
    for mode in MODES:
        for slots in SLOTS:
            yield Point(mode, slots, within(predicted(mode, found, Cluster(slots))))
    for slots in (2, 4, 8, 16):
        yield Point(SHARED, slots, predicted("untracked", found, Cluster(slots, slots, 2 / slots)))


def within(figures: dict[str, float]) -> dict[str, float]:
    """Leave out what slots take that wait for the vertex: the model has none that are idle."""
    if figures["slot_used"] > 0.999:
        return figures
    of_busy = ("cpu_us", "slot_used", "rows_a_frame")
    return {
        name: each for name, each in figures.items() if name not in of_busy and not name.endswith("_share")
    }


def metrics(points: Sequence[Point]) -> dict[str, float]:
    found = {}
    for mode in MODES:
        rates = [figure(points, mode, slots, "records_per_s") / slots for slots in (2, ASKED)]
        found[f"cluster_{ASKED}_a_slot_vs_2_{mode}"] = rates[1] / rates[0]
        for name in ("records_per_s", "coordinator_used", "vertex_used", "network_used", "channels_mib"):
            found[f"cluster_{ASKED}_{name}_{mode}"] = figure(points, mode, ASKED, name)
    shared = [figure(points, SHARED, slots, "cpu_us") for slots in (2, 16)]
    found["cluster_16_vs_2_on_two_cores_by_cpu"] = shared[0] / shared[1]
    return found


CURVE = Curve(
    "cluster",
    "Slots on machines of their own (a model)",
    "slots",
    {"cpu_us": "CPU µs a record, all slots", "coordinator_used": "of the coordinator's core"},
    measure,
    metrics,
)
