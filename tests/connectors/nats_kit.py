"""NATS with JetStream, and a stream of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from kit import Kit
from servers import Server, is_open

from ftlayer.topology.operators import Fetched, Queue


class NatsServer(Server):
    """What it has answered is in files: also after SIGKILL. What a consumer was given, but for the last moment, too."""

    def command(self) -> list[str]:
        listen = ("-a", "127.0.0.1", "-p", str(self.port))
        return [self.program, *listen, "-js", "-sd", str(self.directory)]

    def is_ready(self) -> bool:
        from nats.errors import Error

        if not is_open(self.port):
            return False
        with contextlib.suppress(Error, OSError):
            self.ask(lambda client: client.jetstream().account_info())
            return True
        return False

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def ask(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return what this returns for a client."""
        import nats

        async def asked() -> Any:
            async with await nats.connect(self.url) as client:
                return await work(client)

        return asyncio.run(asked())

    def make(self, stream: str) -> None:
        self.ask(lambda client: client.jetstream().add_stream(name=stream, subjects=[f"{stream}.>"]))

    def read(self, stream: str) -> list[tuple[dict[str, str], bytes]]:
        """Return headers and bodies of all messages of a stream, in order."""

        async def read(client: Any) -> list[tuple[dict[str, str], bytes]]:
            from nats.js.errors import NotFoundError

            jetstream = client.jetstream()
            try:
                state = (await jetstream.stream_info(stream)).state
            except NotFoundError:
                return []
            if not state.messages:
                return []
            found, received = [], asyncio.Event()

            async def receive(message: Any) -> None:
                found.append((message.headers or {}, message.data))
                if message.metadata.sequence.stream >= state.last_seq:
                    received.set()

            await jetstream.subscribe(f"{stream}.>", cb=receive, ordered_consumer=True)
            await asyncio.wait_for(received.wait(), 60)
            return found

        return list(self.ask(read))


class NatsKit(Kit):
    server: NatsServer
    column = "value"
    is_given_to_one = False
    parallelism = 1

    def __init__(self, server: NatsServer, name: str) -> None:
        from ftlayer.sources import NatsDataSource

        self.server, self.name = server, name
        self.data_source = NatsDataSource
        self.options = {"url": server.url, "stream": name, "consumer": "group"}
        self.queue = self.at(server.port)
        server.make(name)

    def put(self, first: int, end: int) -> None:
        async def put(client: Any) -> None:
            jetstream = client.jetstream()
            stored = [
                await jetstream.publish_async(f"{self.name}.in", b"%d" % number)
                for number in range(first, end)
            ]
            await asyncio.gather(*stored)

        self.server.ask(put)

    def numbers(self, fetched: Fetched) -> list[int]:
        return [int(number) for number in fetched.rows.column("value").to_pylist()]

    def pending(self) -> int:
        info = self.server.ask(lambda client: client.jetstream().consumer_info(self.name, "group"))
        return int(info.num_ack_pending)

    def sink(self, name: str) -> Any:
        from ftlayer.sinks import NatsSink

        return NatsSink(self.server.url, self._made(name), f"{self.name}-{name}.out")

    @property
    def sink_format(self) -> str:
        return "ftlayer-nats"

    def sink_options(self, name: str) -> dict[str, str]:
        stream = self._made(name)
        return {"url": self.server.url, "stream": stream, "subject": f"{stream}.out"}

    def in_sink(self, name: str) -> list[int]:
        return [json.loads(body)["number"] for _, body in self.server.read(f"{self.name}-{name}")]

    def _made(self, name: str) -> str:
        self.server.make(f"{self.name}-{name}")
        return f"{self.name}-{name}"

    def at(self, port: int, **options: Any) -> Queue:
        from ftlayer.sources import NatsSource

        return NatsSource(f"nats://127.0.0.1:{port}", self.name, "group", **options)
