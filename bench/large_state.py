"""What checkpoints of a large state cost the job that goes on meanwhile.

One job has 1 GiB of keyed state in values of 1 KiB, and updates random keys of it as fast as it can. Quiet stretches
and stretches with four checkpoints take turns within it; each ratio is that of a stretch with checkpoints and of the
quiet one before it.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Run, compared
from bench.jobs import SLOTS, wait_until
from bench.keyed_count import CheckpointedJobs

BLOB_BYTES = 1_024
"""Of each value."""

CHECKPOINTS = 4
"""Of one stretch."""

PAUSE_S = 8.0
"""Behind each of them, and a quiet stretch: what a checkpoint leaves to be done comes then."""

SETTLE_S = 5.0
"""Behind the filling of the state."""

FILLING_S = 900
SAMPLE_S = 0.01


# ---------------------------------------------------------------- what runs in the slots


def scattered(folder: str, first: int, keys: int) -> Iterator[int]:
    """Each of ``keys`` once, then random ones until the file `stop` appears."""
    yield from range(first, keys, SLOTS)
    Path(folder, f"filled-{first}").touch()
    draw = np.random.default_rng(first)
    while not Path(folder, "stop").exists():
        yield from draw.integers(0, keys, 10_000).tolist()


def no_blob() -> tuple[int, bytes]:
    return 0, b""


def blob(aggregate: tuple[int, bytes], number: int) -> tuple[int, bytes]:
    """Keep a value that cannot be compressed or shared."""
    return number, number.to_bytes(8, "little") + os.urandom(8) + bytes(BLOB_BYTES - 16)


def to_number(record: tuple[int, bytes]) -> int:
    return record[0]


class Rate:
    """A sink that leaves a sample every 10 ms: float64 (monotone time, records so far, CPU seconds of the process)."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file, self._records, self._next = -1, 0, 0.0

    def __reduce__(self) -> Any:
        return Rate, (self._folder,)

    def __call__(self, batch: Any) -> None:
        self._records += batch.num_rows
        now = time.monotonic()
        if now >= self._next:
            self._next = now + SAMPLE_S
            if self._file < 0:
                name = Path(self._folder) / f"rate-{os.getpid()}"
                self._file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.write(self._file, np.array([now, self._records, time.process_time()], np.float64).tobytes())


# ---------------------------------------------------------------- measuring


def measured(bench: CheckpointedJobs, size: int, backend: str, pairs: int) -> dict[str, float]:
    """Run a job with ``size`` bytes of state; return the metrics `compared` makes of its stretches."""
    from ftlayer import partitions

    folder = bench.folder()
    keys = size // BLOB_BYTES
    where = folder / "state"
    where.mkdir()
    env = bench.environment(folder, interval=None, backend=backend, state_directory=str(where))
    parts = [partial(scattered, str(folder), first, keys) for first in range(SLOTS)]
    source = env.source(partitions(*parts), "id bigint").key_by("id")
    kept = source.aggregate(no_blob, blob, "id bigint, blob binary")
    kept.map(to_number, "id bigint").sink(Rate(str(folder)))
    job = env.execute_async()
    wait_until(partial(_is_filled, job, folder), FILLING_S)
    time.sleep(SETTLE_S)
    name = f"state_1gib_{backend}"
    took: list[float] = []
    runs: dict[str, list[Run]] = {f"{name}_before": [], name: []}
    for _ in range(pairs):
        runs[f"{name}_before"].append(_stretch(folder, lambda: time.sleep(PAUSE_S)))
        runs[name].append(_stretch(folder, partial(_checkpoints, job, took)))
    found = compared(runs, {name: (name, f"{name}_before")})
    found[f"{name}_checkpoint_s"] = statistics.median(took)
    if backend == "lmdb":
        held = sum(path.stat().st_blocks * 512 for path in where.rglob("*") if path.is_file())
        found["state_file_ratio"] = held / (keys * BLOB_BYTES)
    (folder / "stop").touch()
    job.wait()
    shutil.rmtree(folder)
    return found


def _is_filled(job: Any, folder: Path) -> bool:
    from ftlayer import JobState

    if job.status().state is JobState.FAILED:
        job.wait()  # raises what it has failed with
    return len(list(folder.glob("filled-*"))) == SLOTS


def _checkpoints(job: Any, took: list[float]) -> None:
    for _ in range(CHECKPOINTS):
        begin = time.monotonic()
        job.checkpoint(timeout=300)
        took.append(time.monotonic() - begin)
        time.sleep(PAUSE_S)


def _stretch(folder: Path, work: Callable[[], None]) -> Run:
    begin = time.monotonic()
    work()
    end = time.monotonic()
    records = cpu_s = 0.0
    for path in folder.glob("rate-*"):
        times, *totals = np.frombuffer(path.read_bytes(), np.float64).reshape(-1, 3).T
        of_records, of_cpu = (float(np.diff(np.interp([begin, end], times, total))[0]) for total in totals)
        records, cpu_s = records + of_records, cpu_s + of_cpu
    return Run(records / (end - begin), cpu_s / records * 1e6)
