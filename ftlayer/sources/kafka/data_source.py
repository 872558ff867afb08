"""`KafkaSource` and `KafkaSink` as a Python Data Source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from ftlayer.checks import check_text
from ftlayer.data_source_options import DataSourceOptions
from ftlayer.sinks import KafkaSink
from ftlayer.sources.json_stream import JSON_OPTIONS, with_schema
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
        return "ftlayer-kafka"

    def schema(self) -> StructType:
        """Return the schema of messages. Raises `ConfigError` for an option that is none."""
        from pyspark.sql.pandas.types import from_arrow_schema

        options = DataSourceOptions(self.options, self.name())
        schema = _source(options).schema
        options.know(*JSON_OPTIONS)
        options.check_all_known()
        return from_arrow_schema(schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        options = DataSourceOptions(self.options, self.name())
        source = _source(options)
        reader = with_schema(source, source.schema, schema, options)
        options.check_all_known()
        return reader

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        options = DataSourceOptions(self.options, self.name())
        properties = options.below("kafka.")
        servers = properties.pop("bootstrap.servers", None)
        check_text(servers, "kafka.bootstrap.servers", "brokers like 'host:9092'")
        sink = KafkaSink(
            str(servers),
            options.get("topic"),
            staging=options.get("staging"),
            exactly_once=options.flag("exactlyOnce", default=True),
            name=options.text("name", ""),
            config=properties,
        )
        options.check_all_known()
        return sink


def _source(options: DataSourceOptions) -> KafkaSource:
    properties = options.below("kafka.")
    servers = properties.pop("bootstrap.servers", None)
    check_text(servers, "kafka.bootstrap.servers", "brokers like 'host:9092'")
    check_text(options.get("subscribe"), "subscribe", "names of topics with commas between them")
    return KafkaSource(
        str(servers),
        options.names("subscribe"),
        group=properties.pop("group.id", ""),
        start=options.text("startingOffsets", "earliest"),
        max_rows=options.count("maxOffsetsPerTrigger", MAX_ROWS),
        reconnect_timeout=options.text("reconnectTimeout", "5m"),
        config=properties,
    )
