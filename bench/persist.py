"""The store: records a second, each batch synced, against a plain file and against a put a record.

All sides write the same 8,192 records of 100 bytes, take turns batch by batch in one directory, and
sync each batch. Two figures of the store: while its file grows, as the plain file does, and in the steady
state of a vertex, where each batch also deletes the one that came 40 before it. The targets are held
against the growing one, which is the slower.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import numpy as np
import pyarrow as pa

from bench.harness import Target, note, quiet_median, seconds
from ftlayer.store import LmdbStore

TARGETS = {
    "vs_raw_fdatasync": Target(at_least=0.75, unit="times"),
    "vs_put_per_record": Target(at_least=15, unit="times"),
}

_ROWS = 8_192
_ROW_BYTES = 100
_KEPT = 40
_MAX_BYTES = 256 << 20


def run(quick: bool) -> dict[str, float]:
    """Measure; ``quick`` repeats less often."""
    repeats = 60 if quick else 240
    rng = np.random.default_rng(5)
    rows = [bytes(row) for row in rng.integers(0, 256, (_ROWS, _ROW_BYTES), dtype=np.uint8)]
    blob = _encode(rows)
    with _directory() as directory:
        timings = _take_turns(directory, rng, rows, blob, repeats)
    rates = {side: _ROWS / quiet_median(times) for side, times in timings.items()}
    return {
        "vs_raw_fdatasync": rates["growing"] / rates["raw"],
        "vs_put_per_record": rates["growing"] / rates["put"],
        "steady_vs_raw_fdatasync": rates["steady"] / rates["raw"],
        "steady_vs_put_per_record": rates["steady"] / rates["put"],
        "records_per_s": rates["growing"],
        "steady_records_per_s": rates["steady"],
        "raw_records_per_s": rates["raw"],
        "put_records_per_s": rates["put"],
    }


def _take_turns(
    directory: Path, rng: np.random.Generator, rows: list[bytes], blob: memoryview, repeats: int
) -> dict[str, list[float]]:
    timings: dict[str, list[float]] = {"raw": [], "put": [], "growing": [], "steady": []}
    growing = _Growing(directory, blob)
    steady = LmdbStore.open(directory / "steady", max_store_bytes=_MAX_BYTES)
    numbers = deque(range(_KEPT))
    for number in numbers:
        _append(steady, number, blob)
    with (directory / "raw").open("wb", buffering=0) as raw, _puts(directory / "put") as puts:

        def append_raw() -> None:
            raw.write(blob)
            os.fdatasync(raw.fileno())

        for turn in range(repeats):
            timings["raw"].append(seconds(append_raw))
            timings["growing"].append(growing.append())
            timings["steady"].append(
                seconds(lambda turn=turn: _append(steady, _KEPT + turn, blob, delete=turn))  # type: ignore[misc]
            )
            if turn % 4 == 0:  # much slower than the others
                ids = [bytes(row) for row in rng.integers(0, 256, (_ROWS, 8), dtype=np.uint8)]
                timings["put"].append(seconds(lambda ids=ids: _put_rows(puts, ids, rows)))  # type: ignore[misc]
    growing.close()
    steady.close()
    return timings


class _Growing:
    """Stores that are filled one after the other, so that each batch extends a file."""

    def __init__(self, directory: Path, blob: memoryview) -> None:
        self._path = directory / "growing"
        self._blob = blob
        self._number = 0
        self._store = self._fresh()

    def _fresh(self) -> LmdbStore:
        return LmdbStore.open(self._path, max_store_bytes=_MAX_BYTES)

    def append(self) -> float:
        if self._store.used_share > 0.85:
            self.close()
            shutil.rmtree(self._path)
            self._store = self._fresh()
        self._number += 1
        return seconds(lambda: _append(self._store, self._number, self._blob))

    def close(self) -> None:
        self._store.close()


def _append(store: LmdbStore, number: int, blob: memoryview, delete: int | None = None) -> None:
    with store.write(intake=True) as transaction:
        transaction.put("segments", number.to_bytes(8, "big"), blob, append=True)
        if delete is not None:
            transaction.delete("segments", delete.to_bytes(8, "big"))


@contextmanager
def _puts(path: Path) -> Iterator[lmdb.Environment]:
    with lmdb.open(str(path), map_size=4 << 30) as environment:
        yield environment


def _put_rows(environment: lmdb.Environment, ids: list[bytes], rows: list[bytes]) -> None:
    """Put each record under its root id, as a store of single records would, and sync."""
    with environment.begin(write=True) as transaction:
        for key, row in zip(ids, rows, strict=True):
            transaction.put(key, row)


def _encode(rows: list[bytes]) -> memoryview:
    batch = pa.record_batch({"payload": pa.array(rows, type=pa.binary(_ROW_BYTES))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


@contextmanager
def _directory() -> Iterator[Path]:
    """Yield a directory on a disk: where temporary files live in memory, a sync costs nothing."""
    base = Path(tempfile.gettempdir())
    if _in_memory(base):
        base = Path.cwd()
        note(f"the directory for temporary files is in memory: measured in {base}")
    with tempfile.TemporaryDirectory(prefix="bench-persist-", dir=base) as name:
        yield Path(name)


def _in_memory(path: Path) -> bool:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [mount for mount in mounts if path.resolve().is_relative_to(mount[1])]
    return bool(holding) and max(holding, key=lambda mount: len(mount[1]))[2] in ("tmpfs", "ramfs")
