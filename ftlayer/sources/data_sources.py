"""The sources as Python Data Sources, for `DataStreamReader.format` of Structured Streaming."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from ftlayer.checks import MOST, check_text
from ftlayer.errors import ConfigError
from ftlayer.sinks import RedisSink
from ftlayer.sources.amqp import MAX_PENDING, AmqpSource
from ftlayer.sources.kafka import MAX_ROWS as MAX_OFFSETS
from ftlayer.sources.kafka import KafkaSource
from ftlayer.sources.mqtt import MqttSource
from ftlayer.sources.queue_stream import QueueStreamReader
from ftlayer.sources.redis import RedisSource
from ftlayer.topology.queues import Queue

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

MAX_ROWS = 100_000
"""Of a batch, unless ``maxRowsPerTrigger`` says otherwise."""


class QueueDataSource(DataSource):
    """What the Data Sources of all queues have in common: a reader with a spool."""

    def source(self) -> Queue:
        """Return the queue that the options say. Raises `ConfigError`."""
        raise NotImplementedError

    def schema(self) -> StructType:
        """Return the schema that the options say."""
        from pyspark.sql.pandas.types import from_arrow_schema

        return from_arrow_schema(self.source().schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        """Return the reader."""
        spool = self.options.get("spool")
        check_text(spool, "spool", "a directory for this query's messages, a path or URL")
        return QueueStreamReader(
            self.source(), str(spool), _count(self.options, "maxRowsPerTrigger", MAX_ROWS)
        )


class AmqpDataSource(QueueDataSource):
    """``spark.dataSource.register(AmqpDataSource)``, then ``format("ftlayer-amqp")`` to read.

    Options: ``url``, ``queue``, ``maxPending``, ``uniqueIds`` (``true`` or ``false``), ``reconnectTimeout``, see
    `AmqpSource`; ``spool`` and ``maxRowsPerTrigger`` as of `RedisDataSource`.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "ftlayer-amqp"

    def source(self) -> AmqpSource:
        """See `QueueDataSource.source`."""
        options = self.options
        return AmqpSource(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            options.get("queue"),  # type: ignore[arg-type]
            max_pending=_count(options, "maxPending", MAX_PENDING),
            unique_ids=_flag(options, "uniqueIds", default=True),
            reconnect_timeout=str(options.get("reconnectTimeout", "5m")),
        )


class MqttDataSource(QueueDataSource):
    """``spark.dataSource.register(MqttDataSource)``, then ``format("ftlayer-mqtt")`` to read.

    Options: ``url``, ``topic``, ``group``, ``qos``, ``version``, ``sessionExpiry``, ``maxPending``,
    ``reconnectTimeout``, see `MqttSource`; ``spool`` and ``maxRowsPerTrigger`` as of `RedisDataSource`.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "ftlayer-mqtt"

    def source(self) -> MqttSource:
        """See `QueueDataSource.source`."""
        options = self.options
        return MqttSource(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            options.get("topic"),  # type: ignore[arg-type]
            group=options.get("group"),
            qos=_count(options, "qos", 1),
            version=str(options.get("version", "5")),
            session_expiry=str(options.get("sessionExpiry", "24h")),
            max_pending=_count(options, "maxPending", MAX_PENDING),
            reconnect_timeout=str(options.get("reconnectTimeout", "5m")),
        )


class RedisDataSource(QueueDataSource):
    """``spark.dataSource.register(RedisDataSource)``, then ``format("ftlayer-redis")`` to read or to write.

    Options of a reader: ``url``, ``stream``, ``group``, ``fields`` (names with commas between them), ``start``,
    ``reconnectTimeout``, see `RedisSource`; ``spool``, see `ftlayer.sources.spool`: a directory for this query alone, a
    path or any URL of fsspec's, that driver and tasks reach; ``maxRowsPerTrigger`` (100,000).

    Options of a writer: ``url``, ``stream``, ``name``, ``maxLength``, see `RedisSink`. A batch that Spark runs again
    after a restart from the query's checkpoint adds nothing.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "ftlayer-redis"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        """Return the sink."""
        options = self.options
        longest = _count(options, "maxLength", MOST) if "maxLength" in options else None
        return RedisSink(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            options.get("stream"),  # type: ignore[arg-type]
            name=str(options.get("name", "")),
            max_length=longest,
        )

    def source(self) -> RedisSource:
        """See `QueueDataSource.source`."""
        options = self.options
        names = str(options.get("fields", "")).split(",")
        return RedisSource(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            options.get("stream"),  # type: ignore[arg-type]
            options.get("group"),  # type: ignore[arg-type]
            fields=[name.strip() for name in names if name.strip()],
            start=str(options.get("start", "earliest")),
            reconnect_timeout=str(options.get("reconnectTimeout", "5m")),
        )


class KafkaDataSource(DataSource):
    """``spark.dataSource.register(KafkaDataSource)``, then ``spark.readStream.format("ftlayer-kafka")``.

    Options, as Spark's own source calls them: ``kafka.bootstrap.servers``, ``subscribe`` (topics with commas between
    them), ``startingOffsets``, ``maxOffsetsPerTrigger``, ``kafka.group.id``, and other properties of librdkafka behind
    ``kafka.``; ``reconnectTimeout``. See `KafkaSource`.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "ftlayer-kafka"

    def schema(self) -> StructType:
        """Return the schema of messages."""
        from pyspark.sql.pandas.types import from_arrow_schema

        return from_arrow_schema(KafkaSource.schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        """Return the reader."""
        options = self.options
        properties = {
            name.removeprefix("kafka."): value for name, value in options.items() if name.startswith("kafka.")
        }
        servers, topics = properties.pop("bootstrap.servers", None), options.get("subscribe", "")
        check_text(servers, "kafka.bootstrap.servers", "brokers like 'host:9092'")
        check_text(topics, "subscribe", "names of topics with commas between them")
        return KafkaSource(
            str(servers),
            [topic.strip() for topic in topics.split(",") if topic.strip()],
            group=properties.pop("group.id", ""),
            start=str(options.get("startingOffsets", "earliest")),
            max_rows=_count(options, "maxOffsetsPerTrigger", MAX_OFFSETS),
            reconnect_timeout=str(options.get("reconnectTimeout", "5m")),
            config=properties,
        )


def _count(options: Any, option: str, default: int) -> int:
    text = str(options.get(option, default))
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise ConfigError(f"{option}: expected a number from 1 to {MOST}, got {text!r}")
    return int(text)


def _flag(options: Any, option: str, *, default: bool) -> bool:
    text = str(options.get(option, default)).lower()
    if text not in {"true", "false"}:
        raise ConfigError(f"{option}: expected true or false, got {text!r}")
    return text == "true"
