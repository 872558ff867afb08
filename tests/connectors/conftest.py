"""Servers of the tests' own, and what a connector plugs into the suite."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ftlayer.topology.queues import Fetched, Member, Queue, QueueReader

DEADLINE_S = 600.0
POLL_S = 0.02


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition; returns what it returned."""
    give_up = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < give_up, f"{what}: not in time"
        time.sleep(POLL_S)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """A program that listens on a port of its own and keeps its data in a directory of its own."""

    program: str
    directory: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def is_ready(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        until(self._is_up, f"start of {self.program}")

    def _is_up(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.directory / "log").read_text("utf-8", "replace")
        return self.is_ready()

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait(60)

    def restart(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.end(how)
        self.start()


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


class KafkaServer(Server):
    """A broker in a wheel. What it has answered is there after SIGKILL, too."""

    def command(self) -> list[str]:
        where = ("--data-dir", str(self.directory), "--kafka-port", str(self.port))
        return [self.program, "start", "--only", "kafka", *where]

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    def make_topic(self, topic: str, partitions: int) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": self.url})
        for made in admin.create_topics([NewTopic(topic, partitions, 1)]).values():
            made.result(60)

    def produce(self, topic: str, partition: int, numbers: Iterable[int], **more: Any) -> None:
        """Send numbers as values, and wait until the broker has them."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.url})
        for number in numbers:
            producer.produce(topic, str(number), partition=partition, **more)
        assert producer.flush(60) == 0


def started(kind: type[Server], program: str, library: str) -> Iterator[Any]:
    """A running server for all tests of a process; ended with it."""
    found = shutil.which(program)
    if found is None or importlib.util.find_spec(library) is None:
        pytest.skip(f"{program} or its client library {library} is not installed")
    directory = Path(tempfile.mkdtemp(prefix=f"ftlayer-{Path(program).name}-"))
    server = kind(found, directory)
    try:
        server.start()
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.end(signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[KafkaServer]:
    """`noida-db`: the binary itself, since its script runs it as a child that a kill would leave."""
    found = importlib.util.find_spec("noida_db")
    if found is None or found.origin is None:
        pytest.skip("noida-db is not installed")
    yield from started(KafkaServer, str(Path(found.origin).with_name("noida-db")), "confluent_kafka")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    yield from started(RedisServer, "redis-server", "redis")


class Kit:
    """What a connector of a queue plugs into the suite: one queue of a server, whose messages are numbers."""

    server: Server
    queue: Queue
    column: str
    """Where a message has its number."""
    data_source: Any
    """The class of the Data Source, and its options but for the spool."""
    options: dict[str, str]

    def put(self, first: int, end: int) -> None:
        """Send the numbers of a range, in order."""
        raise NotImplementedError

    def numbers(self, fetched: Fetched) -> list[int]:
        """Return which numbers these rows are."""
        raise NotImplementedError

    def pending(self) -> int:
        """Return how many messages were delivered and are not acknowledged."""
        raise NotImplementedError

    def sink(self, name: str) -> Any:
        """Return a sink of another queue of the server; None where the connector has none that is exactly once."""
        raise NotImplementedError

    def sink_options(self, name: str) -> dict[str, str]:
        """Return the options by which `data_source` writes to the same."""
        raise NotImplementedError

    def in_sink(self, name: str) -> list[int]:
        """Return the numbers that the sink has committed, from a column ``number``."""
        raise NotImplementedError

    def refused(self) -> Queue:
        """Return the queue with an address at which nobody is, that gives up soon."""
        raise NotImplementedError

    def open(
        self,
        subtask: int = 0,
        parallelism: int = 1,
        positions: dict[int, bytes] | None = None,
        *,
        stored: bool = True,
    ) -> QueueReader:
        return self.queue.open(self.member(subtask, parallelism), positions or {}, stored=stored)

    def member(self, subtask: int = 0, parallelism: int = 1) -> Member:
        return Member("job/messages", subtask, parallelism)


class RedisKit(Kit):
    column = "n"

    def __init__(self, server: RedisServer, name: str) -> None:
        from ftlayer.sources import RedisDataSource, RedisSource

        self.server = server
        self.data_source = RedisDataSource
        self.options = {"url": server.url, "stream": name, "group": "group", "fields": "n"}
        self.url, self.name = server.url, name
        self.queue = RedisSource(server.url, name, "group", fields=["n"])

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

    def sink_options(self, name: str) -> dict[str, str]:
        return {"url": self.url, "stream": f"{self.name}-{name}"}

    def in_sink(self, name: str) -> list[int]:
        with self.server.client() as client:  # type: ignore[attr-defined]
            return [int(fields["number"]) for _, fields in client.xrange(f"{self.name}-{name}")]

    def refused(self) -> Queue:
        from ftlayer.sources import RedisSource

        return RedisSource(f"redis://127.0.0.1:{free_port()}", self.name, "group", reconnect_timeout="50ms")


KITS: dict[str, tuple[str, type[Any]]] = {"redis": ("redis_server", RedisKit)}
"""By connector: the fixture of its server, and its kit."""

COUNT = iter(range(1 << 30))


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    return until


@pytest.fixture(params=KITS)
def kit(request: pytest.FixtureRequest) -> Kit:
    fixture, kind = KITS[request.param]
    made: Kit = kind(request.getfixturevalue(fixture), f"messages-{os.getpid()}-{next(COUNT)}")
    return made
