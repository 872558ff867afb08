"""A stream of NATS JetStream, and nats-py."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.connectors.broker import BODY, FETCHED, Served, free_port, is_listening
from bench.jobs import wait_until

MOST_PENDING = 20_000
"""Of the bare loop's consumer: more than a fetch, so that it never waits for an acknowledgement to arrive."""


class NatsBroker:
    """`Broker` of a stream. A new one is made each time."""

    def __init__(self, port: int) -> None:
        self._url = f"nats://127.0.0.1:{port}"
        self._streams = 0
        wait_until(lambda: is_listening(port))

    @property
    def _stream(self) -> str:
        return f"messages-{self._streams}"

    def fill(self, messages: int) -> None:
        asyncio.run(self._fill(messages))

    def bare(self, messages: int) -> float:
        return asyncio.run(self._bare(messages))

    def source(self) -> Any:
        from ftlayer.sources import NatsSource

        return NatsSource(self._url, self._stream, "ours")

    async def _fill(self, messages: int) -> None:
        import nats

        async with await nats.connect(self._url) as client:
            stream = client.jetstream()
            if self._streams:
                await stream.delete_stream(self._stream)
            self._streams += 1
            await stream.add_stream(name=self._stream, subjects=[f"{self._stream}.in"])
            for start in range(0, messages, FETCHED):
                for _ in range(start, min(start + FETCHED, messages) - 1):
                    await client.publish(f"{self._stream}.in", BODY)
                # It is answered when all before it are stored.
                await stream.publish(f"{self._stream}.in", BODY)

    async def _bare(self, messages: int) -> float:
        import nats
        from nats.js.api import ConsumerConfig

        async with await nats.connect(self._url) as client:
            config = ConsumerConfig(max_ack_pending=MOST_PENDING)
            pull = await client.jetstream().pull_subscribe(
                f"{self._stream}.in", durable="bare", stream=self._stream, config=config
            )
            begun = time.monotonic()
            seen = size = 0
            while seen < messages:
                fetched = await pull.fetch(FETCHED)
                for message in fetched:
                    known = message.metadata
                    size += len(message.data) + known.sequence.stream % 2 + known.timestamp.second % 2
                    assert not message.headers
                    await message.ack()
                seen += len(fetched)
            assert size
            return time.monotonic() - begun


@contextmanager
def _run(root: Path) -> Iterator[NatsBroker]:
    """Run a server that keeps its streams in files, as it does by itself."""
    port = free_port()
    server = subprocess.Popen(
        ["nats-server", "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(root)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield NatsBroker(port)
    finally:
        server.terminate()
        server.wait()


NATS = Served("nats-server", _run, at_least=0.6)
