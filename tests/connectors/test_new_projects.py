"""Projects of ``ftlayer new`` with the servers that their source and sink are of: made, run, fed, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from amqp_kit import RabbitServer
from kafka_server import KafkaServer
from mqtt_kit import MosquittoServer
from nats_kit import NatsServer
from postgres_kit import PostgresServer
from redis_kit import RedisServer
from servers import free_port, until

from ftlayer.cli.new import (
    Choices,
    ProjectKind,
    ProjectMode,
    ProjectSink,
    ProjectSource,
    project,
    write_project,
)

pytestmark = [pytest.mark.spark, pytest.mark.campaign]

WAIT_S = 600
GOOD = 20
LINES = [f'{{"order_id": "o-{number}", "customer": "ada", "cents": 100}}' for number in range(GOOD)]
LINES.insert(0, "no JSON")
NOBODY = 0x10
"""A reason of MQTT 5: there are no matching subscribers."""
NEVER = "\0"
"""What no log has: it is only looked whether the program lives."""

VARIANTS: dict[str, tuple[ProjectKind, ProjectMode | None]] = {
    "query": (ProjectKind.QUERY, None),
    "acker": (ProjectKind.TOPOLOGY, ProjectMode.ACKER),
    "barrier": (ProjectKind.TOPOLOGY, ProjectMode.BARRIER),
}


@dataclass
class Place:
    """A server as source and sink: variables for either, how orders get into it, and how many came out."""

    source: ProjectSource
    sink: ProjectSink
    send: Callable[[str], Any]
    arrived: Callable[[], int]
    reads: dict[str, str] = field(default_factory=dict)
    writes: dict[str, str] = field(default_factory=dict)


@pytest.fixture
def kafka(kafka_server: KafkaServer) -> Place:
    source, sink = f"orders-{free_port()}", f"checked-{free_port()}"
    kafka_server.make_topic(source, 2)
    kafka_server.make_topic(sink, 1)
    return Place(
        ProjectSource.KAFKA,
        ProjectSink.KAFKA,
        lambda line: kafka_server.produce(source, 0, [0], form=lambda _: line),
        lambda: len(kafka_server.messages(sink)),
        {"SOURCE_SERVERS": kafka_server.url, "SOURCE_TOPIC": source},
        {"SINK_SERVERS": kafka_server.url, "SINK_TOPIC": sink},
    )


@pytest.fixture
def redis(redis_server: RedisServer) -> Iterator[Place]:
    source, sink = f"orders-{free_port()}", f"checked-{free_port()}"
    with redis_server.client() as client:
        yield Place(
            ProjectSource.REDIS,
            ProjectSink.REDIS,
            lambda line: client.xadd(source, {"value": line}),
            lambda: int(client.xlen(sink)),
            {"SOURCE_URL": redis_server.url, "SOURCE_STREAM": source},
            {"SINK_URL": redis_server.url, "SINK_STREAM": sink},
        )


@pytest.fixture
def nats(nats_server: NatsServer) -> Place:
    source, sink = f"ORDERS{free_port()}", f"CHECKED{free_port()}"
    nats_server.make(source)
    nats_server.make(sink)
    return Place(
        ProjectSource.NATS,
        ProjectSink.NATS,
        lambda line: nats_server.ask(
            lambda client: client.jetstream().publish(f"{source}.in", line.encode())
        ),
        lambda: len(nats_server.read(sink)),
        {"SOURCE_URL": nats_server.url, "SOURCE_STREAM": source},
        {"SINK_URL": nats_server.url, "SINK_STREAM": sink, "SINK_SUBJECT": f"{sink}.out"},
    )


@pytest.fixture
def amqp(rabbit_server: RabbitServer) -> Iterator[Place]:
    source, sink = f"orders-{free_port()}", f"checked-{free_port()}"
    with rabbit_server.client() as connection:
        channel = connection.channel()
        channel.queue_declare(source, durable=True)
        channel.queue_declare(sink, durable=True)
        yield Place(
            ProjectSource.AMQP,
            ProjectSink.AMQP,
            lambda line: channel.basic_publish("", source, line.encode()),
            lambda: int(channel.queue_declare(sink, passive=True).method.message_count),
            {"SOURCE_URL": rabbit_server.url, "SOURCE_QUEUE": source},
            {"SINK_URL": rabbit_server.url, "SINK_QUEUE": sink},
        )


@pytest.fixture
def mqtt(mosquitto: MosquittoServer) -> Iterator[Place]:
    import paho.mqtt.client as paho

    client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    source, sink = f"orders-{free_port()}", f"checked-{free_port()}"
    received: list[bytes] = []
    refused: dict[int, bool] = {}
    client.on_message = lambda client, data, message: received.append(message.payload)

    def on_publish(client: Any, data: Any, number: int, reason: Any, properties: Any) -> None:
        refused[number] = reason.value == NOBODY

    client.on_publish = on_publish
    client.connect("127.0.0.1", mosquitto.port)
    client.subscribe(sink, 1)
    client.loop_start()

    def taken(line: str) -> bool:
        """Send a message; until the program has subscribed, the server says that nobody gets it."""
        number = client.publish(source, line, 1).mid
        until(lambda: number in refused, "an acknowledgement")
        return not refused[number]

    yield Place(
        ProjectSource.MQTT,
        ProjectSink.MQTT,
        lambda line: until(lambda: taken(line), "a subscriber"),
        lambda: len(received),
        {"SOURCE_URL": mosquitto.url, "SOURCE_TOPIC": source},
        {"SINK_URL": mosquitto.url, "SINK_TOPIC": sink},
    )
    client.disconnect()
    client.loop_stop()


@pytest.fixture
def webhook_to_postgres(postgres_server: PostgresServer) -> Place:
    listen, table = f"127.0.0.1:{free_port()}", f"checked_{free_port()}"
    postgres_server.execute(
        f"CREATE TABLE {table} (order_id text, customer text, cents bigint, total bigint)"
    )

    def answered(line: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://{listen}/", line.encode(), 60) as answer:
                return bool(answer.status == 202)
        except urllib.error.URLError:  # The slot, or the query, does not listen yet.
            return False

    return Place(
        ProjectSource.WEBHOOK,
        ProjectSink.POSTGRES,
        lambda line: until(lambda: answered(line), "an answer"),
        lambda: int(postgres_server.execute(f"SELECT count(*) FROM {table}")[0][0]),
        {"SOURCE_LISTEN": listen},
        {"SINK_DSN": postgres_server.dsn, "SINK_TABLE": table},
    )


def postgres(server: PostgresServer, source: ProjectSource) -> Place:
    orders, checked = f"orders_{free_port()}", f"checked_{free_port()}"
    server.execute(
        f"CREATE TABLE {orders} (id bigserial PRIMARY KEY, order_id text, customer text, cents bigint)"
    )
    server.execute(f"CREATE TABLE {checked} (order_id text, customer text, cents bigint, total bigint)")

    def send(line: str) -> None:
        number = line.partition("o-")[2].partition('"')[0]
        values = (f"o-{number}", "ada", 100 if number else -1)
        server.execute(f"INSERT INTO {orders} (order_id, customer, cents) VALUES (%s, %s, %s)", *values)

    return Place(
        source,
        ProjectSink.POSTGRES,
        send,
        lambda: int(server.execute(f"SELECT count(*) FROM {checked}")[0][0]),
        {"SOURCE_DSN": server.dsn, "SOURCE_TABLE": orders},
        {"SINK_DSN": server.dsn, "SINK_TABLE": checked},
    )


@pytest.fixture
def changes(postgres_server: PostgresServer) -> Place:
    return postgres(postgres_server, ProjectSource.POSTGRES_CHANGES)


@pytest.fixture
def table(postgres_server: PostgresServer) -> Place:
    return postgres(postgres_server, ProjectSource.POSTGRES_TABLE)


@pytest.fixture
def kafka_to_postgres(kafka: Place, table: Place) -> Place:
    return Place(kafka.source, table.sink, kafka.send, table.arrived, kafka.reads, table.writes)


PLACES = (
    "kafka",
    "redis",
    "nats",
    "amqp",
    "mqtt",
    "webhook_to_postgres",
    "changes",
    "table",
    "kafka_to_postgres",
)
FIXES = """
def mended(record):
    return {**record, "value": '{"order_id": "o-99", "customer": "ada", "cents": 100}'}
"""
"""What makes an order of the one that is none."""


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", PLACES)
def test_orders_get_through_and_the_one_that_is_none_is_a_dead_letter(
    name: str, variant: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place: Place = request.getfixturevalue(name)
    package = f"shop_{free_port()}"
    shop, log = tmp_path / "shop", tmp_path / "log"
    write_project(shop, project(Choices(package, *VARIANTS[variant], place.source, place.sink)))
    variables = {**os.environ, **place.reads, **place.writes, "SPARK_LOCAL_IP": "127.0.0.1"}
    for left_out in ("PYSPARK_PYTHON", "PYTHONSAFEPATH"):
        variables.pop(left_out, None)
    with log.open("w") as output:
        program = subprocess.Popen(
            [sys.executable, "-m", package],
            cwd=shop,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )

    def said(text: str) -> bool:
        assert program.poll() is None, log.read_text()
        return text in log.read_text()

    try:
        until(lambda: said("runs; Ctrl-C"), "start of the program")
        for line in LINES:
            place.send(line)
        until(lambda: place.arrived() >= GOOD or said(NEVER), "rows in the sink")
        until(lambda: said("dead letter"), "a dead letter")
        if name == "kafka_to_postgres":
            (shop / "fixes.py").write_text(FIXES)
            where = ("--checkpoints", "state") if variant == "barrier" else ("--vertex", "state/store")
            asked = (sys.executable, "-m", "ftlayer.cli.main", "dead")
            mend = (*asked, "edit", "--all", "--yes", "--with", "fixes:mended", *where)
            listed = (*asked, "list", "--json", *where)
            # A letter is in its file behind the checkpoint that holds it.
            until(lambda: json.loads(subprocess.check_output(listed, cwd=shop))["items"], "the letter")
            assert b"edited and requeued 1 of 1" in subprocess.check_output(mend, cwd=shop)
            until(lambda: place.arrived() > GOOD or said(NEVER), "the mended order")
        program.send_signal(signal.SIGTERM)
        assert program.wait(WAIT_S) == 0, log.read_text()
    finally:
        program.kill()
        program.wait()
    assert place.arrived() == GOOD + (name == "kafka_to_postgres"), log.read_text()
    assert "stopped" in log.read_text()
