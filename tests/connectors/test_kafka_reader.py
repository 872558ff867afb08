"""Topics of Kafka, read as Spark and topologies read them. Against a broker, without Spark."""

from __future__ import annotations

import datetime
import os
import pickle
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import count
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.connectors.kafka.source import SCHEMA
from ftlayer.errors import ConfigError, SourceChangedError, SourceError
from ftlayer.functions.data_sources import ReadAllAvailable, ReadMaxRows
from ftlayer.sources import KafkaSource

COUNT = count()


@pytest.fixture
def topic(kafka_server: Any) -> str:
    name = f"numbers-{os.getpid()}-{next(COUNT)}"
    kafka_server.make_topic(name, 2)
    return name


@pytest.fixture
def source(kafka_server: Any, topic: str) -> Iterator[KafkaSource]:
    source = KafkaSource(kafka_server.url, topic, group=f"{topic}-group")
    yield source
    source.stop()


def rows_of(source: KafkaSource, start: Any, end: Any) -> list[pa.RecordBatch]:
    """Read a range as tasks do: with copies of the source."""
    copy = pickle.loads(pickle.dumps(source))
    return [batch for part in copy.partitions(start, end) for batch in copy.read(part)]


def numbers_of(batches: list[pa.RecordBatch]) -> list[int]:
    return [int(value) for batch in batches for value in batch.column("value").to_pylist()]


def test_messages_have_all_that_kafka_says_of_them(
    kafka_server: Any, source: KafkaSource, topic: str
) -> None:
    at = datetime.datetime.now(datetime.UTC).replace(microsecond=7_000)
    stamp = int(at.timestamp() * 1_000)
    kafka_server.produce(topic, 1, [7], key="k", timestamp=stamp, headers=[("a", b"1"), ("b", None)])
    kafka_server.produce(topic, 1, [8], timestamp=stamp)
    (batch,) = rows_of(
        source, source.initialOffset(), source.latestOffset(source.starts(), ReadAllAvailable())
    )
    assert batch.schema.equals(SCHEMA)
    batch.validate(full=True)
    common = {"topic": topic, "partition": 1, "timestamp": at}
    headers = [{"key": "a", "value": b"1"}, {"key": "b", "value": None}]
    assert batch.to_pylist() == [
        {"key": b"k", "value": b"7", "offset": 0, "headers": headers, **common},
        {"key": None, "value": b"8", "offset": 1, "headers": None, **common},
    ]


def test_ranges_follow_each_other_and_are_the_same_again(
    kafka_server: Any, source: KafkaSource, topic: str
) -> None:
    kafka_server.produce(topic, 0, range(100))
    kafka_server.produce(topic, 1, range(100, 200))
    start, ranges = source.initialOffset(), []
    while (end := source.latestOffset(start, ReadMaxRows(30))) != start:
        ranges.append((start, end))
        start = end
    found = [numbers_of(rows_of(source, *each)) for each in ranges]
    assert sorted(number for numbers in found for number in numbers) == list(range(200))
    assert all(len(numbers) <= 31 for numbers in found)
    # Any of them, in any order.
    for place in (3, 0, 5, 1, 2):
        assert numbers_of(rows_of(source, *ranges[place])) == found[place]


def test_one_who_stops_in_the_middle_begins_anew(kafka_server: Any, source: KafkaSource, topic: str) -> None:
    kafka_server.produce(topic, 0, range(10))
    (part,) = source.partitions(source.starts(), source.ends())
    stopped = source.read(part)
    next(stopped)
    stopped.close()
    assert numbers_of(list(source.read(part))) == list(range(10))


def test_transactions_are_read_once_they_are_committed(
    kafka_server: Any, source: KafkaSource, topic: str
) -> None:
    """The marks of transactions take offsets: ranges end with and between them."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": kafka_server.url, "transactional.id": topic})
    producer.init_transactions(60)
    start = source.initialOffset()
    # The aborted one is the last: this broker hides what its producer commits behind it from one who reads on there.
    for number in range(4):
        producer.begin_transaction()
        producer.produce(topic, str(number), partition=0)
        producer.flush(60)
        assert source.ends()[f"{topic}-0"] == 2 * number, "it is open"
        (producer.commit_transaction if number < 3 else producer.abort_transaction)(60)
        end = source.latestOffset(start, ReadAllAvailable())
        assert numbers_of(rows_of(source, start, end)) == ([number] if number < 3 else [])
        start = end
    assert start == {f"{topic}-0": 8, f"{topic}-1": 0}
    assert numbers_of(rows_of(source, source.starts(), start)) == [0, 1, 2]


def test_the_broker_is_restarted(kafka_server: Any, source: KafkaSource, topic: str) -> None:
    kafka_server.produce(topic, 0, range(50))
    start = source.initialOffset()
    end = source.latestOffset(start, ReadAllAvailable())
    assert numbers_of(rows_of(source, start, end)) == list(range(50))
    # This broker has not saved yet what it has just answered: SIGKILL would lose the topic.
    kafka_server.restart(signal.SIGTERM)
    kafka_server.produce(topic, 0, range(50, 100))
    last = source.latestOffset(end, ReadAllAvailable())
    assert numbers_of(rows_of(source, end, last)) == list(range(50, 100))
    source.commit(last)


def test_partitions_that_are_added_are_read(
    kafka_server: Any, source: KafkaSource, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from confluent_kafka.admin import AdminClient, NewPartitions

    monkeypatch.setattr("ftlayer.connectors.kafka.source.DISCOVERY_S", 0.0)
    kafka_server.produce(topic, 0, [0])
    start = source.initialOffset()
    admin = AdminClient({"bootstrap.servers": kafka_server.url})
    for made in admin.create_partitions([NewPartitions(topic, 3)]).values():
        made.result(60)
    kafka_server.produce(topic, 2, [1, 2])
    end = source.latestOffset(start, ReadAllAvailable())
    assert end == {f"{topic}-0": 1, f"{topic}-1": 0, f"{topic}-2": 2}
    assert sorted(numbers_of(rows_of(source, start, end))) == [0, 1, 2]


def test_a_partition_that_is_shorter_than_its_place_fails_the_source(
    kafka_server: Any, source: KafkaSource, topic: str
) -> None:
    kafka_server.produce(topic, 0, [0])
    with pytest.raises(
        SourceChangedError, match=f"{topic}-0 ends at offset 1, and the source is at offset 901"
    ):
        rows_of(source, {f"{topic}-0": 900}, {f"{topic}-0": 901})


def test_an_end_that_the_broker_does_not_know_yet_is_asked_for_again(
    source: KafkaSource, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just after its start a broker may answer -1001: that is no partition which has become shorter."""
    answers = iter([(4, -1001), (4, 2)])

    def answered(_brokers: Any, _admin: Any, _earliest: Any, latest: Any) -> dict[Any, Future[Any]]:
        futures: dict[Any, Future[Any]] = {place: Future() for place in latest}
        for future, offset in zip(futures.values(), next(answers), strict=True):
            future.set_result(SimpleNamespace(offset=offset))
        return futures

    monkeypatch.setattr("ftlayer.connectors.kafka.client.ask_offsets", answered)
    start = {f"{topic}-0": 4, f"{topic}-1": 1}
    assert source.latestOffset(start, ReadAllAvailable()) == start | {f"{topic}-1": 2}
    assert next(answers, None) is None


def test_what_is_durable_is_committed_for_the_group(
    kafka_server: Any, source: KafkaSource, topic: str
) -> None:
    from confluent_kafka import Consumer, TopicPartition

    kafka_server.produce(topic, 0, range(5))
    source.commit({f"{topic}-0": 3, f"{topic}-1": 0})
    consumer = Consumer({"bootstrap.servers": kafka_server.url, "group.id": f"{topic}-group"})
    found = consumer.committed([TopicPartition(topic, 0), TopicPartition(topic, 1)], timeout=60)
    assert [each.offset for each in found] == [3, 0]
    consumer.close()


def test_a_source_begins_where_it_is_told_to(kafka_server: Any, topic: str) -> None:
    kafka_server.produce(topic, 0, range(5))

    def start(given: Any) -> list[int]:
        found = KafkaSource(kafka_server.url, topic, start=given).initialOffset()
        return [found[f"{topic}-{partition}"] for partition in range(2)]

    assert start("earliest") == [0, 0]
    assert start("latest") == [5, 0]
    assert start(f'{{"{topic}": {{"0": 3, "1": -1}}}}') == [3, 0]
    assert start({topic: {"0": -1}}) == [5, 0]
    with pytest.raises(ConfigError, match=f"start: there is no partition {topic}-7"):
        start({topic: {"7": 0}})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"servers": ""}, "servers: expected brokers"),
        ({"topic": []}, "topic: expected the name of a topic"),
        ({"topic": ["t", 7]}, "topic: expected the name of a topic"),
        ({"group": 7}, "group: "),
        ({"start": "now"}, "start: expected 'earliest', 'latest'"),
        ({"start": "{"}, "start: not JSON"),
        ({"start": {"u": {"0": 1}}}, "start: expected offsets by partition of one of"),
        ({"start": {"t": {"0": -3}}}, "is no partition with an offset"),
        ({"max_rows": 0}, "max_rows: "),
        ({"reconnect_timeout": "soon"}, "reconnect_timeout"),
        ({"config": {"security.protocol": "none"}}, "config: .*security.protocol"),
        ({"config": {"no.such": "1"}}, "config: .*no.such"),
        ({"config": {"auto.offset.reset": "latest"}}, "config: 'auto.offset.reset' is set by the source"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, Any], said: str) -> None:
    pytest.importorskip("confluent_kafka")
    with pytest.raises(ConfigError, match=said):
        KafkaSource(**{"servers": "localhost:9092", "topic": "t", **given})


def test_brokers_that_stay_away_are_given_up(
    topic: str, kafka_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka_server.produce(topic, 0, range(5))
    away = KafkaSource("127.0.0.1:1", topic, reconnect_timeout="100ms")
    with pytest.raises(SourceError, match="longer than reconnect_timeout"):
        rows_of(away, {f"{topic}-0": 0}, {f"{topic}-0": 5})


def test_a_topic_that_is_not_there_is_said_and_not_made(kafka_server: Any) -> None:
    from confluent_kafka.admin import AdminClient

    name = f"missing-{os.getpid()}"
    with pytest.raises(SourceError, match="there is no such topic; make it before"):
        KafkaSource(kafka_server.url, name).initialOffset()
    topics = AdminClient({"bootstrap.servers": kafka_server.url}).list_topics(timeout=60).topics
    assert name not in topics
