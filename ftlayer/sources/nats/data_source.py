"""`NatsSource` as a Python Data Source."""

from __future__ import annotations

from ftlayer.sources.data_source import QueueDataSource, option_count
from ftlayer.sources.nats.source import MAX_PENDING, NatsSource


class NatsDataSource(QueueDataSource):
    """``spark.dataSource.register(NatsDataSource)``, then ``format("ftlayer-nats")`` to read.

    Options: ``url``, ``stream``, ``consumer``, ``subject``, ``start``, ``maxPending``, ``ackWait``,
    ``reconnectTimeout``, see `NatsSource`; ``spool`` and ``maxRowsPerTrigger`` as of `RedisDataSource`.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "ftlayer-nats"

    def source(self) -> NatsSource:
        """See `QueueDataSource.source`."""
        options = self.options
        return NatsSource(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            options.get("stream"),  # type: ignore[arg-type]
            options.get("consumer"),  # type: ignore[arg-type]
            subject=options.get("subject"),
            start=str(options.get("start", "earliest")),
            max_pending=option_count(options, "maxPending", MAX_PENDING),
            ack_wait=str(options.get("ackWait", "30s")),
            reconnect_timeout=str(options.get("reconnectTimeout", "5m")),
        )
