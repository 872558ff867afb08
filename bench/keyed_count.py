"""The job that engines and modes are compared by, what runs of it in the slots, and the time it takes.

An id → Python function a record → (id, 20-byte key of 10,000) → key_by → count a key → Python function a record →
discard; or the same with functions of whole batches. The functions are those of `bench.peers.functions`, the same for
every system. A rate is taken from the first record read to the last one discarded.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bench.harness import Run
from bench.jobs import SLOTS, Jobs
from bench.peers.functions import KEYS, last, names, with_key

ARROW_ROWS = 65_536
ARROW_OPTIONS = {"batch_rows": ARROW_ROWS, "channel_bytes": 8 << 20}
INTERVAL = "1s"
"""Between checkpoints, where a run says nothing else."""

ID = "id bigint"
KEYED = "id bigint, key string"
COUNTED = "key string, n bigint"

Build = Callable[[Any, Path, int], None]
"""Adds a job of so many records to an environment; its functions leave marks in the folder."""


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


def ids(folder: str, first: int, records: int) -> range:
    Marks(folder, "in").set()
    return range(first, records, SLOTS)


def id_batches(folder: str, first: int, records: int) -> Iterator[pa.RecordBatch]:
    Marks(folder, "in").set()
    for start in range(first * ARROW_ROWS, records, SLOTS * ARROW_ROWS):
        yield pa.record_batch({"id": np.arange(start, min(start + ARROW_ROWS, records))})


def none_yet() -> tuple[str, int]:
    return "", 0


def count(aggregate: tuple[Any, int], record: tuple[Any, str]) -> tuple[str, int]:
    return record[1], aggregate[1] + 1


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


# ---------------------------------------------------------------- measuring


class TimedJobs(Jobs):
    """Jobs whose functions leave marks."""

    def run_of(self, folder: Path, records: int) -> Run:
        """Return what the marks of a job say that is over, and remove its folder."""
        run = Run(records / seconds_between(folder), cpu_seconds_between(folder) / records * 1e6)
        shutil.rmtree(folder)
        return run


class LayerJobs(TimedJobs):
    """Jobs in acker mode, or untracked; each has a fresh folder and vertex."""

    def layer(self, folder: Path, *, tracked: bool) -> Any:
        from ftlayer import FTLayer, FTStatus

        return FTLayer.embedded(folder / "ft", status=FTStatus.ON if tracked else FTStatus.OFF)

    def run(self, job: Build, records: int, *, tracked: bool, **options: int) -> Run:
        """Run a bounded job."""
        folder = self.folder()
        with self.layer(folder, tracked=tracked) as layer:
            env = environment(self.spark, layer, self.name, **options)
            job(env, folder, records)
            env.execute_async().wait()
        return self.run_of(folder, records)


class CheckpointedJobs(TimedJobs):
    """Jobs in barrier mode, each with a fresh folder.

    Attributes:
        job: the handle of the latest one that `run` has run.
    """

    job: Any = None

    def environment(self, folder: Path, options: dict[str, Any] | None = None, **config: Any) -> Any:
        from ftlayer import CheckpointConfig, StreamEnvironment, TopologyOptions

        given = {"interval": INTERVAL, "directory": str(folder / "checkpoints"), **config}
        return StreamEnvironment(
            self.spark,
            name=self.name,
            parallelism=SLOTS,
            options=TopologyOptions(**(options or {})),
            checkpointing=CheckpointConfig(**given),
        )

    def run(self, job: Build, records: int, options: dict[str, int] | None = None, **config: Any) -> Run:
        """Run a bounded job; ``config`` are options of its `CheckpointConfig`."""
        folder = self.folder()
        env = self.environment(folder, options, **config)
        job(env, folder, records)
        self.job = env.execute_async()
        self.job.wait()
        return self.run_of(folder, records)
