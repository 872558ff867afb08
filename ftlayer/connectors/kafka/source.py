"""`KafkaSource` and `KafkaSink` as a Python Data Source."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter, methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from ftlayer.common.checks import Duration, check_int, check_text, check_texts, duration_ms, known_options
from ftlayer.common.printable import hides_secrets
from ftlayer.connectors.connections import MOST_S, Reconnecting
from ftlayer.connectors.from_json import JSON_OPTIONS, with_schema
from ftlayer.connectors.kafka import client
from ftlayer.connectors.kafka.sink import REMEMBER, KafkaSink
from ftlayer.connectors.logs import LogReader, Offsets
from ftlayer.errors import ConfigError, SourceError
from ftlayer.functions.data_sources import DataSourceOptions, OptionsDataSource, from_arrow_schema
from ftlayer.records import beside

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)


HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])

SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", beside.STAMP),
        pa.field("headers", pa.list_(HEADER)),
    ]
)
"""Names and types are those of Spark's own source of Kafka, with ``includeHeaders``."""

_key, _value, _offset = methodcaller("key"), methodcaller("value"), methodcaller("offset")
_timestamp, _headers = methodcaller("timestamp"), methodcaller("headers")


def to_rows(messages: Sequence[Any], topic: str, partition: int) -> pa.RecordBatch:
    """Return messages of one partition as rows. Headers are null where there are none."""
    count = len(messages)
    columns = [
        pa.array(list(map(_key, messages)), pa.binary()),
        pa.array(list(map(_value, messages)), pa.binary()),
        pa.repeat(pa.scalar(topic), count),
        pa.repeat(pa.scalar(partition, pa.int32()), count),
        pa.array(np.fromiter(map(_offset, messages), np.int64, count)),
        _times(list(map(_timestamp, messages)), topic),
        _header_lists(_headers_of(messages, topic), topic),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _times(stamps: Sequence[tuple[int, int]], topic: str) -> pa.Array:
    pairs = np.fromiter(chain.from_iterable(stamps), np.int64, 2 * len(stamps)).reshape(-1, 2)
    # Kind 0: the broker keeps none, and the time is -1.
    is_known = pairs[:, 0] != 0
    given = pairs[:, 1] if is_known.all() else pa.array(pairs[:, 1], mask=~is_known).to_pylist()
    return beside.times(given, "ms", f"topic {topic}", "a timestamp")


def _headers_of(messages: Sequence[Any], topic: str) -> list[Any]:
    """Return the headers of each message. The client raises for a name that is not UTF-8: null then."""
    try:
        return list(map(_headers, messages))
    except UnicodeDecodeError as error:
        example = error
    found = []
    for message in messages:
        try:
            found.append(_headers(message))
        except UnicodeDecodeError:
            found.append(None)
            beside.note(
                f"topic {topic}", "a header's name is not UTF-8, and the headers are null", 1, example
            )
    return found


def _header_lists(headers: Sequence[list[tuple[str, bytes | None]] | None], topic: str) -> pa.Array:
    if not any(headers):
        return pa.nulls(len(headers), pa.list_(HEADER))
    missing = [each is None for each in headers]
    lists = [each or () for each in headers]
    flat = list(chain.from_iterable(lists))
    offsets = np.zeros(len(lists) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, lists), np.int32, len(lists)), out=offsets[1:])
    keys = beside.texts(list(map(itemgetter(0), flat)), f"topic {topic}", "a header's name")
    values = pa.array(list(map(itemgetter(1), flat)), pa.binary())
    pairs = pa.StructArray.from_arrays([keys, values], fields=list(HEADER))
    return pa.ListArray.from_arrays(pa.array(offsets), pairs, type=pa.list_(HEADER), mask=pa.array(missing))


BATCH_ROWS = 1_000
"""Messages are taken from librdkafka so many at a time: of 10,000 the first ones are out of the caches when they are
looked at, and each takes twice as long. …"""

WAIT_S = 0.05
"""… or those that came in this time."""

MAX_CONSUMERS = 64
"""That are kept open in a process: those that were used last."""


class PartitionConsumer:
    """Reads one partition. Messages behind the end of a range are kept for the next one."""

    def __init__(self, brokers: client.Brokers, topic: str, partition: int, patience_s: float) -> None:
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
        kafka = client.kafka_library()
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
            elif error.code() == client.kafka_library().KafkaError._PARTITION_EOF:
                self._eof = message.offset()
            elif not client.is_away(error):
                raise SourceError(f"{self._place}: {client.reason(error)}")
        return kept


class Consumers:
    """The consumers of a process: each is used by one thread at a time, and kept for the next range."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[client.Brokers, str, int], PartitionConsumer] = {}
        self._process = os.getpid()

    def read(
        self, brokers: client.Brokers, topic: str, partition: int, start: int, end: int, *, patience_s: float
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


Result = TypeVar("Result")

MAX_ROWS = 200_000
DISCOVERY_S = 10.0
"""Topics are asked for new partitions so often."""

EARLIEST, LATEST = -2, -1
"""Offsets of Spark's JSON that are none."""


@known_options
@hides_secrets(lambda source: source._brokers.secrets)
class KafkaSource(LogReader):
    """Reads topics of Kafka: all partitions, also those that are added later, by their offsets.

    Offsets are kept by who reads: in the checkpoint of a query or topology, or in the vertex. So each message is in
    one batch of a query, and barrier mode reflects it exactly once. Messages of transactions are read once they are
    committed. With ``group`` offsets are committed to the broker too, behind completion or checkpoints, for tools that
    show how far a group lags behind; nothing here reads them.

    A message is read as long as the broker has it: one that was removed before (``retention.ms``) fails the source.
    """

    schema: pa.Schema = SCHEMA

    def __init__(
        self,
        servers: str,
        topic: str | Sequence[str],
        *,
        group: str = "",
        start: str | Mapping[str, Mapping[str, int]] = "earliest",
        max_rows: int = MAX_ROWS,
        reconnect_timeout: Duration = "5m",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing is connected to before it is read.

        Args:
            servers: ``"host:port,host:port"``, brokers to begin with; driver and slots connect.
            topic: name of a topic, or several.
            group: consumer group that offsets are committed for; "": none.
            start: where a source begins that was never read: ``"earliest"``, ``"latest"``, or offsets
                ``{topic: {partition: offset}}`` as Spark writes them (-2 for the earliest, -1 for the latest one).
            max_rows: of a batch, or a range of a topology: all partitions together.
            reconnect_timeout: the source fails when brokers were away for this long.
            config: more properties of librdkafka, ``{"security.protocol": "SASL_SSL", …}``.

        Raises `ConfigError` if confluent-kafka is missing, and for an option that will not do.
        """
        check_text(servers, "servers", "brokers like 'host:9092'")
        topics = [topic] if isinstance(topic, str) else list(topic)
        check_texts(topics, "topic", "the name of a topic, or several")
        if not topics:
            raise ConfigError("topic: expected the name of a topic, or several, got none")
        if group != "":
            check_text(group, "group", "the name of a consumer group")
        check_int(max_rows, "max_rows", least=1)
        super().__init__(max_rows)
        self.patience_ms = duration_ms(reconnect_timeout, "reconnect_timeout")
        properties = dict(config or {})
        client.check_properties(properties, "source")
        self._brokers = client.Brokers(servers, group, tuple(sorted(properties.items())))
        self.servers, self.topics, self.group = servers, topics, group
        self._start = _checked_start(start, topics)
        self._admin: Any = None
        self._committer: Any = None
        self._known: list[str] = []
        self._asked = 0.0

    # ------------------------------------------------------------ in the driver

    def starts(self) -> Offsets:
        splits = self._splits()
        wanted = {split: self._start.get(split, self._start.get("", EARLIEST)) for split in splits}
        unknown = [split for split in self._start if split and split not in wanted]
        if unknown:
            raise ConfigError(f"start: there is no partition {unknown[0]} at {self.servers}")
        return self._offsets(wanted)

    def ends(self) -> Offsets:
        return self._offsets(dict.fromkeys(self._splits(), LATEST))

    def first_of(self, splits: Sequence[str]) -> Offsets:
        return self._offsets(dict.fromkeys(splits, EARLIEST))

    def is_missed(self, split: str) -> bool:
        return _place(split)[0] in self.topics

    def committed(self, offsets: Mapping[str, int]) -> None:
        """Commit to the broker. That it cannot is logged: nothing depends on it."""
        if not self.group:
            return
        kafka = client.kafka_library()
        if self._committer is None:
            self._committer = self._brokers.consumer()
        try:
            self._committer.commit(
                offsets=[kafka.TopicPartition(*_place(split), offset) for split, offset in offsets.items()],
                asynchronous=False,
            )
        except kafka.KafkaException as error:
            logger.warning("group %r: offsets cannot be committed: %s", self.group, client.reason(error))

    def stop(self) -> None:
        if self._committer is not None:
            self._committer.close()
        self._admin = self._committer = None

    def _splits(self) -> list[str]:
        now = time.monotonic()
        if not self._known or now - self._asked >= DISCOVERY_S:
            self._known = [split for topic in self.topics for split in self._splits_of(topic)]
            self._asked = now
        return self._known

    def _splits_of(self, topic: str) -> list[str]:
        found = self._asking(
            # Asked for by its name, one that is not there would be made by the brokers.
            f"topic {topic!r}",
            lambda admin: admin.list_topics(timeout=client.CALL_S).topics.get(topic),
        )
        if found is None:
            raise SourceError(f"topic {topic!r} at {self.servers}: there is no such topic; make it before")
        if found.error is not None or not found.partitions:
            said = "it has no partitions" if found.error is None else client.reason(found.error)
            raise SourceError(f"topic {topic!r} at {self.servers}: {said}")
        return [f"{topic}-{partition}" for partition in sorted(found.partitions)]

    def _offsets(self, wanted: Mapping[str, int]) -> Offsets:
        """Return offsets as they are, and what the earliest and latest ones are."""
        kafka = client.kafka_library()
        places: dict[int, list[Any]] = {EARLIEST: [], LATEST: []}
        for split, offset in wanted.items():
            if offset in places:
                places[offset].append(kafka.TopicPartition(*_place(split)))
        found = dict(wanted)
        if not any(places.values()):
            return found

        def ask(admin: Any) -> Offsets:
            futures = client.ask_offsets(self._brokers, admin, places[EARLIEST], places[LATEST])
            told = {
                f"{place.topic}-{place.partition}": future.result(client.CALL_S).offset
                for place, future in futures.items()
            }
            for split, offset in told.items():
                if offset < 0:  # A broker that has just started says -1001 for what it does not know yet.
                    raise TimeoutError(f"the broker does not know the offsets of {split} yet")
            return told

        return found | self._asking(f"topics {', '.join(self.topics)}", ask)

    def _asking(self, what: str, ask: Callable[[Any], Result]) -> Result:
        tries = Reconnecting(f"{what} at {self.servers}", self.patience_ms, self._brokers.secrets)
        while True:
            if self._admin is None:
                self._admin = self._brokers.admin()
            try:
                return ask(self._admin)
            except (client.kafka_library().KafkaException, TimeoutError) as error:
                if not client.is_away(error):
                    raise SourceError(f"{what} at {self.servers}: {client.reason(error)}") from error
                tries.failed(error)
                tries.wait(MOST_S)

    # ------------------------------------------------------------ in the tasks

    def read_split(self, split: str, start: int, end: int) -> Iterator[pa.RecordBatch]:
        return CONSUMERS.read(self._brokers, *_place(split), start, end, patience_s=self.patience_ms / 1_000)

    def __getstate__(self) -> dict[str, Any]:
        # A copy connects by itself.
        return {**self.__dict__, "_admin": None, "_committer": None}


def _place(split: str) -> tuple[str, int]:
    topic, _, partition = split.rpartition("-")
    return topic, int(partition)


def _checked_start(start: object, topics: Sequence[str]) -> dict[str, int]:
    if isinstance(start, str) and start.lstrip().startswith("{"):
        try:
            start = json.loads(start)
        except ValueError as error:
            raise ConfigError(f"start: not JSON: {error}") from error
    if start in ("earliest", "latest"):
        return {"": EARLIEST if start == "earliest" else LATEST}
    if not isinstance(start, Mapping):
        raise ConfigError(
            f"start: expected 'earliest', 'latest' or {{topic: {{partition: offset}}}}, got {start!r}"
        )
    found: dict[str, int] = {}
    for topic, offsets in start.items():
        if topic not in topics or not isinstance(offsets, Mapping):
            raise ConfigError(
                f"start: expected offsets by partition of one of {list(topics)}, got {topic!r}: {offsets!r}"
            )
        for partition, offset in offsets.items():
            if not str(partition).isdecimal() or type(offset) is not int or offset < EARLIEST:
                raise ConfigError(
                    f"start: topic {topic!r}: {partition!r}: {offset!r} is no partition with an offset"
                )
            found[f"{topic}-{partition}"] = offset
    return found


class KafkaDataSource(OptionsDataSource):
    """``spark.dataSource.register(KafkaDataSource)``, then ``format("ftlayer-kafka")`` to read or to write.

    Options of a reader are called as Spark's: ``kafka.bootstrap.servers``, ``subscribe`` (topics with commas between
    them), ``startingOffsets``, ``maxOffsetsPerTrigger``, ``kafka.group.id``, other properties of librdkafka behind
    ``kafka.``; and ``reconnectTimeout``. A writer has the properties, ``topic``, ``staging``, ``name`` and
    ``exactlyOnce`` (true): a batch that Spark runs again adds nothing.
    """

    format = "ftlayer-kafka"

    def schema(self) -> StructType:
        """Return the schema of messages. Raises `ConfigError` for an option that is none."""
        options = self.given()
        schema = _source(options).schema
        options.know(*JSON_OPTIONS)
        options.check_all_known()
        return from_arrow_schema(schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        options = self.given()
        source = _source(options)
        reader = with_schema(source, source.schema, schema, options)
        options.check_all_known()
        return options.note_limit(reader)

    def sink(self, options: DataSourceOptions) -> KafkaSink:
        servers, properties = _brokers(options)
        return options.made(KafkaSink, servers=servers, remember=REMEMBER, config=properties)


def _brokers(options: DataSourceOptions) -> tuple[str, dict[str, str]]:
    properties = options.below("kafka.")
    servers = properties.pop("bootstrap.servers", None)
    check_text(servers, "kafka.bootstrap.servers", "brokers like 'host:9092'")
    return str(servers), properties


def _source(options: DataSourceOptions) -> KafkaSource:
    servers, properties = _brokers(options)
    check_text(options.get("subscribe"), "subscribe", "names of topics with commas between them")
    return options.made(
        KafkaSource,
        {"start": "startingOffsets", "max_rows": "maxOffsetsPerTrigger"},
        servers=servers,
        topic=options.names("subscribe"),
        group=properties.pop("group.id", ""),
        config=properties,
    )
