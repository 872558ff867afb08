"""Reading ranges of a partition of Kafka, one after the other, by a consumer that goes on where it was."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from ftlayer.clients.kafka import Brokers, is_away, kafka_library, reason
from ftlayer.errors import SourceError
from ftlayer.sources.kafka.rows import to_rows

BATCH_ROWS = 1_000
"""Messages are taken from librdkafka so many at a time: of 10,000 the first ones are out of the caches when they are
looked at, and each takes twice as long. …"""

WAIT_S = 0.05
"""… or those that came in this time."""

MAX_CONSUMERS = 64
"""That are kept open in a process: those that were used last."""


class PartitionConsumer:
    """Reads one partition. Messages behind the end of a range are kept for the next one."""

    def __init__(self, brokers: Brokers, topic: str, partition: int, patience_s: float) -> None:
        """``patience_s``: how long messages that are there may not come."""
        self._servers = brokers.servers
        self._patience_s = patience_s
        self._topic, self._partition = topic, partition
        self._consumer = brokers.consumer()
        self._next: int | None = None
        self._ahead: list[Any] = []
        self._eof = self._last = -1

    def read(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield the messages [start, end). Raises `SourceError` if they are not there, or none comes for too long."""
        kafka = kafka_library()
        if self._next != start:
            self._ahead, self._eof = [], -1
            self._consumer.assign([kafka.TopicPartition(self._topic, self._partition, start)])
        # Set when all is read: who stops in the middle begins anew.
        self._next, self._last = None, start - 1
        quiet_since = time.monotonic()
        while not self._is_read(end):
            messages = self._take(end)
            if messages:
                quiet_since = time.monotonic()
                yield to_rows(messages, self._topic, self._partition)
            elif time.monotonic() - quiet_since > self._patience_s:
                raise SourceError(
                    f"{self._place}: nothing came for {self._patience_s:g} s, longer than "
                    f"reconnect_timeout, though there are messages up to offset {end}"
                )
        self._next = end

    def close(self) -> None:
        self._consumer.close()

    @property
    def _place(self) -> str:
        return f"partition {self._partition} of topic {self._topic!r} at {self._servers}"

    def _is_read(self, end: int) -> bool:
        """Whether nothing comes any more below ``end``: what is behind it has come, or the end of the partition.

        The last offsets of a range may be marks of transactions, which never come.
        """
        return (
            self._eof >= end or bool(self._ahead and self._ahead[0].offset() >= end) or self._last == end - 1
        )

    def _take(self, end: int) -> list[Any]:
        """Return messages below ``end`` that there are."""
        messages = self._ahead or self._consume(min(BATCH_ROWS, end - 1 - self._last))
        self._ahead = []
        if messages and messages[-1].offset() >= end:
            first = next(place for place, message in enumerate(messages) if message.offset() >= end)
            messages, self._ahead = messages[:first], messages[first:]
        if messages:
            self._last = messages[-1].offset()
        return messages

    def _consume(self, most: int) -> list[Any]:
        found = self._consumer.consume(most, WAIT_S)
        if not any(message.error() for message in found):
            return found  # type: ignore[no-any-return]
        kept = []
        for message in found:
            error = message.error()
            if error is None:
                kept.append(message)
            elif error.code() == kafka_library().KafkaError._PARTITION_EOF:
                self._eof = message.offset()
            elif not is_away(error):
                raise SourceError(f"{self._place}: {reason(error)}")
        return kept


class Consumers:
    """The consumers of a process: each is used by one thread at a time, and kept for the next range."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[Brokers, str, int], PartitionConsumer] = {}
        self._process = os.getpid()

    def read(
        self, brokers: Brokers, topic: str, partition: int, start: int, end: int, *, patience_s: float
    ) -> Iterator[pa.RecordBatch]:
        key = (brokers, topic, partition)
        with self._lock:
            if self._process != os.getpid():
                # Threads and sockets do not survive a fork.
                self._idle, self._process = {}, os.getpid()
            consumer = self._idle.pop(key, None)
        if consumer is None:
            consumer = PartitionConsumer(brokers, topic, partition, patience_s)
        try:
            yield from consumer.read(start, end)
        except BaseException:
            consumer.close()
            raise
        with self._lock:
            replaced = self._idle.pop(key, None)
            self._idle[key] = consumer
            late = [self._idle.pop(next(iter(self._idle)))] if len(self._idle) > MAX_CONSUMERS else []
        for each in (replaced, *late):
            if each is not None:
                each.close()


CONSUMERS = Consumers()
