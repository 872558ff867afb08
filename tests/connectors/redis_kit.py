"""Redis, and a stream of it."""

from __future__ import annotations

import contextlib
from typing import Any

from kit import Kit
from servers import Server

from ftlayer.topology.operators import Fetched, Queue


class RedisServer(Server):
    """What it has answered is on its disk: also after SIGKILL."""

    def command(self) -> list[str]:
        listen = ("--port", str(self.port), "--bind", "127.0.0.1")
        keep = ("--dir", str(self.directory), "--appendonly", "yes", "--appendfsync", "always", "--save", "")
        return [self.program, *listen, *keep]

    def is_ready(self) -> bool:
        import redis

        with contextlib.suppress(redis.RedisError), self.client() as client:
            return bool(client.ping())
        return False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> Any:
        import redis

        return redis.Redis.from_url(self.url, decode_responses=True, protocol=2)


class RedisKit(Kit):
    column = "n"

    def __init__(self, server: RedisServer, name: str) -> None:
        from ftlayer.sources import RedisDataSource

        self.server = server
        self.data_source = RedisDataSource
        self.options = {"url": server.url, "stream": name, "group": "group", "fields": "n"}
        self.url, self.name = server.url, name
        self.queue = self.at(server.port)

    def put(self, first: int, end: int) -> None:
        with self.server.client() as client, client.pipeline(transaction=False) as pipeline:  # type: ignore[attr-defined]
            for number in range(first, end):
                pipeline.xadd(self.name, {"n": str(number)})
            pipeline.execute()

    def numbers(self, fetched: Fetched) -> list[int]:
        return [int(number) for number in fetched.rows.column("n").to_pylist()]

    def pending(self) -> int:
        with self.server.client() as client:  # type: ignore[attr-defined]
            return int(client.xpending(self.name, "group")["pending"])

    def sink(self, name: str) -> Any:
        from ftlayer.sinks import RedisSink

        return RedisSink(self.server.url, f"{self.name}-{name}")  # type: ignore[attr-defined]

    @property
    def sink_format(self) -> str:
        return "ftlayer-redis"

    def sink_options(self, name: str) -> dict[str, str]:
        return {"url": self.url, "stream": f"{self.name}-{name}"}

    def in_sink(self, name: str) -> list[int]:
        with self.server.client() as client:  # type: ignore[attr-defined]
            return [int(fields["number"]) for _, fields in client.xrange(f"{self.name}-{name}")]

    def at(self, port: int, **options: Any) -> Queue:
        from ftlayer.sources import RedisSource

        return RedisSource(f"redis://127.0.0.1:{port}/0", self.name, "group", fields=["n"], **options)
