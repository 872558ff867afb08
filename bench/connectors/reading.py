"""Ours: a topology of one subtask that reads a broker and drops its records."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.connectors.broker import Broker
from bench.harness import Run
from bench.jobs import Jobs, wait_until
from bench.keyed_count import create


class Counted:
    """A sink that writes down when it was called, and with how many rows: float64 (monotone time, rows)."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file = -1

    def __reduce__(self) -> Any:
        return Counted, (self._folder,)

    def __call__(self, batch: pa.RecordBatch) -> None:
        if self._file < 0:
            self._file = create(Path(self._folder) / f"counted-{os.getpid()}")
        os.write(self._file, np.array([time.monotonic(), batch.num_rows]).tobytes())


def counted(folder: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return (time, rows) of all calls of a `Counted`."""
    calls = [np.frombuffer(path.read_bytes(), np.float64) for path in folder.glob("counted-*")]
    return np.concatenate([np.zeros(0), *calls]).reshape(-1, 2)


def client_reads(broker: Broker, messages: int) -> Run:
    """Let the bare loop of the client read so many messages."""
    broker.fill(messages)
    return Run(messages / broker.bare(messages))


def reads(jobs: Jobs, broker: Broker, messages: int) -> Run:
    """Let ours read as many."""
    broker.fill(messages)
    folder = jobs.folder()
    with _running(jobs, broker.source(), folder):
        wait_until(lambda: counted(folder)[:, 1].sum() >= messages, 600)
    calls = counted(folder)
    return Run(float((messages - calls[0, 1]) / (calls[-1, 0] - calls[0, 0])))


@contextmanager
def _running(jobs: Jobs, source: Any, folder: Path) -> Iterator[Any]:
    from ftlayer import CheckpointConfig, StreamEnvironment

    config = CheckpointConfig(interval="1s", directory=str(folder / "checkpoints"))
    env = StreamEnvironment(jobs.spark, name=jobs.name, parallelism=1, checkpointing=config)
    env.source(source, uid="read").sink(Counted(str(folder)), uid="dropped")
    job = env.execute_async()
    try:
        yield job
    finally:
        job.cancel()
