"""Options of the source and the sink of AMQP."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.errors import ConfigError
from ftlayer.sinks import AmqpSink
from ftlayer.sources import AmqpDataSource, AmqpSource

pytest.importorskip("pika")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"url": 7}, "url: expected amqp://"),
        ({"url": "redis://localhost"}, "url: expected amqp://"),
        ({"url": "amqp://localhost:port"}, "url: "),
        ({"queue": ""}, "queue: expected the name of a queue"),
        ({"max_pending": 0}, "max_pending: expected an integer from 1 to 65535"),
        ({"max_pending": 65_536}, "max_pending: "),
        ({"unique_ids": "no"}, "unique_ids: expected True or False"),
        ({"reconnect_timeout": "soon"}, "reconnect_timeout: "),
    ],
)
def test_an_option_that_will_not_do_is_named(given: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"url": "amqp://localhost", "queue": "q", **given}
    with pytest.raises(ConfigError, match=f"^{message}"):
        AmqpSource(**options)


def test_errors_name_the_server_without_its_password() -> None:
    assert "secret" not in AmqpSource("amqp://user:secret@localhost", "q").place


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"url": "redis://localhost"}, "url: expected amqp://"),
        ({"routing_key": ""}, "routing_key: expected the name of a queue"),
        ({"routing_key": "x" * 256}, "routing_key: expected 255 bytes"),
        ({"routing_key_column": "key"}, "routing_key: expected it or routing_key_column"),
        ({"exchange": 7}, "exchange: expected the name of an exchange"),
        ({"routing_key": "", "routing_key_column": 7}, "routing_key_column: expected the name of a column"),
        ({"body": 7}, "body: expected the name of a column"),
        ({"message_id": ""}, "message_id: expected the name of a column"),
        ({"reconnect_timeout": "soon"}, "reconnect_timeout: "),
    ],
)
def test_an_option_of_the_sink_that_will_not_do_is_named(given: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"url": "amqp://localhost", "routing_key": "q", **given}
    with pytest.raises(ConfigError, match=f"^{message}"):
        AmqpSink(**options)


def test_a_data_source_gives_its_options_to_the_sink() -> None:
    given = {"url": "amqp://localhost", "exchange": "e", "routingKeyColumn": "k", "reconnectTimeout": "soon"}
    with pytest.raises(ConfigError, match=r"^reconnect_timeout: .*soon"):
        AmqpDataSource(given).streamWriter(None, False)
