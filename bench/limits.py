"""What a machine's disk and its loopback take, beside the latencies that are measured there: machines differ.

Measured are, in slices between the runs, one operation after the other:

- a *raw fdatasync*: one write of as many bytes as a commit of the store has, to a part of a file that has been written
  before, in the file system of the store, and its ``fdatasync``;
- a *Flight echo*: a frame there and back on a Unix socket, between two processes that do nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
import pyarrow as pa
from pyarrow import flight

from bench.peers import flight_echo
from ftlayer.vertex.store.directory import DATA_FILE
from ftlayer.vertex.store.lmdb_store import read_meta

T = TypeVar("T")

FILE_BYTES = 16 << 20
SLICE_S = 0.5
"""Each of both is repeated for so long in a slice."""


@dataclass(frozen=True)
class Latency:
    """Percentiles of times, in milliseconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, times_ms: np.ndarray) -> Latency:  # type: ignore[type-arg]
        """Return those of some times."""
        p50, p99 = np.percentile(times_ms, [50, 99]).tolist()
        return cls(p50, p99)


@dataclass(frozen=True)
class Limit:
    """What the disk and Flight took around one run."""

    fdatasync: Latency
    echo: Latency


@dataclass(frozen=True)
class _Slice:
    fdatasync_ms: list[float]
    echo_ms: list[float]


class Limits:
    """Measures both in slices. Leaving its block ends the echo's process.

    Attributes:
        sync_bytes: that are written before each ``fdatasync``.
        echo_bytes: of each frame.
    """

    def __init__(self, directory: Path, *, sync_bytes: int, echo_bytes: int) -> None:
        """``directory`` is in the file system of the store; a file and a socket are made there."""
        self.sync_bytes, self.echo_bytes = sync_bytes, echo_bytes
        self._path, self._address = directory / "raw", f"grpc+unix://{directory / 'echo'}"
        self._slices: list[_Slice] = []
        self._place = 0

    def __enter__(self) -> Limits:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(self._file, bytes(FILE_BYTES), 0)
        os.fsync(self._file)
        command = [sys.executable, flight_echo.__file__, self._address]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._server.stdout is not None
        self._server.stdout.readline()
        self._client = flight.FlightClient(self._address)
        self._writer, self._reader = self._client.do_exchange(flight.FlightDescriptor.for_command(b"echo"))
        self._writer.begin(pa.schema([]))
        self._frame = os.urandom(self.echo_bytes)
        self._written = os.urandom(self.sync_bytes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        self._client.close()
        self._server.communicate()
        os.close(self._file)
        self._path.unlink()

    def around(self, run: Callable[[], T]) -> tuple[T, Limit]:
        """Call ``run``; return what it returns, and the limits by the slices before and behind it."""
        if not self._slices:
            self._take()
        found = run()
        self._take()
        return found, _limit(self._slices[-2:])

    def metrics(self) -> dict[str, float]:
        """Return the percentiles of all slices together."""
        limit = _limit(self._slices)
        return {
            "raw_fdatasync_p50_ms": limit.fdatasync.p50,
            "raw_fdatasync_p99_ms": limit.fdatasync.p99,
            "raw_fdatasync_bytes": self.sync_bytes,
            "flight_echo_p50_ms": limit.echo.p50,
            "flight_echo_p99_ms": limit.echo.p99,
        }

    def _take(self) -> None:
        self._slices.append(_Slice(_times_ms(self._sync), _times_ms(self._echo)))

    def _sync(self) -> None:
        os.pwrite(self._file, self._written, self._place)
        os.fdatasync(self._file)
        self._place = (self._place + self.sync_bytes) % (FILE_BYTES - self.sync_bytes)

    def _echo(self) -> None:
        self._writer.write_metadata(self._frame)
        self._reader.read_chunk()


class StoreWrites:
    """What the commits of a vertex write, from one moment to another."""

    def __init__(self, vertex: Path, pid: int) -> None:
        """Begin; ``vertex`` is its directory, ``pid`` its process. Linux alone: proc(5)."""
        self._data = sorted(vertex.glob(f"shard-*/{DATA_FILE}"))
        self._pid = pid
        self._bytes, self._commits = self._now()

    def bytes_a_commit(self) -> int:
        """Return the bytes of a commit since the begin, in whole pages: one at least."""
        written, commits = self._now()
        mean = (written - self._bytes) / max(commits - self._commits, 1)
        return max(1, round(mean / 4_096)) * 4_096

    def _now(self) -> tuple[int, int]:
        counts = dict(line.split(": ") for line in Path(f"/proc/{self._pid}/io").read_text().splitlines())
        return int(counts["wchar"]), sum(_commits(path) for path in self._data)


def _commits(path: Path) -> int:
    file = os.open(path, os.O_RDONLY)
    try:
        return read_meta(file, path).transaction
    finally:
        os.close(file)


def _times_ms(operation: Callable[[], None]) -> list[float]:
    found: list[float] = []
    end = time.perf_counter() + SLICE_S
    # One at least: on a busy machine a slice may be over before it has begun.
    while (begin := time.perf_counter()) < end or not found:
        operation()
        found.append((time.perf_counter() - begin) * 1_000)
    return found


def _limit(slices: list[_Slice]) -> Limit:
    return Limit(
        Latency.of(np.concatenate([each.fdatasync_ms for each in slices])),
        Latency.of(np.concatenate([each.echo_ms for each in slices])),
    )
