"""`MqttSource` and `MqttSink` as a Python Data Source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftlayer.sinks.at_least_once import SendingWriter
from ftlayer.sinks.mqtt import MqttSink
from ftlayer.sources.data_source import QueueDataSource, option_count, option_flag
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
        """Return the name for ``format``."""
        return "ftlayer-mqtt"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        """Return the sink."""
        options = self.options
        return SendingWriter(
            MqttSink(
                options.get("url"),  # type: ignore[arg-type]  # It is checked there.
                topic=str(options.get("topic", "")),
                topic_column=options.get("topicColumn"),
                body=options.get("body"),
                retain=option_flag(options, "retain", default=False),
                version=str(options.get("version", "5")),
                reconnect_timeout=str(options.get("reconnectTimeout", "1m")),
            )
        )

    def source(self) -> MqttSource:
        """See `QueueDataSource.source`."""
        options = self.options
        return MqttSource(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            options.get("topic"),  # type: ignore[arg-type]
            group=options.get("group"),
            qos=option_count(options, "qos", 1),
            version=str(options.get("version", "5")),
            session_expiry=str(options.get("sessionExpiry", "24h")),
            max_pending=option_count(options, "maxPending", MAX_PENDING),
            reconnect_timeout=str(options.get("reconnectTimeout", "5m")),
        )
