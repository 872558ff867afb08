"""The vertex over loopback: roots persisted, registered, XORed and completed, from two client processes.

Durable (each group of calls is synced before it is answered), one shard, records of 100 bytes. A root
counts when its client has read the answer that says it is complete, and its latency runs from the moment
its batch was due to be sent (not from when a late client got round to it) to that answer.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.harness import Target, note
from ftlayer.config import VertexOptions
from ftlayer.records.ids import random_root_ids
from ftlayer.vertex.calls import OpenStream, Persist, Reply, StreamOpened, StreamOptions, Xor, Xored
from ftlayer.vertex.client.client import VertexClient
from ftlayer.vertex.service.embedded import EmbeddedVertex

TARGETS = {
    "acked_roots_per_s": Target(at_least=1e6, unit="roots/s"),
    "p99_ms_at_50k": Target(at_most=10, unit="ms"),
}

_CLIENTS = 2
_ROW_BYTES = 100
_BULK_ROWS = 8_192
_BULK_WINDOW = 6
_PACED_PER_S = 50_000
_PACED_EVERY_S = 0.005
_WARM_UP_S = 1.0


def run(quick: bool) -> dict[str, float]:
    """Measure; ``quick`` takes fewer and shorter runs."""
    repeats, run_s = (3, 3.0) if quick else (5, 6.0)
    with _vertex() as vertex:
        bulk = [_bulk(vertex, run_s) for _ in range(repeats)]
        paced = [_paced(vertex, run_s) for _ in range(repeats)]
    note(f"acked_roots_per_s of each run: {', '.join(f'{rate / 1e6:.2f} M' for rate in bulk)}")
    note(f"p99_ms_at_50k of each run: {', '.join(f'{p99:.1f}' for _, p99, _ in paced)}")
    return {
        "acked_roots_per_s": statistics.median(bulk),
        "p50_ms_at_50k": statistics.median(p50 for p50, _, _ in paced),
        "p99_ms_at_50k": statistics.median(p99 for _, p99, _ in paced),
        "paced_roots_per_s": statistics.median(rate for _, _, rate in paced),
    }


@contextmanager
def _vertex() -> Iterator[EmbeddedVertex]:
    directory = Path(tempfile.mkdtemp(prefix="ftlayer-bench-"))
    try:
        with EmbeddedVertex(VertexOptions(directory / "vertex", max_store_bytes=1 << 30)) as vertex:
            yield vertex
    finally:
        shutil.rmtree(directory)


def _bulk(vertex: EmbeddedVertex, run_s: float) -> float:
    results = _run_clients(vertex, "bulk", run_s)
    return sum(result["completed"] for result in results) / run_s


def _paced(vertex: EmbeddedVertex, run_s: float) -> tuple[float, float, float]:
    results = _run_clients(vertex, "paced", run_s)
    latencies = np.concatenate([result["latencies_ms"] for result in results])
    p50, p99 = np.percentile(latencies, [50, 99]).tolist()
    return p50, p99, sum(result["completed"] for result in results) / run_s


# ---------------------------------------------------------------- client processes


def _run_clients(vertex: EmbeddedVertex, mode: str, run_s: float) -> list[dict[str, float]]:
    order = json.dumps([vertex.address, vertex.token, mode, run_s]) + "\n"
    command = [sys.executable, "-m", "bench.service"]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(_CLIENTS)
    ]
    for process in processes:
        _write(process, order)
    for process in processes:
        _read(process)
    for process in processes:
        _write(process, "go\n")
    results = [json.loads(_read(process)) for process in processes]
    for process in processes:
        process.communicate()
    return results


def _write(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.flush()


def _read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


class _Load:
    """Sends batches of new roots, and their XORs when they are persisted; counts what completes."""

    def __init__(self, client: VertexClient, rows: int, window: int) -> None:
        opened = client.call(OpenStream("bench/source", StreamOptions(max_pending=10_000_000)))
        assert isinstance(opened, StreamOpened)
        self._incarnation = opened.incarnation
        self._pipeline = client.pipeline(window=128)
        payload = np.random.default_rng(3).bytes(rows * _ROW_BYTES)
        cells = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(_ROW_BYTES), rows, [None, pa.py_buffer(payload)]
        )
        self._payload = pa.record_batch([cells.cast(pa.binary())], ["value"])
        self._rows = rows
        self._window = window
        self._room = threading.Semaphore(window)
        self._lock = threading.Lock()
        self._finished: list[tuple[float, float, int]] = []

    def send(self, due_s: float) -> None:
        """Send a batch that was due at ``due_s``; waits while the window is full."""
        self._room.acquire()
        roots = random_root_ids(self._rows)
        values = roots ^ np.uint64(0x9E3779B97F4A7C15)
        call = Persist("bench/source", self._payload, roots, values)
        self._pipeline.submit(call).add_done_callback(lambda future: self._persisted(future, call, due_s))

    def finish(self) -> list[tuple[float, float, int]]:
        """Wait for all answers and return (due, answered, completed) of each batch."""
        for _ in range(self._window):
            self._room.acquire()
        self._pipeline.close()
        return self._finished

    def _persisted(self, future: Future[Reply], call: Persist, due_s: float) -> None:
        future.result()
        xor = self._pipeline.submit(Xor(call.roots, call.values, self._incarnation))
        xor.add_done_callback(lambda answer: self._completed(answer, due_s))

    def _completed(self, future: Future[Reply], due_s: float) -> None:
        reply = future.result()
        assert isinstance(reply, Xored)
        with self._lock:
            self._finished.append((due_s, time.perf_counter(), reply.completed))
        self._room.release()


def _send_bulk(client: VertexClient, run_s: float, on_ready: Callable[[], None]) -> dict[str, object]:
    load = _Load(client, _BULK_ROWS, _BULK_WINDOW)
    on_ready()
    start = time.perf_counter() + _WARM_UP_S
    while (now := time.perf_counter()) < start + run_s:
        load.send(now)
    batches = load.finish()
    return {"completed": sum(n for _, answered, n in batches if start <= answered < start + run_s)}


def _send_paced(client: VertexClient, run_s: float, on_ready: Callable[[], None]) -> dict[str, object]:
    rows = int(_PACED_PER_S * _PACED_EVERY_S / _CLIENTS)
    load = _Load(client, rows, 100)
    on_ready()
    begin = time.perf_counter()
    start = begin + _WARM_UP_S
    for number in range(int((_WARM_UP_S + run_s) / _PACED_EVERY_S)):
        due = begin + number * _PACED_EVERY_S
        time.sleep(max(due - time.perf_counter(), 0))
        load.send(due)
    batches = [batch for batch in load.finish() if batch[0] >= start]
    latencies = [(answered - due) * 1_000 for due, answered, _ in batches]
    return {"completed": sum(n for _, _, n in batches), "latencies_ms": latencies}


def _client_main() -> None:
    address, token, mode, run_s = json.loads(sys.stdin.readline())
    send = {"bulk": _send_bulk, "paced": _send_paced}[mode]

    def on_ready() -> None:
        print("ready", flush=True)
        sys.stdin.readline()

    with VertexClient(address, token, client_id=mode) as client:
        print(json.dumps(send(client, run_s, on_ready)), flush=True)


if __name__ == "__main__":
    _client_main()
