"""A continuous topology of two slots: its rate beside the same job's elsewhere, and how long a record takes.

Rates are of the job of `bench.keyed_count`, in acker mode and without tracking, and beside them in barrier mode, in
Flink with Java functions, in Bytewax (with ``--pyflink``, in PyFlink too), and in a bare loop. The peers are timed by
their own clocks, which is the machine's monotone clock.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.harness import Target, compared, in_turn, note, spread
from bench.jobs import SLOTS, session, wait_until
from bench.keyed_count import (
    LayerJobs,
    Marks,
    cpu_seconds_between,
    create,
    environment,
    python_job,
    read_marks,
)
from bench.limits import Latency, Limit, Limits, StoreWrites
from bench.peers.flink_java import flink_java
from bench.peers.functions import with_key
from bench.sides import RATIOS, sides

TARGETS = {
    "records_per_s_tracked": Target(at_least=1e6),
    "records_per_s_arrow_tracked": Target(at_least=4e6),
    "vs_bare_loop": Target(at_least=0.45),
    "vs_flink_java_checkpointed": Target(at_least=1.0),
    "vs_bytewax": Target(at_least=2.5),
    "tracking_cost": Target(at_least=0.65),
    "p99_at_10k_over_limit": Target(at_most=1),
    "p50_ms_at_10k_source": Target(at_most=2),
    "p99_ms_at_10k_source": Target(at_most=6),
    "slot_recovery_s": Target(at_most=1.2),
    "replayed_s": Target(at_most=3),
    "start_s": Target(at_most=3),
}

WANTED = {
    "bare_loop",
    "untracked",
    "flink_java",
    "barriers",
    "flink_java_checkpointed",
    "tracked",
    "arrow_tracked",
    "bytewax",
}

PACED_PER_S = 10_000
PACE_S = 0.002

ECHO_BYTES = 1_024
"""Of the frames of the Flight echo: a batch of so few records is not larger."""

STAMPED = "sent bigint, key string"
STAMPED_COUNT = "sent bigint, n bigint"


# ---------------------------------------------------------------- what runs in the slots


class Delays:
    """A sink that writes down, for each record, when it was sent and when it came: int64 nanoseconds; and marks."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file = -1
        self._marks = Marks(folder, "out")

    def __reduce__(self) -> Any:
        return Delays, (self._folder,)

    def __call__(self, batch: pa.RecordBatch) -> None:
        now = time.monotonic_ns()
        if self._file < 0:
            self._file = create(Path(self._folder) / f"delays-{os.getpid()}")
        sent = batch.column(0).to_numpy()
        os.write(self._file, np.column_stack([sent, np.full(len(sent), now)]).tobytes())
        self._marks.set()


def read_delays(folder: Path) -> dict[int, np.ndarray[Any, np.dtype[np.int64]]]:
    """Return (sent, came) rows by process."""
    return {
        int(path.name.rpartition("-")[2]): np.frombuffer(path.read_bytes(), np.int64).reshape(-1, 2)
        for path in folder.glob("delays-*")
    }


def paced(folder: str, seconds: float) -> Iterator[int]:
    """Yield the time at which each record is sent, `PACED_PER_S` / `SLOTS` a second."""
    Marks(folder, "in").set()
    begin = time.monotonic()
    sent = 0
    while (now := time.monotonic()) < begin + seconds:
        due = int((now - begin) * PACED_PER_S / SLOTS)
        for _ in range(sent, due):
            yield time.monotonic_ns()
        sent = max(sent, due)
        time.sleep(PACE_S)


def stamp(sent: int) -> tuple[int, str]:
    return sent, with_key(sent // 1_000)[1]


def count_stamped(aggregate: tuple[int, int], record: tuple[int, str]) -> tuple[int, int]:
    return record[0], aggregate[1] + 1


def no_stamp() -> tuple[int, int]:
    return 0, 0


def last_stamped(record: tuple[int, int]) -> tuple[int, int]:
    return record[0], record[1] + 1


# ---------------------------------------------------------------- jobs


def paced_job(env: Any, folder: Path, seconds: float, replay: str = "store") -> None:
    from ftlayer import partitions

    parts = [partial(paced, str(folder), seconds) for _ in range(SLOTS)]
    keyed = env.source(partitions(*parts), "sent bigint", replay=replay).map(stamp, STAMPED).key_by("key")
    counted = keyed.aggregate(no_stamp, count_stamped, STAMPED_COUNT, volatile_state=True)
    counted.map(last_stamped, STAMPED_COUNT).sink(Delays(str(folder)))


# ---------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Delay:
    """From source to sink at `PACED_PER_S`: latency, the slots' CPU µs a record, and bytes of a commit."""

    latency: Latency
    cpu_us: float
    commit_bytes: int


class Bench(LayerJobs):
    """A Spark session, and a fresh folder and vertex for each job."""

    def delay(self, seconds: float, replay: str = "store") -> Delay:
        """Run the paced job for so long."""
        folder = self.folder()
        with self.layer(folder, tracked=True) as layer:
            layer.address  # noqa: B018 - starts the vertex
            writes = StoreWrites(folder / "ft", layer.vertex.pid)
            env = environment(self.spark, layer, self.name)
            paced_job(env, folder, seconds, replay)
            env.execute_async().wait()
            commit_bytes = writes.bytes_a_commit()
        rows = np.concatenate(list(read_delays(folder).values()))
        cpu_us = cpu_seconds_between(folder) / len(rows) * 1e6
        shutil.rmtree(folder)
        # The first seconds warm the processes up.
        rows = rows[rows[:, 0] > rows[:, 0].min() + int(min(2.0, seconds / 3) * 1e9)]
        return Delay(Latency.of((rows[:, 1] - rows[:, 0]) / 1e6), cpu_us, commit_bytes)

    def recovery(self, seconds: float) -> tuple[float, float]:
        """Kill a slot; return seconds to its successor's first record, and to the last of what was held."""
        folder = self.folder()
        with self.layer(folder, tracked=True) as layer:
            env = environment(self.spark, layer, self.name)
            paced_job(env, folder, seconds)
            job = env.execute_async()
            wait_until(lambda: len(read_delays(folder)) == SLOTS)
            time.sleep(seconds / 3)
            before = set(read_delays(folder))
            victim = next(slot.pid for slot in job.status().slots if slot.pid in before)
            killed = time.monotonic_ns()
            os.kill(victim, signal.SIGKILL)
            job.wait()
        found = read_delays(folder)
        shutil.rmtree(folder)
        firsts = [rows[0, 1] for pid, rows in found.items() if pid not in before and len(rows)]
        rows = np.concatenate(list(found.values()))
        held = rows[(rows[:, 0] < killed) & (rows[:, 1] > killed)]
        last_held = held[:, 1].max() if len(held) else killed
        return (min(firsts) - killed) / 1e9, (int(last_held) - killed) / 1e9

    def start(self) -> float:
        """Return seconds from execute to the first record at the sink."""
        folder = self.folder()
        with self.layer(folder, tracked=True) as layer:
            layer.address  # noqa: B018 - starts the vertex, which belongs to the session being warm
            env = environment(self.spark, layer, self.name)
            python_job(env, folder, 100_000)
            begin = time.monotonic()
            env.execute_async().wait()
        first = min(mark.first for mark in read_marks(folder, "out"))
        shutil.rmtree(folder)
        return first - begin


def pyflink_rates(records: int) -> dict[str, float]:
    """Run the peer in both of its modes, as far as they are installed."""
    rates = {}
    for mode in ("process", "thread"):
        ran = subprocess.run(
            [sys.executable, "-m", "bench.peers.pyflink_job", mode, str(records)],
            capture_output=True,
            text=True,
        )
        lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
        if ran.returncode or not lines:
            said = (ran.stderr.strip().splitlines() or ["no output"])[-1]
            note(f"PyFlink in {mode} mode did not run ({said[:200]})")
            continue
        found = json.loads(lines[-1])
        rates[f"records_per_s_pyflink_{mode}"] = found["records"] / found["seconds"]
    return rates


def run(quick: bool, pairs: int, pyflink: bool = False) -> dict[str, float]:
    """Measure; every ratio is over so many pairs, and every latency over so many runs."""
    records = 2_000_000 if quick else 8_000_000
    with session() as (root, spark):
        bench = Bench(root, spark)
        bench.run(python_job, 200_000, tracked=True)
        found = {"start_s": bench.start()}
        with flink_java() as flink:
            found |= compared(in_turn(sides(root, spark, flink, records, WANTED), pairs), RATIOS)
        found |= delays(bench, root, 6 if quick else 10, pairs)
        found["slot_recovery_s"], found["replayed_s"] = bench.recovery(6 if quick else 15)
    if pyflink:
        found |= pyflink_rates(records // 4)
    return found


def delays(bench: Bench, root: Path, seconds: float, pairs: int) -> dict[str, float]:
    """Return the latencies at `PACED_PER_S`, by median and range over the runs, beside disk and Flight."""
    commit_bytes = bench.delay(3).commit_bytes
    runs: dict[str, list[tuple[Delay, Limit]]] = {"": [], "_source": []}
    with Limits(root, sync_bytes=commit_bytes, echo_bytes=ECHO_BYTES) as limits:
        for _ in range(pairs):
            runs[""].append(limits.around(partial(bench.delay, seconds)))
            runs["_source"].append(limits.around(partial(bench.delay, seconds, "source")))
    found = limits.metrics()
    for suffix, each in runs.items():
        found |= spread(f"p50_ms_at_10k{suffix}", [delay.latency.p50 for delay, _ in each])
        found |= spread(f"p99_ms_at_10k{suffix}", [delay.latency.p99 for delay, _ in each])
        found[f"cpu_us_at_10k{suffix}"] = statistics.median(delay.cpu_us for delay, _ in each)
    over = [delay.latency.p99 / most_p99_ms(limit) for delay, limit in runs[""]]
    return found | spread("p99_at_10k_over_limit", over)


def most_p99_ms(limit: Limit) -> float:
    """Return what the 99th percentile with ``replay="store"`` should keep."""
    return 4 * limit.fdatasync.p99 + 5
