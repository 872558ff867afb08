"""The store: records a second, each batch synced, against a plain file and against a put a record.

All sides write the same 8,192 records of 100 bytes, take turns batch by batch in one directory, and
sync each batch. The store is in the steady state of a vertex: each batch also deletes the one that came
40 before it, whose pages it uses again. So is the peer with one LMDB entry a record, under its root id, as
a vertex would look it up. (Keyed by arrival instead, entries are appended and far cheaper: that figure
is given too.) A store that still grows is slower: it makes the file system's journal note new blocks,
as the plain file does, and syncs twice, pages and then the header. ``growing_vs_raw_fdatasync`` is that.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bench.harness import Target, quiet_median, scratch, seconds
from ftlayer.vertex.store import LmdbStore

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
    with scratch() as directory:
        timings = _take_turns(directory, rng, rows, repeats)
    rates = {side: _ROWS / quiet_median(times) for side, times in timings.items()}
    return {
        "vs_raw_fdatasync": rates["steady"] / rates["raw"],
        "growing_vs_raw_fdatasync": rates["growing"] / rates["raw"],
        "vs_put_per_record": rates["steady"] / rates["put by root"],
        "vs_put_in_order": rates["steady"] / rates["put in order"],
        "records_per_s": rates["steady"],
        "growing_records_per_s": rates["growing"],
        "raw_records_per_s": rates["raw"],
        "put_records_per_s": rates["put by root"],
        "put_in_order_records_per_s": rates["put in order"],
    }


def _take_turns(
    directory: Path, rng: np.random.Generator, rows: list[bytes], repeats: int
) -> dict[str, list[float]]:
    blob = _encode(rows)
    steady = _Steady(directory / "steady", blob)
    growing = _Growing(directory / "growing", blob)
    by_root = _Puts(directory / "by-root", rows, lambda _: _keys(rng.integers(1, 2**63, _ROWS)))
    in_order = _Puts(directory / "in-order", rows, lambda turn: _keys(np.arange(_ROWS) + turn * _ROWS))
    timings: dict[str, list[float]] = {
        side: [] for side in ("raw", "growing", "steady", "put by root", "put in order")
    }
    with (directory / "raw").open("wb", buffering=0) as raw:

        def append_raw() -> None:
            raw.write(blob)
            os.fdatasync(raw.fileno())

        for turn in range(repeats):
            timings["raw"].append(seconds(append_raw))
            timings["growing"].append(growing.append())
            timings["steady"].append(seconds(steady.turn))
            if turn % 4 == 0:  # much slower than the others
                timings["put by root"].append(by_root.turn())
                timings["put in order"].append(in_order.turn())
    for side in (steady, growing, by_root, in_order):
        side.close()
    return timings


class _Steady:
    """A store in which each batch takes the place of the one that came 40 before it."""

    def __init__(self, path: Path, blob: memoryview) -> None:
        self._store = LmdbStore.open(path, max_store_bytes=_MAX_BYTES)
        self._blob = blob
        self._number = 0
        for _ in range(_KEPT):
            self.turn()

    def turn(self) -> None:
        self._number += 1
        _append(self._store, self._number, self._blob, delete=self._number - _KEPT)

    def close(self) -> None:
        self._store.close()


class _Growing:
    """Stores that are filled one after the other, so that each batch extends a file."""

    def __init__(self, path: Path, blob: memoryview) -> None:
        self._path = path
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
        if delete is not None and delete > 0:
            transaction.delete("segments", delete.to_bytes(8, "big"))


class _Puts:
    """An LMDB environment with one entry a record, in the same steady state."""

    def __init__(self, path: Path, rows: list[bytes], keys: Callable[[int], list[bytes]]) -> None:
        self._environment = lmdb.open(str(path), map_size=4 << 30)
        self._rows = rows
        self._keys = keys
        self._live: deque[list[bytes]] = deque()
        self._turn = 0
        for _ in range(_KEPT):
            self.turn()

    def turn(self) -> float:
        """Put a batch, delete an old one, sync; return the seconds without those for making keys."""
        self._turn += 1
        self._live.append(self._keys(self._turn))
        old = self._live.popleft() if len(self._live) > _KEPT else []

        def write() -> None:
            with self._environment.begin(write=True) as transaction:
                for key, row in zip(self._live[-1], self._rows, strict=True):
                    transaction.put(key, row)
                for key in old:
                    transaction.delete(key)

        return seconds(write)

    def close(self) -> None:
        self._environment.close()


def _keys(numbers: npt.NDArray[np.int64]) -> list[bytes]:
    return [number.to_bytes(8, "big") for number in numbers.tolist()]


def _encode(rows: list[bytes]) -> memoryview:
    batch = pa.record_batch({"payload": pa.array(rows, type=pa.binary(_ROW_BYTES))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())
