"""Options of Data Sources: what they are, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.data_source_options import DataSourceOptions
from ftlayer.errors import ConfigError
from ftlayer.sources import (
    AmqpDataSource,
    FilesDataSource,
    KafkaDataSource,
    MqttDataSource,
    NatsDataSource,
    PolledJsonDataSource,
    PostgresChangesDataSource,
    PostgresTableDataSource,
    RedisDataSource,
    SseDataSource,
    TailDataSource,
    WebhookDataSource,
)
from ftlayer.sources.data_source import QueueDataSource


def test_options_are_read_as_what_they_are() -> None:
    options = DataSourceOptions(
        {"maxRows": "7", "Unique": "True", "fields": " a, b,,c ", "kafka.acks": "all", "name": ""}, "ours"
    )
    assert (options.count("maxrows", 1), options.count("minRows", 3)) == (7, 3)
    assert options.flag("unique", default=False)
    assert options.flag("other", default=True)
    assert options.names("fields") == ["a", "b", "c"]
    assert options.names("others", "x,y") == ["x", "y"]
    assert options.below("kafka.") == {"acks": "all"}
    assert (options.text("name", "default"), options.text("absent", "default")) == ("", "default")
    assert options.get("absent") is None
    options.check_all_known()


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda options: options.count("n", 1), "n: expected a number from 1 to .*, got '0'"),
        (lambda options: options.flag("b", default=True), "b: expected true or false, got 'yes'"),
        (lambda options: options.required("missing"), "option 'missing' is missing"),
        (lambda options: options.required("empty"), "option 'empty' is missing"),
    ],
)
def test_what_an_option_cannot_be(read: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(DataSourceOptions({"n": "0", "b": "yes", "empty": ""}, "ours"))


def test_an_option_that_nothing_asks_for_is_refused_with_those_that_there_are() -> None:
    options = DataSourceOptions({"url": "u", "maxRow": "7", "checkpointLocation": "/c"}, "ours")
    options.text("url", "")
    options.count("maxRows", 1)
    options.below("kafka.")
    with pytest.raises(
        ConfigError, match=r"^option 'maxrow' is unknown to ours; it knows url, maxRows, kafka\.…$"
    ):
        options.check_all_known()


READERS: list[tuple[Any, dict[str, str]]] = [
    (AmqpDataSource, {"url": "amqp://h", "queue": "q"}),
    (FilesDataSource, {"path": "/p", "journal": "/j"}),
    (KafkaDataSource, {"kafka.bootstrap.servers": "h:1", "subscribe": "t"}),
    (MqttDataSource, {"url": "mqtt://h", "topic": "t", "group": "g"}),
    (NatsDataSource, {"url": "nats://h", "stream": "s", "consumer": "c"}),
    (PolledJsonDataSource, {"url": "http://h"}),
    (PostgresChangesDataSource, {"dsn": "host=h", "table": "t", "slot": "s", "columns": "a"}),
    (PostgresTableDataSource, {"dsn": "host=h", "table": "t", "column": "c"}),
    (RedisDataSource, {"url": "redis://h", "stream": "s", "group": "g"}),
    (SseDataSource, {"url": "http://h"}),
    (TailDataSource, {"path": "/p"}),
    (WebhookDataSource, {"listen": "localhost:0"}),
]


@pytest.mark.parametrize(("kind", "options"), READERS, ids=[kind.name() for kind, _ in READERS])
def test_every_reader_refuses_an_option_that_it_does_not_know(kind: Any, options: dict[str, str]) -> None:
    if issubclass(kind, QueueDataSource):
        with pytest.raises(ConfigError, match=r"^spool: expected a directory"):
            kind(options).schema()
        options = {**options, "spool": "/spool"}
    for unknown in ("maxRowPerTrigger", "startingTimestamp"):
        data_source = kind({**options, unknown: "7"})
        with pytest.raises(
            ConfigError, match=f"option '{unknown.lower()}' is unknown to {kind.name()}; it knows "
        ):
            data_source.schema()
