"""The job of `bench.keyed_count` in ftlayer's modes, in other engines and in none: what is compared in pairs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Set
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import Run, note
from bench.jobs import SLOTS, bytewax_rate, bytewax_recovery_rate, has_bytewax, pathway, pathway_rate
from bench.keyed_count import ARROW_OPTIONS, Build, CheckpointedJobs, LayerJobs, arrow_job, python_job
from bench.peers.flink_java import FlinkJava

RATIOS = {
    "vs_bare_loop": ("untracked", "bare_loop"),
    "vs_flink_java": ("untracked", "flink_java"),
    "vs_flink_java_checkpointed": ("barriers", "flink_java_checkpointed"),
    "arrow_vs_flink_java": ("arrow_barriers", "flink_java_checkpointed"),
    "tracking_cost": ("tracked", "untracked"),
    "tracking_cost_source": ("tracked_source", "untracked"),
    "arrow_tracking_cost": ("arrow_tracked", "arrow_untracked"),
    "arrow_tracking_cost_source": ("arrow_tracked_source", "arrow_untracked"),
    "throughput_on_off_heap": ("barriers", "untracked"),
    "throughput_on_off_lmdb": ("barriers_lmdb", "untracked"),
    "vs_bytewax": ("tracked", "bytewax"),
    "vs_bytewax_recovery": ("barriers", "bytewax_recovery"),
    "vs_pathway": ("tracked", "pathway"),
}
"""Whose rate is divided by whose."""

SIDES = (
    "tracked_source",
    "tracked",
    "bare_loop",
    "untracked",
    "flink_java",
    "barriers_lmdb",
    "barriers",
    "flink_java_checkpointed",
    "arrow_barriers",
    "arrow_untracked",
    "arrow_tracked",
    "arrow_tracked_source",
    "bytewax",
    "bytewax_recovery",
    "pathway",
)
"""In the order of a round: the two sides of a ratio are near each other, so that little time is between their runs."""

ARROW_TIMES = 4
"""A vectorized job has so many times the records."""

FLINK_TIMES = 4
"""Flink has so many times the records: its compiler takes seconds to warm up, which long runs forget."""

FLINK_INTERVAL_MS = 1_000
"""Between checkpoints; ours is `bench.keyed_count.INTERVAL`."""

BARE_LOOP_START_S = 1.0


def sides(
    root: Path, spark: Any, flink: FlinkJava | None, records: int, wanted: Set[str]
) -> dict[str, Callable[[], Run]]:
    """Return those sides that are ``wanted`` and can run here; a note says which peers cannot.

    ``flink`` None leaves Flink out; so does `flink_java`, with a note.
    """
    layers = LayerJobs(_made(root / "layers"), spark)
    checkpointed = CheckpointedJobs(_made(root / "barriers"), spark)
    many = ARROW_TIMES * records

    def layer(job: Build, count: int, **options: Any) -> Callable[[], Run]:
        return partial(layers.run, job, count, **options)

    found: dict[str, Callable[[], Run]] = {
        "bare_loop": partial(bare_loop, records),
        "untracked": layer(python_job, records, tracked=False),
        "tracked": layer(python_job, records, tracked=True),
        "tracked_source": layer(partial(python_job, replay="source"), records, tracked=True),
        "barriers": partial(checkpointed.run, python_job, records),
        "barriers_lmdb": partial(checkpointed.run, python_job, records, backend="lmdb"),
        "arrow_untracked": layer(arrow_job, many, tracked=False, **ARROW_OPTIONS),
        "arrow_tracked": layer(arrow_job, many, tracked=True, **ARROW_OPTIONS),
        "arrow_tracked_source": layer(
            partial(arrow_job, replay="source"), many, tracked=True, **ARROW_OPTIONS
        ),
        "arrow_barriers": partial(checkpointed.run, arrow_job, many, ARROW_OPTIONS),
    }
    if flink is not None:
        found["flink_java"] = partial(in_flink, flink, records)
        found["flink_java_checkpointed"] = partial(in_flink, flink, records, FLINK_INTERVAL_MS)
    if has_bytewax():
        found["bytewax"] = lambda: Run(bytewax_rate(records // 4))
        found["bytewax_recovery"] = lambda: Run(bytewax_recovery_rate(records // 4))
    elif not wanted.isdisjoint({"bytewax", "bytewax_recovery"}):
        note("bytewax is not installed (pip install '.[bench]'): nothing is compared with it")
    if interpreter := pathway():
        found["pathway"] = lambda: Run(pathway_rate(interpreter, records // 8))
    elif "pathway" in wanted:
        note("BENCH_PATHWAY_PYTHON names no interpreter that has Pathway: no vs_pathway")
    return {name: found[name] for name in SIDES if name in wanted and name in found}


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


def in_flink(flink: FlinkJava, records: int, interval_ms: int = 0) -> Run:
    """Run the job in Flink, with `FLINK_TIMES` the records; ``interval_ms`` 0: without checkpoints."""
    return Run(flink.rate(FLINK_TIMES * records, SLOTS, interval_ms=interval_ms))


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
