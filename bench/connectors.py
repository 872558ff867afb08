"""Ready-made sources beside a bare loop of the same client, in turns on the same server.

The loop fetches by batch, reads value, id and time of each message, and acknowledges the batch. Ours is a topology of
one subtask that drops its records, in barrier mode with a checkpoint a second: from its first record to its last.

The webhook is durable in a vertex; load comes over 64 connections from a process on another core than the slot's.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from bench.harness import Target, note
from bench.jobs import Jobs, session, wait_until
from bench.topology import create

TARGETS = {
    "redis_vs_client": Target(at_least=0.6),
    "webhook_per_s": Target(at_least=3_000),
    "webhook_p99_ms": Target(at_most=50, unit="ms"),
}

ROUNDS = 3
FETCHED = 1_000
"""Messages that the bare loops ask for at a time."""


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


class Broker(Protocol):
    """A server with messages."""

    def fill(self, messages: int) -> None:
        """Have so many messages, and no others, for the next one who reads."""

    def bare(self, messages: int) -> float:
        """Read so many by the client alone; return how long it took, in seconds."""

    def source(self) -> Any:
        """Return ours."""


class Redis:
    """`Broker` of a stream. A new one is made each time: what was read of one stays in it."""

    def __init__(self, port: int) -> None:
        import redis

        self._url = f"redis://127.0.0.1:{port}/0"
        self._client = redis.Redis.from_url(self._url)
        self._streams = 0
        wait_until(self._is_ready)

    def _is_ready(self) -> bool:
        import redis

        try:
            return bool(self._client.ping())
        except redis.ConnectionError:
            return False

    def fill(self, messages: int) -> None:
        self._client.delete(self._stream)
        self._streams += 1
        body = b"x" * 100
        for start in range(0, messages, FETCHED):
            with self._client.pipeline(transaction=False) as pipeline:
                for _ in range(start, min(start + FETCHED, messages)):
                    pipeline.xadd(self._stream, {b"value": body})
                pipeline.execute()

    @property
    def _stream(self) -> str:
        return f"messages-{self._streams}"

    def bare(self, messages: int) -> float:
        client, stream = self._client, self._stream
        client.xgroup_create(stream, "bare", "0")
        begun = time.monotonic()
        seen = size = 0
        while seen < messages:
            ((_, entries),) = client.xreadgroup("bare", "one", {stream: ">"}, FETCHED)
            for name, fields in entries:
                size += len(fields[b"value"]) + int(name.partition(b"-")[0]) % 2
            client.xack(stream, "bare", *(name for name, _ in entries))
            seen += len(entries)
        assert size
        return time.monotonic() - begun

    def source(self) -> Any:
        from ftlayer.sources import RedisSource

        return RedisSource(self._url, self._stream, "ours", fields=["value"])


@contextmanager
def redis(root: Path) -> Iterator[Broker]:
    """Run a server that keeps nothing: its disk is not what is measured."""
    port = free_port()
    server = subprocess.Popen(
        [*("redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(root)), "--save", ""],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield Redis(port)
    finally:
        server.terminate()
        server.wait()


BROKERS: dict[str, tuple[str, Callable[[Path], Any]]] = {"redis": ("redis-server", redis)}
"""By name: the program that has to be there, and what runs it."""


class Bench(Jobs):
    """A Spark session, and a fresh folder for each job."""

    def against_client(self, broker: Broker, messages: int) -> tuple[float, float]:
        """Return messages a second: ours, and the bare loop's."""
        broker.fill(messages)
        bare = messages / broker.bare(messages)
        broker.fill(messages)
        folder = self.folder()
        with self._running(broker.source(), folder):
            wait_until(lambda: counted(folder)[:, 1].sum() >= messages, 600)
        calls = counted(folder)
        return (messages - calls[0, 1]) / (calls[-1, 0] - calls[0, 0]), bare

    @contextmanager
    def _running(self, source: Any, folder: Path) -> Iterator[Any]:
        from ftlayer import CheckpointConfig, StreamEnvironment

        config = CheckpointConfig(interval="1s", directory=str(folder / "checkpoints"))
        env = StreamEnvironment(self.spark, name=self.name, parallelism=1, checkpointing=config)
        env.source(source, uid="read").sink(Counted(str(folder)), uid="dropped")
        job = env.execute_async()
        try:
            yield job
        finally:
            job.cancel()

    def webhook(self, seconds: float) -> dict[str, float]:
        """Return what `bench.peers.http_load` says of a webhook."""
        from ftlayer import FTLayer, StreamEnvironment
        from ftlayer.sources import WebhookSource

        folder, port = self.folder(), free_port()
        with FTLayer.embedded(folder / "ft") as layer:
            env = StreamEnvironment(self.spark, layer, name=self.name, parallelism=1)
            env.source(WebhookSource(f"127.0.0.1:{port}"), uid="hook").sink(
                Counted(str(folder)), uid="dropped"
            )
            job = env.execute_async()
            try:
                wait_until(lambda: is_listening(port))
                _loaded(port, 2.0)
                return _loaded(port, seconds)
            finally:
                job.cancel()


def _loaded(port: int, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.peers.http_load", str(port), str(seconds)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def run(quick: bool) -> dict[str, float]:
    """Measure all sources whose servers are installed."""
    found: dict[str, float] = {}
    with session() as (root, spark):
        bench = Bench(root, spark)
        for name, (program, start) in BROKERS.items():
            if shutil.which(program) is None:
                note(f"{program} is not installed: {name} is left out")
                continue
            with start(root) as broker:
                bench.against_client(broker, 2_000)
                rates = [bench.against_client(broker, 50_000 if quick else 300_000) for _ in range(ROUNDS)]
            found[f"{name}_vs_client"] = statistics.median(ours / bare for ours, bare in rates)
            found[f"{name}_per_s"] = statistics.median(ours for ours, _ in rates)
            found[f"{name}_client_per_s"] = statistics.median(bare for _, bare in rates)
        hook = bench.webhook(5.0 if quick else 20.0)
    return found | {f"webhook_{name}": value for name, value in hook.items()}
