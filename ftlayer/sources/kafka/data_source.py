"""`KafkaSource` and `KafkaSink` as a Python Data Source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from ftlayer.checks import check_text
from ftlayer.sinks import KafkaSink
from ftlayer.sources.data_source import option_count, option_flag
from ftlayer.sources.json_stream import with_schema
from ftlayer.sources.kafka.source import MAX_ROWS, KafkaSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class KafkaDataSource(DataSource):
    """``spark.dataSource.register(KafkaDataSource)``, then ``format("ftlayer-kafka")`` to read or to write.

    Options of a reader, as Spark calls them: ``kafka.bootstrap.servers``, ``subscribe`` (topics with commas
    between them), ``startingOffsets``, ``maxOffsetsPerTrigger``, ``kafka.group.id``, and other properties of librdkafka
    behind ``kafka.``; ``reconnectTimeout``. See `KafkaSource`.

    Options of a writer: ``kafka.bootstrap.servers`` and other properties behind ``kafka.``, ``topic``, ``staging``,
    ``name``, ``exactlyOnce`` (true). See `KafkaSink`. A batch that Spark runs again after a restart from the query's
    checkpoint adds nothing.
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
        options, properties = self.options, self._properties()
        servers, topics = properties.pop("bootstrap.servers", None), options.get("subscribe", "")
        check_text(servers, "kafka.bootstrap.servers", "brokers like 'host:9092'")
        check_text(topics, "subscribe", "names of topics with commas between them")
        reader = KafkaSource(
            str(servers),
            [topic.strip() for topic in topics.split(",") if topic.strip()],
            group=properties.pop("group.id", ""),
            start=str(options.get("startingOffsets", "earliest")),
            max_rows=option_count(options, "maxOffsetsPerTrigger", MAX_ROWS),
            reconnect_timeout=str(options.get("reconnectTimeout", "5m")),
            config=properties,
        )
        return with_schema(reader, reader.schema, schema, options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        """Return the sink."""
        options, properties = self.options, self._properties()
        servers = properties.pop("bootstrap.servers", None)
        check_text(servers, "kafka.bootstrap.servers", "brokers like 'host:9092'")
        return KafkaSink(
            str(servers),
            options.get("topic"),
            staging=options.get("staging"),
            exactly_once=option_flag(options, "exactlyOnce", default=True),
            name=str(options.get("name", "")),
            config=properties,
        )

    def _properties(self) -> dict[str, Any]:
        """Return the options that are librdkafka's."""
        return {
            name.removeprefix("kafka."): value
            for name, value in self.options.items()
            if name.startswith("kafka.")
        }
