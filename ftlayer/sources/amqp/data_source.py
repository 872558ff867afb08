"""`AmqpSource` and `AmqpSink` as a Python Data Source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftlayer.data_source_options import DataSourceOptions
from ftlayer.sinks.amqp import AmqpSink
from ftlayer.sinks.at_least_once import SendingWriter
from ftlayer.sources.amqp.source import MAX_PENDING, AmqpSource
from ftlayer.sources.data_source import QueueDataSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class AmqpDataSource(QueueDataSource):
    """``spark.dataSource.register(AmqpDataSource)``, then ``format("ftlayer-amqp")`` to read or to write.

    Options of a reader: ``url``, ``queue``, ``maxPending``, ``uniqueIds`` (``true`` or ``false``),
    ``reconnectTimeout``, see `AmqpSource`; ``spool`` and ``maxRowsPerTrigger`` as of `RedisDataSource`.

    Options of a writer: ``url``, ``exchange``, ``routingKey``, ``routingKeyColumn``, ``body``, ``messageId``,
    ``reconnectTimeout``, see `AmqpSink`. A task or batch that Spark runs again publishes its rows again.
    """

    @classmethod
    def name(cls) -> str:
        return "ftlayer-amqp"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        options = DataSourceOptions(self.options, self.name())
        sink = SendingWriter(
            AmqpSink(
                options.get("url"),  # type: ignore[arg-type]  # It is checked there.
                exchange=options.text("exchange", ""),
                routing_key=options.text("routingKey", ""),
                routing_key_column=options.get("routingKeyColumn"),
                body=options.get("body"),
                message_id=options.get("messageId"),
                reconnect_timeout=options.text("reconnectTimeout", "1m"),
            )
        )
        options.check_all_known()
        return sink

    def source(self, options: DataSourceOptions) -> AmqpSource:
        return AmqpSource(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            options.get("queue"),  # type: ignore[arg-type]
            max_pending=options.count("maxPending", MAX_PENDING),
            unique_ids=options.flag("uniqueIds", default=True),
            reconnect_timeout=options.text("reconnectTimeout", "5m"),
        )
