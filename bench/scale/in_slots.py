"""What runs in the slots of the curves: sources and sinks that leave marks, and functions."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.keyed_count import create

SAMPLE_S = 0.02
BLOBS = 64
"""So many different bodies have the records of a source."""

DRAWN = 1 << 16
"""Random keys are drawn so many at a time."""


@dataclass(frozen=True)
class Sample:
    """Of one process: monotone time, CPU seconds until then, peak of its memory (bytes), and records it has had."""

    at: float
    cpu: float
    peak: float
    records: float


def row_of(sample: Sample) -> bytes:
    """Return a sample as it is left in a file."""
    return np.array([sample.at, sample.cpu, sample.peak, sample.records], np.float64).tobytes()


class Samples:
    """Samples that a process leaves in a folder: its first, one every `SAMPLE_S`, and the latest."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder, self._name = folder, name
        self._file, self._place, self._next = -1, 0, 0.0

    def __reduce__(self) -> Any:
        return Samples, (self._folder, self._name)

    def take(self, records: int) -> None:
        """Leave how it is now; ``records`` is how many the process has had."""
        now = time.monotonic()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        row = row_of(Sample(now, time.process_time(), peak, records))
        if self._file < 0:
            self._file = create(Path(self._folder) / f"{self._name}-{os.getpid()}")
        os.pwrite(self._file, row, self._place * len(row))
        # The place is kept until it is time for another: what the latest wrote over is no loss.
        if now >= self._next:
            self._next = now + SAMPLE_S
            self._place += 1


def read_samples(folder: Path, name: str) -> dict[int, list[Sample]]:
    """Return the samples of this name by process, in order; processes that have left none yet are left out."""
    found = {}
    for path in folder.glob(f"{name}-*"):
        numbers = np.frombuffer(path.read_bytes(), np.float64)
        if len(numbers):
            found[int(path.name.rpartition("-")[2])] = [
                Sample(*row) for row in numbers.reshape(-1, 4).tolist()
            ]
    return found


class Discard:
    """A sink that counts records and leaves samples."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._samples = Samples(folder, "out")
        self._records = 0

    def __reduce__(self) -> Any:
        return Discard, (self._folder,)

    def __call__(self, batch: Any) -> None:
        self._records += batch.num_rows
        self._samples.take(self._records)


def ids(folder: str, first: int, records: int, step: int) -> range:
    """Every ``step``-th id below ``records``."""
    Samples(folder, "in").take(0)
    return range(first, records, step)


def filled_then_random(folder: str, first: int, keys: int, step: int, updates: int) -> Iterator[int]:
    """Every ``step``-th key once, then ``updates`` random ones; then wait until a file `stop` appears."""
    Samples(folder, "in").take(0)
    yield from range(first, keys, step)
    draw = np.random.default_rng(first)
    for start in range(0, updates, DRAWN):
        yield from draw.integers(0, keys, min(DRAWN, updates - start)).tolist()
    Path(folder, f"ended-{first}").touch()
    while not Path(folder, "stop").exists():
        time.sleep(0.01)


def bodies(folder: str, first: int, records: int, step: int, size: int) -> Iterator[tuple[int, bytes]]:
    """(id, body of ``size`` bytes) records."""
    Samples(folder, "in").take(0)
    draw = np.random.default_rng(first)
    each = [draw.bytes(size) for _ in range(min(BLOBS, max(1, (64 << 20) // size)))]
    for number in range(first, records, step):
        yield number, each[number % len(each)]


def same(record: Any) -> Any:
    """The function of which chains are made."""
    return record


def zero() -> int:
    """Return what a key's count begins with."""
    return 0


def one_more(count: int, record: Any) -> int:
    """Count a key."""
    return count + 1


def no_value() -> tuple[int, bytes]:
    """Return what a key's value begins with."""
    return 0, b""


class NewValue:
    """Keeps another value of ``size`` bytes at each record of a key."""

    def __init__(self, size: int) -> None:
        self._random = min(size, 8)
        self._rest = bytes(size - self._random)

    def __call__(self, value: tuple[int, bytes], number: int) -> tuple[int, bytes]:
        return number, os.urandom(self._random) + self._rest


def number_of(value: tuple[int, bytes]) -> int:
    """Leave the value where it is kept."""
    return value[0]
