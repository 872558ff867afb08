"""The vertex over loopback: roots persisted, registered, XORed and completed, from two client processes.

Durable (each group of calls is synced before it is answered), one shard, records of 100 bytes. A root
counts when its client has read the answer that says it is complete, and its latency runs from the moment
its batch was due to be sent (not from when a late client got round to it) to that answer.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.harness import Run, Target, cpu_seconds_of, scratch, spread
from bench.limits import Latency, Limits, StoreWrites
from ftlayer.config import VertexOptions
from ftlayer.records.ids import random_root_ids
from ftlayer.vertex.calls import OpenStream, Persist, Reply, StreamOpened, StreamOptions, Xor, Xored
from ftlayer.vertex.client.client import VertexClient
from ftlayer.vertex.service.embedded import EmbeddedVertex

TARGETS = {
    "acked_roots_per_s": Target(at_least=1e6, unit="roots/s"),
    "p99_at_50k_over_limits": Target(at_most=3),
}

_CLIENTS = 2
_ROW_BYTES = 100
_BULK_ROWS = 8_192
_BULK_WINDOW = 6
_PACED_PER_S = 50_000
_PACED_EVERY_S = 0.005
_PACED_ROWS = int(_PACED_PER_S * _PACED_EVERY_S / _CLIENTS)
_WARM_UP_S = 1.0


@dataclass(frozen=True)
class Paced:
    """A run at `_PACED_PER_S`: latencies, and what came through, with the vertex's CPU µs for a root."""

    latency: Latency
    done: Run


def run(quick: bool, pairs: int) -> dict[str, float]:
    """Measure ``pairs`` runs of either; ``quick`` takes shorter ones."""
    run_s = 3.0 if quick else 6.0
    with scratch() as root, _vertex(root) as vertex:
        # The first roots wait for the kernels, which the vertex reads, or compiles, beside its service.
        _paced(vertex, 1.0)
        bulk = [_bulk(vertex, run_s) for _ in range(pairs)]
        writes = StoreWrites(root / "vertex", _pid(vertex))
        _paced(vertex, 1.0)
        with Limits(root, sync_bytes=writes.bytes_a_commit(), echo_bytes=_PACED_ROWS * _ROW_BYTES) as limits:
            paced = [limits.around(partial(_paced, vertex, run_s)) for _ in range(pairs)]
    over = [each.latency.p99 / (limit.fdatasync.p99 + limit.echo.p99) for each, limit in paced]
    return {
        **spread("acked_roots_per_s", [each.rate for each in bulk]),
        "vertex_cpu_us": statistics.median(each.cpu_us for each in bulk),
        **spread("p50_ms_at_50k", [each.latency.p50 for each, _ in paced]),
        **spread("p99_ms_at_50k", [each.latency.p99 for each, _ in paced]),
        **limits.metrics(),
        **spread("p99_at_50k_over_limits", over),
        "vertex_cpu_us_at_50k": statistics.median(each.done.cpu_us for each, _ in paced),
        "paced_roots_per_s": statistics.median(each.done.rate for each, _ in paced),
    }


@contextmanager
def _vertex(root: Path) -> Iterator[EmbeddedVertex]:
    with EmbeddedVertex(VertexOptions(root / "vertex", max_store_bytes=1 << 30)) as vertex:
        yield vertex


def _pid(vertex: EmbeddedVertex) -> int:
    assert vertex.pid is not None
    return vertex.pid


def _bulk(vertex: EmbeddedVertex, run_s: float) -> Run:
    _, done = _measured(vertex, "bulk", run_s)
    return done


def _paced(vertex: EmbeddedVertex, run_s: float) -> Paced:
    results, done = _measured(vertex, "paced", run_s)
    latencies = np.concatenate([result["latencies_ms"] for result in results])
    return Paced(Latency.of(latencies), done)


def _measured(vertex: EmbeddedVertex, mode: str, run_s: float) -> tuple[list[dict[str, Any]], Run]:
    """Run the clients; CPU time is taken from their start to their end, with the roots of the warm-up counted."""
    begin = cpu_seconds_of(_pid(vertex))
    results = _run_clients(vertex, mode, run_s)
    cpu_s = cpu_seconds_of(_pid(vertex)) - begin
    completed, all_completed = (
        sum(result[name] for result in results) for name in ("completed", "all_completed")
    )
    return results, Run(completed / run_s, cpu_s / all_completed * 1e6)


# ---------------------------------------------------------------- client processes


def _run_clients(vertex: EmbeddedVertex, mode: str, run_s: float) -> list[dict[str, Any]]:
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
    return {
        "completed": sum(n for _, answered, n in batches if start <= answered < start + run_s),
        "all_completed": sum(n for _, _, n in batches),
    }


def _send_paced(client: VertexClient, run_s: float, on_ready: Callable[[], None]) -> dict[str, object]:
    load = _Load(client, _PACED_ROWS, 100)
    on_ready()
    begin = time.perf_counter()
    start = begin + _WARM_UP_S
    for number in range(int((_WARM_UP_S + run_s) / _PACED_EVERY_S)):
        due = begin + number * _PACED_EVERY_S
        time.sleep(max(due - time.perf_counter(), 0))
        load.send(due)
    sent = load.finish()
    batches = [batch for batch in sent if batch[0] >= start]
    return {
        "completed": sum(n for _, _, n in batches),
        "all_completed": sum(n for _, _, n in sent),
        "latencies_ms": [(answered - due) * 1_000 for due, answered, _ in batches],
    }


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
