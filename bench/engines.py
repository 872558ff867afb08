"""One job in several engines, in turn: ftlayer in its modes, Flink in Java, Bytewax, Pathway, and no engine at all.

The job is that of `bench.keyed_count`: a Python function a record, a count for each of 10,000 keys, a Python function a
record; `arrow` is the same with functions of whole batches and a built-in aggregate. ``cpu_us`` is what the slots'
processes, or those of the bare loop, took for a record.
"""

from __future__ import annotations

from bench.harness import Target, compared, in_turn
from bench.jobs import session
from bench.peers.flink_java import flink_java
from bench.sides import RATIOS, SIDES, sides

TARGETS = {
    "vs_flink_java_checkpointed": Target(at_least=1.0),
    "vs_bare_loop": Target(at_least=0.45),
    "arrow_vs_flink_java": Target(at_least=3.0),
    "tracking_cost": Target(at_least=0.65),
    "arrow_tracking_cost": Target(at_least=0.4),
    "tracking_cost_source": Target(at_least=0.85),
    "arrow_tracking_cost_source": Target(at_least=0.7),
}

WANTED = set(SIDES) - {"barriers_lmdb", "bytewax_recovery"}
"""`bench.checkpoint` has the others."""


def run(quick: bool, pairs: int) -> dict[str, float]:
    """Run all of them ``pairs`` times, in turn."""
    records = 3_000_000 if quick else 12_000_000
    with session() as (root, spark), flink_java() as flink:
        warm = sides(root / "warm", spark, None, 300_000, {"untracked", "barriers", "tracked"})
        in_turn(warm, 1)
        return compared(in_turn(sides(root, spark, flink, records, WANTED), pairs), RATIOS)
