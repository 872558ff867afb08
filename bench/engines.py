"""One job in several engines, in turn: ftlayer in its modes, Flink in Java, Bytewax, Pathway, and no engine at all.

The job is that of `bench.topology`: a Python function a record, a count for each of 10,000 keys, a Python function a
record; `arrow` is the same with functions of whole batches and a built-in aggregate. Every round runs all of them one
after the other, and a ratio is that of two runs of one round: its median over the rounds is reported, with the lowest
and the highest. ``cpu_us`` is what the slots' processes, or those of the bare loop, took for a record.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench import checkpoint, topology
from bench.harness import Target, note
from bench.jobs import SLOTS, bytewax_rate, has_bytewax, pathway, pathway_rate, session
from bench.peers.flink_java import FlinkJava, flink_java
from bench.topology import ARROW_OPTIONS, arrow_job, python_job

TARGETS = {
    "vs_flink_java_checkpointed": Target(at_least=1.0),
    "vs_bare_loop": Target(at_least=0.45),
    "arrow_vs_flink_java": Target(at_least=3.0),
    "tracking_cost": Target(at_least=0.65),
    "arrow_tracking_cost": Target(at_least=0.4),
    "tracking_cost_source": Target(at_least=0.85),
    "arrow_tracking_cost_source": Target(at_least=0.7),
}

RATIOS = {
    "vs_bare_loop": ("untracked", "bare_loop"),
    "vs_flink_java": ("untracked", "flink_java"),
    "vs_flink_java_checkpointed": ("barriers", "flink_java_checkpointed"),
    "arrow_vs_flink_java": ("arrow_barriers", "flink_java_checkpointed"),
    "tracking_cost": ("tracked", "untracked"),
    "arrow_tracking_cost": ("arrow_tracked", "arrow_untracked"),
    "tracking_cost_source": ("tracked_source", "untracked"),
    "arrow_tracking_cost_source": ("arrow_tracked_source", "arrow_untracked"),
    "throughput_on_off_heap": ("barriers", "untracked"),
    "vs_bytewax": ("tracked", "bytewax"),
    "vs_pathway": ("tracked", "pathway"),
}
"""Whose rate is divided by whose."""

ROUNDS = 7
ARROW_TIMES = 4
"""A vectorized job has so many times the records."""

FLINK_TIMES = 4
"""Flink has so many times the records: its compiler takes seconds to warm up, which long runs forget."""

INTERVAL_MS = 1_000
BARE_LOOP_START_S = 1.0


@dataclass(frozen=True)
class Run:
    """Records a second, and CPU µs a record; 0 where it is not known."""

    rate: float
    cpu_us: float = 0.0


def bare_loop(records: int) -> Run:
    """Call the functions in two processes, without any engine."""
    begin = time.monotonic() + BARE_LOOP_START_S
    ran = subprocess.run(
        [sys.executable, "-m", "bench.peers.bare_loop", str(begin), str(records)],
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(ran.stdout)
    return Run(found["records"] / found["seconds"], found["cpu_seconds"] / records * 1e6)


def sides(root: Any, spark: Any, flink: FlinkJava | None, records: int) -> dict[str, Callable[[], Run]]:
    """Return what is compared, by name."""
    plain, checkpointed = topology.Bench(root / "plain", spark), checkpoint.Bench(root / "barriers", spark)

    def mode(job: Any, count: int, **options: Any) -> Callable[[], Run]:
        return lambda: Run(plain.rate(job, count, **options), plain.cpu_us)

    def barriers(job: Any, count: int, options: dict[str, int]) -> Callable[[], Run]:
        return lambda: Run(
            checkpointed.rate(count, job, options=options, interval=INTERVAL_MS)[0], checkpointed.cpu_us
        )

    many = ARROW_TIMES * records
    found = {
        "bare_loop": lambda: bare_loop(records),
        "untracked": mode(python_job, records, tracked=False),
        "barriers": barriers(python_job, records, {}),
        "tracked": mode(python_job, records, tracked=True),
        "tracked_source": mode(partial(python_job, replay="source"), records, tracked=True),
        "arrow_untracked": mode(arrow_job, many, tracked=False, **ARROW_OPTIONS),
        "arrow_barriers": barriers(arrow_job, many, ARROW_OPTIONS),
        "arrow_tracked": mode(arrow_job, many, tracked=True, **ARROW_OPTIONS),
        "arrow_tracked_source": mode(
            partial(arrow_job, replay="source"), many, tracked=True, **ARROW_OPTIONS
        ),
    }
    if flink is not None:
        longer = FLINK_TIMES * records
        found["flink_java"] = lambda: Run(flink.rate(longer, SLOTS))
        found["flink_java_checkpointed"] = lambda: Run(flink.rate(longer, SLOTS, interval_ms=INTERVAL_MS))
    if has_bytewax():
        found["bytewax"] = lambda: Run(bytewax_rate(records // 4))
    else:
        note("bytewax is not installed (pip install '.[bench]'): no vs_bytewax")
    if interpreter := pathway():
        found["pathway"] = lambda: Run(pathway_rate(interpreter, records // 8))
    else:
        note("BENCH_PATHWAY_PYTHON names no interpreter that has Pathway: no vs_pathway")
    return found


def summary(runs: dict[str, list[Run]]) -> dict[str, float]:
    """Return medians of rates, CPU times and ratios, and the ratios' ranges."""
    found: dict[str, float] = {}
    for name, (over, under) in RATIOS.items():
        if over in runs and under in runs:
            ratios = [one.rate / other.rate for one, other in zip(runs[over], runs[under], strict=True)]
            found[name] = statistics.median(ratios)
            found[f"{name}_lowest"], found[f"{name}_highest"] = min(ratios), max(ratios)
    for name, each in runs.items():
        found[f"records_per_s_{name}"] = statistics.median(run.rate for run in each)
        if any(run.cpu_us for run in each):
            found[f"cpu_us_{name}"] = statistics.median(run.cpu_us for run in each)
    return found


def run(quick: bool) -> dict[str, float]:
    records = 3_000_000 if quick else 12_000_000
    with session() as (root, spark), flink_java() as flink:
        for name in ("plain", "barriers"):
            (root / name).mkdir()
        warm = sides(root, spark, None, 300_000)
        for name in ("untracked", "barriers", "tracked"):
            warm[name]()
        compared = sides(root, spark, flink, records)
        runs: dict[str, list[Run]] = {name: [] for name in compared}
        for _ in range(3 if quick else ROUNDS):
            for name, measure in compared.items():
                runs[name].append(measure())
    return summary(runs)
