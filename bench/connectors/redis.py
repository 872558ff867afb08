"""A stream of Redis, and redis-py."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.connectors.broker import BODY, FETCHED, Served, free_port
from bench.jobs import wait_until


class RedisBroker:
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
        for start in range(0, messages, FETCHED):
            with self._client.pipeline(transaction=False) as pipeline:
                for _ in range(start, min(start + FETCHED, messages)):
                    pipeline.xadd(self._stream, {b"value": BODY})
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
def _run(root: Path) -> Iterator[RedisBroker]:
    """Run a server that keeps nothing: its disk is not what is measured."""
    port = free_port()
    server = subprocess.Popen(
        [*("redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(root)), "--save", ""],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield RedisBroker(port)
    finally:
        server.terminate()
        server.wait()


REDIS = Served("redis-server", _run, at_least=0.6)
