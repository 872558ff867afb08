"""A topic of Kafka, and confluent-kafka, beside `noida-db`, a broker in a wheel."""

from __future__ import annotations

import importlib.util
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.connectors.broker import BODY, FETCHED, Served, free_port, is_listening
from bench.jobs import wait_until


class KafkaBroker:
    """`Broker` of a topic with one partition. A new one is made each time."""

    def __init__(self, port: int) -> None:
        self._servers = f"127.0.0.1:{port}"
        self._topics = 0
        wait_until(lambda: is_listening(port))

    def fill(self, messages: int) -> None:
        from confluent_kafka import Producer
        from confluent_kafka.admin import AdminClient, NewTopic

        self._topics += 1
        admin = AdminClient({"bootstrap.servers": self._servers})
        for made in admin.create_topics([NewTopic(self._topic, 1, 1)]).values():
            made.result(60)
        producer = Producer({"bootstrap.servers": self._servers})
        for number in range(messages):
            producer.produce(self._topic, BODY, partition=0)
            if number % FETCHED == FETCHED - 1:
                producer.poll(0)
                if number % 50_000 == 49_999:
                    producer.flush()
        producer.flush()

    @property
    def _topic(self) -> str:
        return f"messages-{self._topics}"

    def bare(self, messages: int) -> float:
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer(
            {"bootstrap.servers": self._servers, "group.id": "bare", "enable.auto.commit": False}
        )
        consumer.assign([TopicPartition(self._topic, 0, 0)])
        # Ours is measured from its first records on, too.
        found = consumer.consume(1)
        begun = time.monotonic()
        seen = size = 0
        while seen < messages:
            found = found or consumer.consume(FETCHED, 1.0)
            for message in found:
                size += len(message.value()) + message.offset() + message.timestamp()[1]
                size += len(message.headers() or ())
            consumer.commit(message=found[-1], asynchronous=False)
            seen += len(found)
            found = []
        assert size
        taken = time.monotonic() - begun
        consumer.close()
        return taken

    def source(self) -> Any:
        from ftlayer.sources import KafkaSource

        return KafkaSource(self._servers, self._topic, group="ours")


@contextmanager
def _run(root: Path) -> Iterator[KafkaBroker]:
    """Run the binary itself: its script would leave it behind."""
    found = importlib.util.find_spec("noida_db")
    assert found is not None
    assert found.origin is not None
    port, binary = free_port(), str(Path(found.origin).with_name("noida-db"))
    server = subprocess.Popen(
        [*(binary, "start", "--only", "kafka", "--data-dir", str(root)), "--kafka-port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield KafkaBroker(port)
    finally:
        server.terminate()
        server.wait()


KAFKA = Served("noida-db", _run, at_least=0.5)
