"""A broker of Kafka."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from servers import Server


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

    def make_topic(self, topic: str, partitions: int, **config: str) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": self.url})
        for made in admin.create_topics([NewTopic(topic, partitions, 1, config=config)]).values():
            made.result(60)

    def produce(
        self,
        topic: str,
        partition: int,
        numbers: Iterable[int],
        *,
        form: Callable[[int], str] = str,
        **more: Any,
    ) -> None:
        """Send numbers as values, and wait until the broker has them."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.url})
        for number in numbers:
            producer.produce(topic, form(number), partition=partition, **more)
        assert producer.flush(60) == 0

    def messages(self, topic: str) -> list[Any]:
        """Return all messages that are committed, partition by partition."""
        from confluent_kafka import Consumer, KafkaError, TopicPartition

        own = {"bootstrap.servers": self.url, "group.id": "reader", "isolation.level": "read_committed"}
        consumer = Consumer({**own, "enable.partition.eof": True, "enable.auto.commit": False})
        try:
            partitions = sorted(consumer.list_topics(topic, 60).topics[topic].partitions)
            found: list[Any] = []
            for partition in partitions:
                consumer.assign([TopicPartition(topic, partition, 0)])
                while True:
                    (message,) = consumer.consume(1, 60)
                    error = message.error()
                    if error is None:
                        found.append(message)
                    elif error.code() == KafkaError._PARTITION_EOF:
                        break
                    else:
                        assert error.retriable(), error
            return found
        finally:
            consumer.close()

    def numbers(self, topic: str) -> list[int]:
        """Return the values of all messages that are committed."""
        return [int(message.value()) for message in self.messages(topic)]


class GivenKafka(KafkaServer):
    """A broker that runs already: it is not restarted."""

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def restart(self, how: signal.Signals = signal.SIGTERM) -> None:
        pytest.skip("FTLAYER_KAFKA names a broker, which the tests do not restart")
