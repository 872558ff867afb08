"""`KafkaSource` as a Python Data Source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from ftlayer.checks import check_text
from ftlayer.sources.data_source import option_count
from ftlayer.sources.json_stream import with_schema
from ftlayer.sources.kafka.source import MAX_ROWS, KafkaSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


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
