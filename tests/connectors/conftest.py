"""Servers of the tests' own as fixtures, and the connectors that the suite is run for."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import find_program


def load_shared(*names: str) -> None:
    """Load modules of this directory under their own names: tests are no package."""
    for name in names:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


load_shared("servers", "kit", "redis_kit", "kafka_server", "mqtt_kit", "amqp_kit", "nats_kit", "s3_server")
load_shared("postgres_kit", "local_kits")

from amqp_kit import AmqpKit, RabbitServer  # noqa: E402 - they are loaded above
from kafka_server import GivenKafka, KafkaServer  # noqa: E402
from kit import Kit  # noqa: E402
from local_kits import LOCAL_KITS  # noqa: E402
from mqtt_kit import MosquittoServer, MqttKit  # noqa: E402
from nats_kit import NatsKit, NatsServer  # noqa: E402
from postgres_kit import PostgresChangesKit, PostgresServer, PostgresTableKit  # noqa: E402
from redis_kit import RedisKit, RedisServer  # noqa: E402
from s3_server import S3Server  # noqa: E402
from servers import started, until  # noqa: E402

KITS: dict[str, tuple[str, type[Any]]] = {
    "redis": ("redis_server", RedisKit),
    "amqp": ("rabbit_server", AmqpKit),
    "mqtt": ("mosquitto", MqttKit),
    "nats": ("nats_server", NatsKit),
    "postgres": ("postgres_server", PostgresChangesKit),
    "postgres_table": ("postgres_server", PostgresTableKit),
}
"""By connector: the fixture of its server, and its kit."""

COUNT = iter(range(1 << 30))


@pytest.fixture(scope="module")
def kafka_server() -> Iterator[KafkaServer]:
    """`noida-db`: the binary itself, since its script runs it as a child that a kill would leave.

    ``FTLAYER_KAFKA=host:port`` names another broker, which the tests take instead.
    """
    if given := os.environ.get("FTLAYER_KAFKA"):
        yield GivenKafka(given)
        return
    found = importlib.util.find_spec("noida_db")
    if found is None or found.origin is None:
        pytest.skip("noida-db is not installed")
    from ftlayer.connectors.kafka import source
    from ftlayer.connectors.kafka import source as splits

    with pytest.MonkeyPatch.context() as patch:
        # They would ask a server that is gone for the rest of the process.
        patch.setattr(source, "CONSUMERS", splits.Consumers())
        yield from started(KafkaServer, str(Path(found.origin).with_name("noida-db")), "confluent_kafka")


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    yield from started(RedisServer, "redis-server", "redis")


@pytest.fixture(scope="module")
def mosquitto() -> Iterator[MosquittoServer]:
    yield from started(MosquittoServer, "mosquitto", "paho")


@pytest.fixture(scope="module")
def rabbit_server() -> Iterator[RabbitServer]:
    find_program("/usr/lib/rabbitmq/bin/rabbitmq-server")
    yield from started(RabbitServer, RabbitServer.PROGRAM, "pika")


@pytest.fixture(scope="module")
def nats_server() -> Iterator[NatsServer]:
    yield from started(NatsServer, "nats-server", "nats")


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    yield from started(S3Server, "moto_server", "moto")


@pytest.fixture(scope="module")
def postgres_server() -> Iterator[PostgresServer]:
    yield from started(PostgresServer, PostgresServer.found(), "psycopg")


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


@pytest.fixture(params=[*KITS, *LOCAL_KITS])
def fed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Return the kit of a source that a driver reads while it is killed."""
    if request.param in KITS:
        yield made(request)
        return
    kit = LOCAL_KITS[request.param](request.param, tmp_path)
    yield kit
    kit.end()


@pytest.fixture(params=["redis", "amqp", "mqtt", "nats"])
def server_kit(request: pytest.FixtureRequest) -> Kit:
    """A queue of a server that keeps what it has delivered until it is told that it is durable."""
    return made(request)


@pytest.fixture(params=["amqp", "mqtt", "nats"])
def limited_kit(request: pytest.FixtureRequest) -> Kit:
    """One that delivers no more than ``max_pending`` until then."""
    return made(request)


@pytest.fixture(params=["nats"])
def nats(request: pytest.FixtureRequest) -> Kit:
    return made(request)


@pytest.fixture(params=["amqp"])
def amqp(request: pytest.FixtureRequest) -> Kit:
    return made(request)


@pytest.fixture(params=[name for name, (_, kind) in KITS.items() if kind.tells_what_waits])
def telling_kit(request: pytest.FixtureRequest) -> Kit:
    """A queue of a server that tells how many messages wait."""
    return made(request)


CAMPAIGN = (
    "test_the_server_is_restarted[amqp-15]",
    "meanwhile[amqp]",
    "test_barrier_mode_reads_each_message_once[amqp]",
    "test_plain_spark_reads_and_writes_each_message_once[amqp]",
    "test_plain_spark_reads_and_writes_each_message_once[mqtt]",
    "test_plain_spark_reads_and_writes_each_message_once[nats]",
    "test_plain_spark_reads_and_writes_each_message_once[postgres]",
    "_once[postgres_table]",
)
"""RabbitMQ takes some seconds to start: by default it is restarted once, and in no topology or query.

Of NATS and PostgreSQL one test with Spark is enough by default: the rest is what all queues share.
"""


def _is_lacking(item: pytest.Item) -> bool:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    _, kind = KITS.get(parameters.get("kit", ""), ("", Kit))
    return getattr(item, "originalname", item.name) in kind.lacks


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not _is_lacking(item)]
    for item in items:
        if "tests/connectors" in item.nodeid and item.name.endswith(CAMPAIGN):
            item.add_marker(pytest.mark.campaign)
