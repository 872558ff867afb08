"""What is particular to MQTT: acknowledgements that wait, sessions of subtasks that are gone, and the sink."""

from __future__ import annotations

import os
import pickle
import threading
from itertools import count
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.common.failures import PermanentFailure, RowsRejected
from ftlayer.errors import SinkError
from ftlayer.sinks import MqttSink
from ftlayer.sources import MqttSource
from ftlayer.topology.operators import Fetched, Member, QueueReader

COUNT = count()


@pytest.fixture(params=[("5", 1), ("5", 2), ("3.1.1", 1), ("3.1.1", 2)], ids=lambda it: f"{it[0]}-QoS{it[1]}")
def source(request: pytest.FixtureRequest, mosquitto: Any) -> MqttSource:
    version, qos = request.param
    topic = f"shared-{os.getpid()}-{next(COUNT)}"
    return MqttSource(mosquitto.url, topic, group="g", qos=qos, version=version)


def opened(source: MqttSource, subtask: int = 0, parallelism: int = 1) -> QueueReader:
    """A reader that has subscribed."""
    reader = source.open(Member(source.topic, subtask, parallelism), {}, stored=True)
    assert reader.fetch(1, 0.01) is None
    return reader


def numbers_of(found: list[Fetched]) -> list[int]:
    return [int(value) for each in found for value in each.rows.column("value").to_pylist()]


def fetch_numbers(reader: QueueReader, number: int, rows: int = 5) -> list[Fetched]:
    found: list[Fetched] = []
    for _ in range(1_000):
        if (fetched := reader.fetch(rows, 0.1)) is not None:
            found.append(fetched)
        if len(numbers_of(found)) >= number:
            return found
    raise AssertionError(f"{number} messages were not fetched")


def test_what_was_not_acknowledged_comes_again_to_the_next_reader(mosquitto: Any, source: MqttSource) -> None:
    first = opened(source)
    mosquitto.publish(source.topic, range(20), source.qos)
    found = fetch_numbers(first, 12, rows=4)
    first.acknowledge([found[0].receipt])
    acknowledged = len(numbers_of(found[:1]))
    first.close()
    second = source.open(Member(source.topic, 0, 1), {0: found[-1].position}, stored=True)
    # Those that were acknowledged may come again too, if their acknowledgement was lost with the connection.
    again: set[int] = set()
    while not again >= set(range(acknowledged, 20)):
        again |= set(numbers_of(fetch_numbers(second, 1)))
    second.close()


def test_sessions_of_subtasks_that_are_gone_are_read_to_their_end_and_ended(
    mosquitto: Any, source: MqttSource
) -> None:
    readers = [opened(source, subtask, 3) for subtask in range(3)]
    mosquitto.publish(source.topic, range(30), source.qos)
    for reader in readers:
        reader.close()
    alone = source.open(Member(source.topic, 0, 1), {}, stored=True)
    found = fetch_numbers(alone, 30)
    assert sorted(numbers_of(found)) == list(range(30))
    assert {each.of for each in found} == {0, 1, 2}
    alone.acknowledge([each.receipt for each in found])
    while alone._gone:  # type: ignore[attr-defined]
        assert alone.fetch(1, 0.01) is None
    mosquitto.publish(source.topic, range(30, 40), source.qos)
    assert sorted(numbers_of(fetch_numbers(alone, 10))) == list(range(30, 40)), "they have no share any more"
    alone.close()


def test_the_server_is_restarted_and_what_was_acknowledged_meanwhile_does_not_come_again(
    mosquitto: Any, source: MqttSource
) -> None:
    # It forgets shared subscriptions.
    plain = MqttSource(mosquitto.url, source.topic, qos=source.qos, version=source.version)
    reader = opened(plain)
    mosquitto.publish(plain.topic, range(10), plain.qos)
    found = fetch_numbers(reader, 5, rows=5)
    before = numbers_of(found)
    mosquitto.restart()
    mosquitto.publish(plain.topic, range(10, 20), plain.qos)
    reader.acknowledge([each.receipt for each in found])
    assert before + numbers_of(fetch_numbers(reader, 20 - len(before))) == list(range(20))
    reader.close()


@pytest.mark.parametrize(
    "source", [("5", 2), ("3.1.1", 1)], ids=lambda it: f"{it[0]}-QoS{it[1]}", indirect=True
)
def test_more_messages_than_can_be_read_in_the_time_of_an_answer(
    mosquitto: Any, source: MqttSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come before the server's answers to a connection that is there again, and of one that is to be ended."""
    for subtask in range(2):
        opened(source, subtask, 2).close()
    mosquitto.publish(source.topic, range(2_000), source.qos)
    monkeypatch.setattr("ftlayer.connectors.mqtt.TIMEOUT_S", 0.05)
    alone = source.open(Member(source.topic, 0, 1), {}, stored=True)
    assert sorted(numbers_of(fetch_numbers(alone, 2_000, rows=500))) == list(range(2_000))
    alone.close()


def rows_of(topics: list[str | None], first: int = 0) -> pa.RecordBatch:
    return pa.record_batch({"topic": topics, "body": [str(first + row) for row in range(len(topics))]})


@pytest.fixture(params=["5", "3.1.1"])
def sink(request: pytest.FixtureRequest, mosquitto: Any) -> MqttSink:
    return MqttSink(mosquitto.url, topic_column="topic", body="body", version=request.param)


def subscribed(mosquitto: Any) -> QueueReader:
    """A reader of a topic, the same over restarts of the server."""
    return opened(MqttSource(mosquitto.url, f"sunk-{os.getpid()}-{next(COUNT)}"))


def topic_of(reader: Any) -> str:
    topic: str = reader._source.topic
    return topic


def test_rows_are_messages(mosquitto: Any, sink: MqttSink) -> None:
    reader = subscribed(mosquitto)
    sink = pickle.loads(pickle.dumps(sink))
    sink(rows_of([topic_of(reader)] * 1_200))
    sink(rows_of([topic_of(reader)] * 2, 1_200))
    assert numbers_of(fetch_numbers(reader, 1_202, rows=500)) == list(range(1_202))
    MqttSink(mosquitto.url, topic=topic_of(reader), retain=True)(pa.record_batch({"a": [1], "b": ["x"]}))
    while (found := reader.fetch(1, 0.1)) is None:
        pass
    assert found.rows.column("value").to_pylist() == [b'{"a": 1, "b": "x"}']
    reader.close()


def test_rows_that_cannot_be_sent_fail_and_no_other_does(mosquitto: Any, sink: MqttSink) -> None:
    reader = subscribed(mosquitto)
    topic = topic_of(reader)
    with pytest.raises(RowsRejected) as raised:
        sink(rows_of([topic, "a/#", None, topic, "", topic]))
    assert set(raised.value.errors) == {1, 2, 4}
    assert all(isinstance(error, PermanentFailure) for error in raised.value.errors.values())
    assert numbers_of(fetch_numbers(reader, 3)) == [0, 3, 5]
    reader.close()


def test_the_server_is_restarted_while_rows_are_published(
    mosquitto: Any, sink: MqttSink, wait_until: Any
) -> None:
    reader = subscribed(mosquitto)
    published: list[int] = []

    def publish() -> None:
        for first in range(0, 4_000, 100):
            sink(rows_of([topic_of(reader)] * 100, first))
            published.append(first)

    publishing = threading.Thread(target=publish)
    publishing.start()
    wait_until(lambda: len(published) >= 5, "messages on their way")
    mosquitto.restart()
    publishing.join(600)
    assert len(published) == 40
    found: set[int] = set()
    for _ in range(1_000):
        if (fetched := reader.fetch(1_000, 0.1)) is not None:
            found.update(numbers_of([fetched]))
        if len(found) == 4_000:
            break
    assert found == set(range(4_000))
    reader.close()


def test_a_server_that_stays_away_fails_the_rows() -> None:
    sink = MqttSink("mqtt://127.0.0.1:1", topic="a", reconnect_timeout="50ms")
    with pytest.raises(RowsRejected) as raised:
        sink(rows_of(["a"] * 3))
    assert list(raised.value.errors) == [0, 1, 2]
    assert isinstance(raised.value.errors[2], SinkError)
    assert "reconnect_timeout" in str(raised.value.errors[2])
