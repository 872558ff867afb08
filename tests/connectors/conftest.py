"""Servers of the tests' own, and what a connector plugs into the suite."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
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

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from ftlayer.topology.queues import Fetched, Member, Queue, QueueReader

DEADLINE_S = 600.0
POLL_S = 0.02
PORTS = range(10_000, 30_000)


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition; returns what it returned."""
    give_up = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < give_up, f"{what}: not in time"
        time.sleep(POLL_S)
    return found


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """Return a port that is free, below those that the system gives to connections: a server takes seconds to start."""
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


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

    @property
    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        until(self._is_up, f"start of {self.program}")

    def _is_up(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.directory / "log").read_text("utf-8", "replace")
        return self.is_ready()

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait(60)

    def close(self) -> None:
        """End what was started beside the server."""

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


class MosquittoServer(Server):
    """It is ended by SIGTERM at any time: by SIGKILL it loses what it has not written since its last autosave."""

    def command(self) -> list[str]:
        # It gives up its rights as root.
        self.directory.chmod(0o777)
        lines = (
            f"listener {self.port} 127.0.0.1",
            "allow_anonymous true",
            "persistence true",
            f"persistence_location {self.directory}/",
            "max_queued_messages 0",
            "max_inflight_messages 0",
        )
        (self.directory / "conf").write_text("\n".join(lines))
        return [self.program, "-c", str(self.directory / "conf")]

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        super().end(signal.SIGTERM)

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def publish(self, topic: str, numbers: Iterable[int], qos: int) -> None:
        """Send numbers, and wait until the server has them."""
        import paho.mqtt.client as mqtt

        client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
        client.max_inflight_messages_set(1_000)
        client.connect("127.0.0.1", self.port)
        client.loop_start()
        for sent in [client.publish(topic, str(number), qos) for number in numbers]:
            sent.wait_for_publish(60)
        client.disconnect()
        client.loop_stop()


class RabbitServer(Server):
    """A RabbitMQ node with an epmd of its own. What is durable is on its disk when it was confirmed."""

    SCRIPT = "/usr/lib/rabbitmq/bin/rabbitmq-server"
    """Debian's `rabbitmq-server` is a wrapper that wants to be root, or the user of the system's node."""

    epmd: subprocess.Popen[bytes] | None = None
    shell: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        return [self.SCRIPT]

    @property
    def node(self) -> str:
        return f"ftlayer{self.port}@localhost"

    @property
    def environment(self) -> dict[str, str]:
        place = self.directory
        (place / "plugins").write_text("[].")
        (place / "rabbitmq.conf").write_text("disk_free_limit.absolute = 1MB\n")
        return {
            **os.environ,
            "HOME": str(place),
            "ERL_EPMD_PORT": str(self.epmd_port),
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self.dist_port),
            "RABBITMQ_MNESIA_BASE": str(place / "data"),
            "RABBITMQ_LOG_BASE": str(place / "logs"),
            "RABBITMQ_CONFIG_FILE": str(place / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(place / "plugins"),
            "RABBITMQ_PID_FILE": str(place / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1",
        }

    def start(self) -> None:
        if self.epmd is None:
            self.epmd_port, self.dist_port = free_port(), free_port()
            listen = ("-port", str(self.epmd_port), "-address", "127.0.0.1")
            self.epmd = subprocess.Popen(["epmd", *listen], stdin=subprocess.DEVNULL)
            # A node that does not find it starts one of its own.
            until(lambda: is_open(self.epmd_port), "start of epmd")
        super().start()

    def is_ready(self) -> bool:
        import pika

        with contextlib.suppress(pika.exceptions.AMQPError, OSError), self.client():
            return True
        return False

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        assert self.process is not None
        # The script is a shell that waits for the node.
        os.kill(int((self.directory / "pid").read_text()), how)
        self.process.wait(120)

    def close(self) -> None:
        for process in (self.shell, self.epmd):
            if process is not None:
                process.kill()
                process.wait(60)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/%2f"

    def client(self) -> Any:
        import pika

        return pika.BlockingConnection(pika.URLParameters(self.url))

    def unacknowledged(self, queue: str) -> int:
        """Ask the node itself: AMQP does not tell."""
        if self.shell is None:
            self.shell = subprocess.Popen(
                ["erl", "-noshell", "-hidden", "-sname", f"asking{self.port}@localhost", "-eval", ASKING],
                env={**self.environment, "NODE": self.node},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self.shell.stdin is not None
        assert self.shell.stdout is not None
        self.shell.stdin.write(queue.encode() + b"\n")
        self.shell.stdin.flush()
        return int(self.shell.stdout.readline())


ASKING = """
Node = list_to_atom(os:getenv("NODE")),
Ask = fun(Ask) ->
    Queue = list_to_binary(string:trim(io:get_line(""))),
    {ok, Found} = rpc:call(Node, rabbit_amqqueue, lookup, [{resource, <<"/">>, queue, Queue}]),
    [{_, Count}] = rpc:call(Node, rabbit_amqqueue, info, [Found, [messages_unacknowledged]]),
    io:format("~b~n", [Count]),
    Ask(Ask)
end,
Ask(Ask).
"""
"""Erlang that answers each line, the name of a queue, by a line with the number of its unacknowledged messages."""


def started(kind: type[Server], program: str, library: str) -> Iterator[Any]:
    """A running server for the tests of a file. It ends with them: some take up half a core while nothing is asked."""
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
        server.close()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def kafka_server() -> Iterator[KafkaServer]:
    """`noida-db`: the binary itself, since its script runs it as a child that a kill would leave."""
    found = importlib.util.find_spec("noida_db")
    if found is None or found.origin is None:
        pytest.skip("noida-db is not installed")
    from ftlayer.sources import kafka, kafka_splits

    with pytest.MonkeyPatch.context() as patch:
        # They would ask a server that is gone for the rest of the process.
        patch.setattr(kafka, "CONSUMERS", kafka_splits.Consumers())
        yield from started(KafkaServer, str(Path(found.origin).with_name("noida-db")), "confluent_kafka")


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    yield from started(RedisServer, "redis-server", "redis")


@pytest.fixture(scope="module")
def mosquitto() -> Iterator[MosquittoServer]:
    yield from started(MosquittoServer, "mosquitto", "paho")


@pytest.fixture(scope="module")
def rabbit_server() -> Iterator[RabbitServer]:
    yield from started(RabbitServer, RabbitServer.SCRIPT, "pika")


class Kit:
    """What a connector of a queue plugs into the suite: one queue of a server, whose messages are numbers."""

    server: Server
    queue: Queue
    name: str
    column: str
    """Where a message has its number."""
    data_source: Any
    """The class of the Data Source, and its options but for the spool."""
    options: dict[str, str]
    is_given_to_one = True
    """Whether a message that was delivered is delivered again to the same member only."""
    parallelism = 2
    """With how many subtasks a message enters a topology once."""
    tells_what_waits = True
    enters_once = True
    """Whether messages enter a topology once though its slots die."""
    lacks: frozenset[str] = frozenset()
    """Tests of the suite that the system has no means for: its connector has others instead."""

    def begin(self, owner: str) -> None:
        """Have the server keep what is put from now on for this owner."""

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
        """Return a sink of another queue of the server; of files where it has none that is exactly once."""
        from ftlayer.sinks import FileSink

        return FileSink(str(self._files(name)))

    @property
    def sink_format(self) -> str:
        """The format by which plain Spark writes to the same, with the `sink_options`."""
        return "parquet"

    def sink_options(self, name: str) -> dict[str, str]:
        return {"path": str(self._files(name))}

    def in_sink(self, name: str) -> list[int]:
        """Return the numbers that the sink has committed, from a column ``number``."""
        if not self._files(name).exists():
            return []
        numbers = pa.schema([("number", pa.int64())])
        read: list[int] = (
            ds.dataset(self._files(name), numbers, format="parquet").to_table()["number"].to_pylist()
        )
        return read

    def _files(self, name: str) -> Path:
        return self.server.directory / f"{self.name}-{name}"

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

    @property
    def sink_format(self) -> str:
        return "ftlayer-redis"

    def sink_options(self, name: str) -> dict[str, str]:
        return {"url": self.url, "stream": f"{self.name}-{name}"}

    def in_sink(self, name: str) -> list[int]:
        with self.server.client() as client:  # type: ignore[attr-defined]
            return [int(fields["number"]) for _, fields in client.xrange(f"{self.name}-{name}")]

    def refused(self) -> Queue:
        from ftlayer.sources import RedisSource

        return RedisSource(f"redis://127.0.0.1:{free_port()}", self.name, "group", reconnect_timeout="50ms")


class AmqpKit(Kit):
    column = "value"
    is_given_to_one = False
    parallelism = 1
    tells_what_waits = False
    # Its server may give to one what it gave to the other before.
    lacks = frozenset({"test_a_savepoint_is_restored_with_fewer_subtasks"})

    def __init__(self, server: RabbitServer, name: str) -> None:
        from ftlayer.sources import AmqpDataSource, AmqpSource

        self.server = server
        self.name = name
        self.data_source = AmqpDataSource
        self.options = {"url": server.url, "queue": name}
        self.queue = AmqpSource(server.url, name)

    def put(self, first: int, end: int) -> None:
        import pika

        with self.server.client() as client:  # type: ignore[attr-defined]
            channel = client.channel()
            channel.queue_declare(self.name, durable=True)
            channel.confirm_delivery()
            for number in range(first, end):
                properties = pika.BasicProperties(delivery_mode=2, message_id=str(number))
                channel.basic_publish("", self.name, b"%d" % number, properties)

    def numbers(self, fetched: Fetched) -> list[int]:
        return [int(number) for number in fetched.rows.column("value").to_pylist()]

    def pending(self) -> int:
        assert isinstance(self.server, RabbitServer)
        return self.server.unacknowledged(self.name)

    def refused(self) -> Queue:
        from ftlayer.sources import AmqpSource

        return AmqpSource(f"amqp://127.0.0.1:{free_port()}", self.name, reconnect_timeout="50ms")


class MqttKit(Kit):
    """One subtask with QoS 1: mosquitto forgets shared subscriptions when it is restarted."""

    column = "value"
    parallelism = 1
    is_given_to_one = False
    tells_what_waits = False
    enters_once = False
    lacks = frozenset(
        {
            # A server does not tell, and messages have no names.
            "test_messages_are_pending_until_they_are_acknowledged",
            "test_what_was_not_stored_comes_again_and_nothing_else",
            "test_a_reader_that_takes_over_acknowledges_nothing_by_itself",
            "test_the_server_is_restarted",
            # Messages are for those who have subscribed.
            "test_members_share_the_messages",
            "test_members_that_are_gone_and_stored_nothing_lose_nothing",
            "test_a_savepoint_is_restored_with_fewer_subtasks",
            "test_plain_spark_reads_and_writes_each_message_once",
            "test_a_wrapped_query_reads_each_message_once",
        }
    )

    def __init__(self, server: MosquittoServer, name: str) -> None:
        from ftlayer.sources import MqttDataSource, MqttSource

        self.server, self.name = server, name
        self.data_source = MqttDataSource
        self.options = {"url": server.url, "topic": name}
        self.queue = MqttSource(server.url, name)
        self.begin(f"job/{name}")

    def begin(self, owner: str) -> None:
        self.owner = owner
        session = self._session()
        session.subscribe(self.name, 1)
        session.close()

    def member(self, subtask: int = 0, parallelism: int = 1) -> Member:
        return Member(self.owner, subtask, parallelism)

    def _session(self) -> Any:
        from ftlayer.clients.mqtt import Session, address_of

        address = address_of(self.server.url)  # type: ignore[attr-defined]
        return Session(address, f"{self.owner}-0", "5", 3_600, 65_535)

    def put(self, first: int, end: int) -> None:
        self.server.publish(self.name, range(first, end), 1)  # type: ignore[attr-defined]

    def numbers(self, fetched: Fetched) -> list[int]:
        return [int(number) for number in fetched.rows.column("value").to_pylist()]

    def pending(self) -> int:
        """Take the session over, which delivers what is pending again; its reader takes it back."""
        from ftlayer.clients.mqtt import ServerAwayError

        try:
            session = self._session()
        except ServerAwayError:
            return 1
        try:
            session.unsubscribe("nothing")
            return len(session.received)
        except ServerAwayError:
            return 1  # Perhaps: the reader was faster.
        finally:
            session.close()

    def refused(self) -> Queue:
        from ftlayer.sources import MqttSource

        return MqttSource(f"mqtt://127.0.0.1:{free_port()}", self.name, reconnect_timeout="50ms")


KITS: dict[str, tuple[str, type[Any]]] = {
    "redis": ("redis_server", RedisKit),
    "amqp": ("rabbit_server", AmqpKit),
    "mqtt": ("mosquitto", MqttKit),
}
"""By connector: the fixture of its server, and its kit."""

COUNT = iter(range(1 << 30))


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    return until


def made(request: pytest.FixtureRequest) -> Kit:
    fixture, kind = KITS[request.param]
    kit: Kit = kind(request.getfixturevalue(fixture), f"messages-{os.getpid()}-{next(COUNT)}")
    return kit


@pytest.fixture(params=KITS)
def kit(request: pytest.FixtureRequest) -> Kit:
    return made(request)


@pytest.fixture(params=[name for name, (_, kind) in KITS.items() if kind.is_given_to_one])
def kit_of_one(request: pytest.FixtureRequest) -> Kit:
    """A queue that delivers again to the same member only."""
    return made(request)


@pytest.fixture(params=["amqp"])
def amqp(request: pytest.FixtureRequest) -> Kit:
    return made(request)


@pytest.fixture(params=[name for name, (_, kind) in KITS.items() if kind.tells_what_waits])
def telling_kit(request: pytest.FixtureRequest) -> Kit:
    """A queue of a server that tells how many messages wait."""
    return made(request)


SLOW_STARTS = (
    "test_the_server_is_restarted[amqp-15]",
    "meanwhile[amqp]",
    "test_barrier_mode_reads_each_message_once[amqp]",
    "test_plain_spark_reads_and_writes_each_message_once[amqp]",
)
"""RabbitMQ takes ten seconds to start: by default it is restarted once, and in no topology or query."""


def _is_lacking(item: pytest.Item) -> bool:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    _, kind = KITS.get(parameters.get("kit", ""), ("", Kit))
    return getattr(item, "originalname", item.name) in kind.lacks


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not _is_lacking(item)]
    for item in items:
        if "tests/connectors" in item.nodeid and item.name.endswith(SLOW_STARTS):
            item.add_marker(pytest.mark.campaign)
