"""A broker of Kafka."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable
from typing import Any

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

    def make_topic(self, topic: str, partitions: int) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": self.url})
        for made in admin.create_topics([NewTopic(topic, partitions, 1)]).values():
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
