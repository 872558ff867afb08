"""Options of the source and the sink of MQTT."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.errors import ConfigError
from ftlayer.sinks import MqttSink
from ftlayer.sources import MqttDataSource, MqttSource
from ftlayer.topology.operators import Member

pytest.importorskip("paho.mqtt")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"url": 7}, "url: expected mqtt://"),
        ({"url": "amqp://localhost"}, "url: expected mqtt://"),
        ({"url": "mqtt://localhost:port"}, "url: "),
        ({"topic": ""}, "topic: expected a topic filter"),
        ({"topic": "a/#/b"}, "topic: '#' is the last level, got 'a/#/b'"),
        ({"topic": "a/b+/c"}, "topic: '\\+' and '#' stand for a whole level, got 'b\\+' in 'a/b\\+/c'"),
        ({"group": "a/b"}, "group: expected a name without"),
        ({"qos": 0}, "qos: expected an integer from 1 to 2"),
        ({"version": "4"}, "version: expected '3.1.1' or '5'"),
        ({"max_pending": 65_536}, "max_pending: "),
        ({"session_expiry": "long"}, "session_expiry: "),
        ({"reconnect_timeout": "soon"}, "reconnect_timeout: "),
    ],
)
def test_an_option_that_will_not_do_is_named(given: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"url": "mqtt://localhost", "topic": "t", **given}
    with pytest.raises(ConfigError, match=f"^{message}"):
        MqttSource(**options)


def test_several_subtasks_need_a_group() -> None:
    with pytest.raises(ConfigError, match=r"^group: .* with 2 subtasks"):
        MqttSource("mqtt://localhost", "t").open(Member("o", 0, 2), {}, stored=True)


def test_errors_name_the_server_without_its_password() -> None:
    assert "secret" not in MqttSource("mqtt://user:secret@localhost", "t").place


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"url": "redis://localhost"}, "url: "),
        ({"topic": ""}, "topic: expected either topic or topic_column"),
        ({"topic_column": "key"}, "topic: expected either topic or topic_column"),
        ({"topic": "a/#"}, r"topic: expected one without '\+' and '#'"),
        ({"topic": "", "topic_column": 7}, "topic_column: expected the name of a column"),
        ({"body": 7}, "body: expected the name of a column"),
        ({"retain": "no"}, "retain: expected True or False"),
        ({"version": "4"}, "version: expected '3.1.1' or '5'"),
        ({"reconnect_timeout": "soon"}, "reconnect_timeout: "),
    ],
)
def test_an_option_of_the_sink_that_will_not_do_is_named(given: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"url": "mqtt://localhost", "topic": "t", **given}
    with pytest.raises(ConfigError, match=f"^{message}"):
        MqttSink(**options)


def test_a_data_source_gives_its_options_to_the_sink() -> None:
    given = {"url": "mqtt://localhost", "topicColumn": "k", "retain": "true", "reconnectTimeout": "soon"}
    with pytest.raises(ConfigError, match=r"^reconnect_timeout: .*soon"):
        MqttDataSource(given).streamWriter(None, False)
