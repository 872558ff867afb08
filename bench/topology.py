"""A continuous topology of two slots against the same job in Bytewax (and, with ``--pyflink``, in PyFlink).

The job: id → Python function a record → (id, 20-byte key of 10,000) → key_by → count a key → Python function a
record → discard. The functions are the same for every system (`bench.peers.functions`). A rate is taken from the
first record read to the last one discarded; the peers are timed the same way, by their own clocks, which is the
machine's monotone clock.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
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
import pyarrow.compute as pc

from bench.harness import Target, note
from bench.jobs import SLOTS, Jobs, bytewax_rate, has_bytewax, session, wait_until
from bench.peers.functions import KEYS, last, names, with_key

TARGETS = {
    "records_per_s_python": Target(at_least=1e6),
    "vs_bytewax": Target(at_least=2.5),
    "records_per_s_arrow": Target(at_least=4e6),
    "tracking_cost": Target(at_least=0.65),
    "p50_ms_at_10k": Target(at_most=8),
    "p99_ms_at_10k": Target(at_most=20),
    "p50_ms_at_10k_source": Target(at_most=2),
    "p99_ms_at_10k_source": Target(at_most=6),
    "slot_recovery_s": Target(at_most=1.2),
    "replayed_s": Target(at_most=3),
    "start_s": Target(at_most=3),
}

ARROW_ROWS = 65_536
ARROW_OPTIONS = {"batch_rows": ARROW_ROWS, "channel_bytes": 8 << 20}
PACED_PER_S = 10_000
PACE_S = 0.002

ID = "id bigint"
KEYED = "id bigint, key string"
COUNTED = "key string, n bigint"
STAMPED = "sent bigint, key string"
STAMPED_COUNT = "sent bigint, n bigint"


# ---------------------------------------------------------------- what runs in the slots


@dataclass(frozen=True)
class Mark:
    """Monotone times, and CPU seconds of the process until then, at a process's first and last mark."""

    process: int
    first: float
    first_cpu: float
    last: float
    last_cpu: float


class Marks:
    """Monotone times that processes leave in a folder, a file each, the latest one in it."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder, self._name = folder, name
        self._file = -1

    def __reduce__(self) -> Any:
        return Marks, (self._folder, self._name)

    def set(self) -> None:
        """Leave the time it is now."""
        now = np.array([time.monotonic(), time.process_time()]).tobytes()
        if self._file < 0:
            self._file = create(Path(self._folder) / f"{self._name}-{os.getpid()}")
            os.pwrite(self._file, now, 0)
        os.pwrite(self._file, now, len(now))


def create(path: Path) -> int:
    """Open a new file for writing; what is written is there for other processes at once."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)


def read_marks(folder: Path, name: str) -> list[Mark]:
    """Return those of every process that left marks of this name."""
    found = []
    for path in folder.glob(f"{name}-*"):
        times = np.frombuffer(path.read_bytes(), np.float64)
        if len(times) == 4:
            found.append(Mark(int(path.name.rpartition("-")[2]), *times.tolist()))
    return found


def seconds_between(folder: Path) -> float:
    """Return seconds from the first record that was read to the last one that was discarded."""
    return max(mark.last for mark in read_marks(folder, "out")) - min(
        mark.first for mark in read_marks(folder, "in")
    )


def cpu_seconds_between(folder: Path) -> float:
    """Return the CPU seconds that the slots' processes took meanwhile."""
    first = {mark.process: mark.first_cpu for mark in read_marks(folder, "in")}
    return sum(
        mark.last_cpu - first[mark.process] for mark in read_marks(folder, "out") if mark.process in first
    )


class Discard:
    """A sink that marks the time."""

    def __init__(self, folder: str) -> None:
        self._marks = Marks(folder, "out")

    def __call__(self, batch: pa.RecordBatch) -> None:
        self._marks.set()


class Delays:
    """A sink that writes down, for each record, when it was sent and when it came: int64 nanoseconds."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file = -1

    def __reduce__(self) -> Any:
        return Delays, (self._folder,)

    def __call__(self, batch: pa.RecordBatch) -> None:
        now = time.monotonic_ns()
        if self._file < 0:
            self._file = create(Path(self._folder) / f"delays-{os.getpid()}")
        sent = batch.column(0).to_numpy()
        os.write(self._file, np.column_stack([sent, np.full(len(sent), now)]).tobytes())


def read_delays(folder: Path) -> dict[int, np.ndarray[Any, np.dtype[np.int64]]]:
    """Return (sent, came) rows by process."""
    return {
        int(path.name.rpartition("-")[2]): np.frombuffer(path.read_bytes(), np.int64).reshape(-1, 2)
        for path in folder.glob("delays-*")
    }


def ids(folder: str, first: int, records: int) -> range:
    Marks(folder, "in").set()
    return range(first, records, SLOTS)


def id_batches(folder: str, first: int, records: int) -> Iterator[pa.RecordBatch]:
    Marks(folder, "in").set()
    for start in range(first * ARROW_ROWS, records, SLOTS * ARROW_ROWS):
        yield pa.record_batch({"id": np.arange(start, min(start + ARROW_ROWS, records))})


def paced(first: int, seconds: float) -> Iterator[int]:
    """Yield the time at which each record is sent, `PACED_PER_S` / `SLOTS` a second."""
    begin = time.monotonic()
    sent = 0
    while (now := time.monotonic()) < begin + seconds:
        due = int((now - begin) * PACED_PER_S / SLOTS)
        for _ in range(sent, due):
            yield time.monotonic_ns()
        sent = max(sent, due)
        time.sleep(PACE_S)


def none_yet() -> tuple[str, int]:
    return "", 0


def count(aggregate: tuple[Any, int], record: tuple[Any, str]) -> tuple[str, int]:
    return record[1], aggregate[1] + 1


def stamp(sent: int) -> tuple[int, str]:
    return sent, with_key(sent // 1_000)[1]


def count_stamped(aggregate: tuple[int, int], record: tuple[int, str]) -> tuple[int, int]:
    return record[0], aggregate[1] + 1


def no_stamp() -> tuple[int, int]:
    return 0, 0


def last_stamped(record: tuple[int, int]) -> tuple[int, int]:
    return record[0], record[1] + 1


_NAMES = pa.array(names())


def with_key_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    numbers = batch.column(0).to_numpy()
    return pa.RecordBatch.from_arrays(
        [batch.column(0), _NAMES.take(pa.array(numbers % KEYS))], names=["id", "key"]
    )


def last_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([batch.column(0), pc.add(batch.column(1), 1)], names=["key", "n"])


# ---------------------------------------------------------------- jobs


def environment(spark: Any, layer: Any, name: str, **options: int) -> Any:
    from ftlayer import StreamEnvironment, TopologyOptions

    return StreamEnvironment(spark, layer, name=name, parallelism=SLOTS, options=TopologyOptions(**options))


def python_job(env: Any, folder: Path, records: int, replay: str = "store") -> None:
    from ftlayer import partitions

    parts = [partial(ids, str(folder), first, records) for first in range(SLOTS)]
    keyed = env.source(partitions(*parts), ID, replay=replay).map(with_key, KEYED).key_by("key")
    counted = keyed.aggregate(none_yet, count, COUNTED, volatile_state=True)
    counted.map(last, COUNTED).sink(Discard(str(folder)))


def arrow_job(env: Any, folder: Path, records: int, replay: str = "store") -> None:
    import ftlayer as ft

    parts = [partial(id_batches, str(folder), first, records) for first in range(SLOTS)]
    source = env.source(ft.partitions(*parts), ID, replay=replay)
    keyed = source.map_batches(with_key_batch, KEYED).key_by("key")
    counted = keyed.aggregate(ft.count(name="n"), volatile_state=True)
    counted.map_batches(last_batch, COUNTED).sink(Discard(str(folder)))


def paced_job(env: Any, folder: Path, seconds: float, replay: str = "store") -> None:
    from ftlayer import partitions

    parts = [partial(paced, first, seconds) for first in range(SLOTS)]
    keyed = env.source(partitions(*parts), "sent bigint", replay=replay).map(stamp, STAMPED).key_by("key")
    counted = keyed.aggregate(no_stamp, count_stamped, STAMPED_COUNT, volatile_state=True)
    counted.map(last_stamped, STAMPED_COUNT).sink(Delays(str(folder)))


# ---------------------------------------------------------------- measuring


class TimedJobs(Jobs):
    """Jobs whose functions leave marks.

    Attributes:
        cpu_us: that the slots took for a record of the latest job.
    """

    cpu_us = 0.0

    def rate_of(self, folder: Path, records: int) -> float:
        """Return records a second by the marks of a job that is over, and remove its folder."""
        self.cpu_us = cpu_seconds_between(folder) / records * 1e6
        rate = records / seconds_between(folder)
        shutil.rmtree(folder)
        return rate


class Bench(TimedJobs):
    """A Spark session, and a fresh folder and vertex for each job."""

    def layer(self, folder: Path, *, tracked: bool) -> Any:
        from ftlayer import FTLayer, FTStatus

        return FTLayer.embedded(folder / "ft", status=FTStatus.ON if tracked else FTStatus.OFF)

    def rate(self, job: Any, records: int, *, tracked: bool, **options: int) -> float:
        """Run a bounded job; return records a second from the first one in to the last one out."""
        folder = self.folder()
        with self.layer(folder, tracked=tracked) as layer:
            env = environment(self.spark, layer, self.name, **options)
            job(env, folder, records)
            running = env.execute_async()
            running.wait()
        return self.rate_of(folder, records)

    def delays(self, seconds: float, replay: str = "store") -> tuple[float, float]:
        """Return the median and the 99th percentile, in ms, of source to sink."""
        folder = self.folder()
        with self.layer(folder, tracked=True) as layer:
            env = environment(self.spark, layer, self.name)
            paced_job(env, folder, seconds, replay)
            env.execute_async().wait()
        rows = np.concatenate(list(read_delays(folder).values()))
        shutil.rmtree(folder)
        # The first seconds warm the processes up.
        rows = rows[rows[:, 0] > rows[:, 0].min() + int(min(2.0, seconds / 3) * 1e9)]
        delays = (rows[:, 1] - rows[:, 0]) / 1e6
        return float(np.percentile(delays, 50)), float(np.percentile(delays, 99))

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


def run(quick: bool, pyflink: bool = False) -> dict[str, float]:
    records = 2_000_000 if quick else 8_000_000
    with session() as (root, spark):
        bench = Bench(root, spark)
        bench.rate(python_job, 200_000, tracked=True)
        found = {"start_s": bench.start()}
        found["records_per_s_python"] = bench.rate(python_job, records, tracked=True)
        found["records_per_s_untracked"] = bench.rate(python_job, records, tracked=False)
        found["tracking_cost"] = found["records_per_s_python"] / found["records_per_s_untracked"]
        found["records_per_s_arrow"] = bench.rate(arrow_job, 4 * records, tracked=True, **ARROW_OPTIONS)
        found["p50_ms_at_10k"], found["p99_ms_at_10k"] = bench.delays(6 if quick else 20)
        again = bench.delays(6 if quick else 20, "source")
        found["p50_ms_at_10k_source"], found["p99_ms_at_10k_source"] = again
        found["slot_recovery_s"], found["replayed_s"] = bench.recovery(6 if quick else 15)
    if has_bytewax():
        found["records_per_s_bytewax"] = bytewax_rate(records // 2)
        found["vs_bytewax"] = found["records_per_s_python"] / found["records_per_s_bytewax"]
    else:
        note("bytewax is not installed (pip install '.[bench]'): no vs_bytewax")
    if pyflink:
        found |= pyflink_rates(records // 4)
    return found
