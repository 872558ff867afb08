"""`AmqpSource` and `AmqpSink` as a Python Data Source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftlayer.sinks.amqp import AmqpSink
from ftlayer.sinks.at_least_once import SendingWriter
from ftlayer.sources.amqp.source import MAX_PENDING, AmqpSource
from ftlayer.sources.data_source import QueueDataSource, option_count, option_flag

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
        """Return the name for ``format``."""
        return "ftlayer-amqp"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        """Return the sink."""
        options = self.options
        return SendingWriter(
            AmqpSink(
                options.get("url"),  # type: ignore[arg-type]  # It is checked there.
                exchange=str(options.get("exchange", "")),
                routing_key=str(options.get("routingKey", "")),
                routing_key_column=options.get("routingKeyColumn"),
                body=options.get("body"),
                message_id=options.get("messageId"),
                reconnect_timeout=str(options.get("reconnectTimeout", "1m")),
            )
        )

    def source(self) -> AmqpSource:
        """See `QueueDataSource.source`."""
        options = self.options
        return AmqpSource(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            options.get("queue"),  # type: ignore[arg-type]
            max_pending=option_count(options, "maxPending", MAX_PENDING),
            unique_ids=option_flag(options, "uniqueIds", default=True),
            reconnect_timeout=str(options.get("reconnectTimeout", "5m")),
        )
