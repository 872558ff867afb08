"""Producers of confluent-kafka: one with transactions, and one without."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from ftlayer.checkpoint.storage.files import Files
from ftlayer.clients.kafka import (
    CALL_S,
    Brokers,
    group_metadata,
    is_fenced,
    kafka_library,
    read_group,
    reason,
)
from ftlayer.errors import SinkError
from ftlayer.sinks.kafka.commits import Mark
from ftlayer.sinks.kafka.messages import KafkaMessage, batches_of, content_of
from ftlayer.sinks.kafka.records import Produced, produced

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""How long room in librdkafka's queue is waited for at a time."""

ROWS_S = 300.0
"""How long the rows of a transaction, or of a batch, may take to be produced."""

Result = TypeVar("Result")


class KafkaTransactions:
    """`Transactions` of Kafka. After any error it begins anew with the fence: what was under way is aborted by that."""

    def __init__(self, brokers: Brokers, transactional_id: str, files: Files) -> None:
        """``files`` has the rows of messages that are not in the messages themselves."""
        self._brokers, self._id, self._files = brokers, transactional_id, files
        self._producer: Any = None
        self._admin: Any = None

    def fence(self) -> None:
        if self._producer is None:
            producer = self._brokers.producer({"transactional.id": self._id})
            self._doing("a transaction cannot be begun", lambda: producer.init_transactions(CALL_S))
            self._producer = producer

    def read(self, group: str) -> Mark | None:
        if self._admin is None:
            self._admin = self._brokers.admin()
        found = self._doing(f"group {group!r} cannot be read", lambda: read_group(self._admin, group))
        return max((Mark(*each) for each in found), key=lambda mark: mark.offset, default=None)

    def run(self, written: Sequence[KafkaMessage], marks: Mapping[str, Mark]) -> None:
        # Before it begins: an open transaction holds back those who read the topic.
        contents = [content_of(message, self._files) for message in written]
        self._doing("rows cannot be committed", lambda: self._run(contents, marks))

    def close(self) -> None:
        """Disconnect; a transaction that is open ends by the next fence, or by its timeout."""
        self._producer = self._admin = None

    def _run(self, contents: Iterable[bytes], marks: Mapping[str, Mark]) -> None:
        producer, topic = self._producer, ""
        producer.begin_transaction()
        deadline = time.monotonic() + ROWS_S
        for content in contents:
            for batch in batches_of(content):
                topic = topic or batch.column("topic")[0].as_py()
                produce(producer, produced(batch), deadline)
        for group, mark in marks.items():
            # Any partition will do that is there: the group has no members, and reads nothing.
            offset = kafka_library().TopicPartition(topic, 0, mark.offset, metadata=mark.text)
            producer.send_offsets_to_transaction([offset], group_metadata(group), CALL_S)
        producer.commit_transaction(ROWS_S)

    def _doing(self, what: str, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except (kafka_library().KafkaException, BufferError, TimeoutError) as error:
            self.close()
            more = (
                f": another sink with the name of this one (transactional.id {self._id!r}) produces now: give each job "
                "that writes to a topic its own name"
                if is_fenced(error)
                else ""
            )
            raise SinkError(f"{self._brokers.servers}: {what}: {reason(error)}{more}") from error
        except BaseException:
            self.close()
            raise


class PlainProducer:
    """An idempotent producer without transactions: what is tried again by librdkafka is not there twice."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._producer: Any = None
        self._failed: Any = None
        self._process = os.getpid()

    def send(self, rows: pa.RecordBatch) -> None:
        """Queue rows of `SCHEMA`. Raises `SinkError`."""
        if self._producer is None or self._process != os.getpid():
            # Threads and sockets do not survive a fork.
            self._producer, self._process = (
                self._brokers.producer({"delivery.report.only.error": True}),
                os.getpid(),
            )
        self._failed = None
        self._doing(
            lambda: produce(self._producer, produced(rows), time.monotonic() + ROWS_S, self._delivered)
        )

    def flush(self) -> None:
        """Wait until brokers have all rows. Raises `SinkError`: some may be there, and some not."""
        if self._producer is not None:
            self._doing(self._flush)

    def _flush(self) -> None:
        # librdkafka gives each message up by itself (delivery.timeout.ms): it says so by its report.
        while self._producer.flush(POLL_S) and self._failed is None:
            pass
        if self._failed is not None:
            raise kafka_library().KafkaException(self._failed)

    def _delivered(self, error: Any, message: Any) -> None:
        self._failed = error

    def _doing(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            if self._producer is not None:
                self._producer.purge()
            self._producer = None
            if isinstance(error, (kafka_library().KafkaException, BufferError, TimeoutError)):
                raise SinkError(
                    f"{self._brokers.servers}: rows cannot be produced: {reason(error)}"
                ) from error
            raise


def produce(
    producer: Any,
    rows: Iterable[Produced],
    deadline: float,
    delivered: Callable[[Any, Any], None] | None = None,
) -> None:
    """Queue messages; waits while the queue is full. Raises `TimeoutError` at the deadline (monotone time)."""
    send = producer.produce
    for topic, value, key, partition, timestamp, headers in rows:
        while True:
            try:
                send(
                    topic,
                    value,
                    key,
                    partition=partition,
                    on_delivery=delivered,
                    timestamp=timestamp,
                    headers=headers,
                )
                break
            except BufferError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"brokers have not taken the rows in {ROWS_S:g} s") from None
                producer.poll(POLL_S)
