"""Vertices of the curves: started, filled, killed, asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.scale.lab import MIB, Footprint, footprint
from ftlayer.common.clock import system_now
from ftlayer.config import VertexOptions
from ftlayer.records.ids import random_root_ids
from ftlayer.vertex.calls import (
    ListRecords,
    OpenStream,
    Persist,
    RecordList,
    Stats,
    StreamOpened,
    StreamOptions,
    Xor,
)
from ftlayer.vertex.client.client import VertexClient
from ftlayer.vertex.rules.layer import FTLayerCore
from ftlayer.vertex.rules.state import LayerOptions
from ftlayer.vertex.service.embedded import EmbeddedVertex
from ftlayer.vertex.store import LmdbStore

STREAM = "scale/source"
FAR_MS = 360_000_000
"""Nothing times out or comes back within a run."""

OPTIONS = StreamOptions(timeout_ms=FAR_MS, backoff_ms=(FAR_MS,), max_pending=1 << 30)
MAX_STORE_BYTES = 32 << 30
CALL_ROWS = 8_192
PAGE = 1_000
LISTED = 20_000
"""So many records are listed, a page after the other."""


@contextmanager
def vertex(folder: Path) -> Iterator[EmbeddedVertex]:
    """Start a vertex over the store in a folder, and stop it in the end."""
    with EmbeddedVertex(VertexOptions(folder / "vertex", max_store_bytes=MAX_STORE_BYTES)) as found:
        yield found


def pid_of(running: EmbeddedVertex | None) -> int:
    """Return the process of a vertex that runs."""
    found = None if running is None else running.pid
    if found is None:
        raise RuntimeError("the vertex does not run")
    return found


def declare(client: VertexClient, stream: str = STREAM) -> int:
    """Declare a stream; return the incarnation of the vertex."""
    opened = client.call(OpenStream(stream, OPTIONS))
    assert isinstance(opened, StreamOpened)
    return opened.incarnation


def warm(client: VertexClient) -> None:
    """Have the vertex load its kernels."""
    incarnation = declare(client, "warm/source")
    for _ in range(3):
        roots = random_root_ids(16)
        client.call(Persist("warm/source", rows_of(16, 10), roots, roots))
        client.call(Xor(roots, roots, incarnation))


def rows_of(rows: int, size: int) -> pa.RecordBatch:
    """Return records of ``size`` random bytes."""
    cells = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(size), rows, [None, pa.py_buffer(np.random.default_rng(rows).bytes(rows * size))]
    )
    return pa.record_batch([cells.cast(pa.binary())], ["value"])


@contextmanager
def core_over(folder: Path) -> Iterator[tuple[LmdbStore, FTLayerCore]]:
    """Give the rules over the store that a vertex in ``folder`` will open, to fill it without a service."""
    (folder / "vertex").mkdir(mode=0o700)
    path = folder / "vertex" / "shard-000"
    store = LmdbStore.open(path, max_store_bytes=MAX_STORE_BYTES, durability="none")
    try:
        yield store, FTLayerCore(store, LayerOptions(), system_now())
    finally:
        store.close()


def start_figures(folder: Path, state: str) -> dict[str, float]:
    """Start a vertex over the store in a folder; return what it took to start, its memory, and what listing takes.

    ``start_ms`` and ``start_cpu_ms`` are until its first answer; ``list_us`` is the CPU time for a listed record.
    """
    begin = time.perf_counter()
    with vertex(folder) as running, running.client(client_id="scale") as client:
        client.call(Stats())
        start_s = time.perf_counter() - begin
        pid = pid_of(running)
        started = footprint(pid)
        figures = {"start_ms": start_s * 1_000, "start_cpu_ms": started.cpu_s * 1_000}
        figures |= memory_of(started)
        if state:
            figures |= list_figures(client, pid, state)
    return figures


def memory_of(taken: Footprint) -> dict[str, float]:
    """Return the memory of a vertex: its own, and pages of its store's file, which the system takes back at will."""
    return {"anonymous_mib": taken.anonymous / MIB, "mapped_mib": taken.mapped / MIB}


def list_figures(client: VertexClient, pid: int, state: str) -> dict[str, float]:
    """List up to `LISTED` records, page by page; return CPU µs a record, and ms of the first page."""
    before, listed, after, first_ms = footprint(pid).cpu_s, 0, b"", 0.0
    while listed < LISTED:
        begin = time.perf_counter()
        page = client.call(ListRecords(state, STREAM, limit=PAGE, after=after))  # type: ignore[arg-type]
        assert isinstance(page, RecordList)
        first_ms = first_ms or (time.perf_counter() - begin) * 1_000
        listed += len(page.records)
        after = page.more
        if not after:
            break
    if not listed:
        return {}
    return {"list_us": (footprint(pid).cpu_s - before) / listed * 1e6, "first_page_ms": first_ms}
