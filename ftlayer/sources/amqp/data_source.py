"""`AmqpSource` as a Python Data Source."""

from __future__ import annotations

from ftlayer.sources.amqp.source import MAX_PENDING, AmqpSource
from ftlayer.sources.data_source import QueueDataSource, option_count, option_flag


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
            max_pending=option_count(options, "maxPending", MAX_PENDING),
            unique_ids=option_flag(options, "uniqueIds", default=True),
            reconnect_timeout=str(options.get("reconnectTimeout", "5m")),
        )
