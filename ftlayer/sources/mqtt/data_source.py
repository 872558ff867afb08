"""`MqttSource` and `MqttSink` as a Python Data Source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftlayer.data_source_options import DataSourceOptions
from ftlayer.sinks.at_least_once import SendingWriter
from ftlayer.sinks.mqtt import MqttSink
from ftlayer.sources.data_source import QueueDataSource
from ftlayer.sources.mqtt.source import MAX_PENDING, MqttSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class MqttDataSource(QueueDataSource):
    """``spark.dataSource.register(MqttDataSource)``, then ``format("ftlayer-mqtt")`` to read or to write.

    Options of a reader: ``url``, ``topic``, ``group``, ``qos``, ``version``, ``sessionExpiry``, ``maxPending``,
    ``reconnectTimeout``, see `MqttSource`; ``spool`` and ``maxRowsPerTrigger`` as of `RedisDataSource`.

    Options of a writer: ``url``, ``topic``, ``topicColumn``, ``body``, ``retain`` (``true`` or ``false``), ``version``,
    ``reconnectTimeout``, see `MqttSink`. A task or batch that Spark runs again publishes its rows again.
    """

    @classmethod
    def name(cls) -> str:
        return "ftlayer-mqtt"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        options = DataSourceOptions(self.options, self.name())
        sink = SendingWriter(
            MqttSink(
                options.get("url"),  # type: ignore[arg-type]  # It is checked there.
                topic=options.text("topic", ""),
                topic_column=options.get("topicColumn"),
                body=options.get("body"),
                retain=options.flag("retain", default=False),
                version=options.text("version", "5"),
                reconnect_timeout=options.text("reconnectTimeout", "1m"),
            )
        )
        options.check_all_known()
        return sink

    def source(self, options: DataSourceOptions) -> MqttSource:
        return MqttSource(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            options.get("topic"),  # type: ignore[arg-type]
            group=options.get("group"),
            qos=options.count("qos", 1, most=2),
            version=options.text("version", "5"),
            session_expiry=options.text("sessionExpiry", "24h"),
            max_pending=options.count("maxPending", MAX_PENDING),
            reconnect_timeout=options.text("reconnectTimeout", "5m"),
        )
