"""What is particular to MQTT: acknowledgements that wait, and sessions of subtasks that are gone."""

from __future__ import annotations

import os
from itertools import count
from typing import Any

import pytest

from ftlayer.sources import MqttSource
from ftlayer.topology.queues import Fetched, Member, QueueReader

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
    again = numbers_of(fetch_numbers(second, 20 - acknowledged))
    assert set(again) >= set(range(acknowledged, 20))
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
