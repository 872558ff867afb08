"""`NatsSource` and `NatsSink` as a Python Data Source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftlayer.data_sources import DataSourceOptions
from ftlayer.sinks import NatsSink
from ftlayer.sources.data_source import QueueDataSource
from ftlayer.sources.nats.source import MAX_PENDING, NatsSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class NatsDataSource(QueueDataSource):
    """``spark.dataSource.register(NatsDataSource)``, then ``format("ftlayer-nats")`` to read or to write.

    Options of a reader: ``url``, ``stream``, ``consumer``, ``subject``, ``credentials``, ``start``, ``maxPending``,
    ``ackWait``, ``reconnectTimeout``, see `NatsSource`; ``spool`` and ``maxRowsPerTrigger`` as of `RedisDataSource`.

    Options of a writer: ``url``, ``stream``, ``subject``, ``value``, ``headers``, ``credentials``, ``idColumn``,
    ``name``, ``remember``, see `NatsSink`. A batch that Spark runs again after a restart from the query's checkpoint
    adds nothing.
    """

    @classmethod
    def name(cls) -> str:
        return "ftlayer-nats"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        options = DataSourceOptions(self.options, self.name())
        sink = NatsSink(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            options.get("stream"),  # type: ignore[arg-type]
            options.get("subject"),  # type: ignore[arg-type]
            value=options.get("value"),
            headers=options.get("headers"),
            credentials=options.get("credentials"),
            id_column=options.get("idColumn"),
            name=options.text("name", ""),
            remember=options.text("remember", "168h"),
        )
        options.check_all_known()
        return sink

    def source(self, options: DataSourceOptions) -> NatsSource:
        return NatsSource(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            options.get("stream"),  # type: ignore[arg-type]
            options.get("consumer"),  # type: ignore[arg-type]
            subject=options.get("subject"),
            credentials=options.get("credentials"),
            start=options.text("start", "earliest"),
            max_pending=options.count("maxPending", MAX_PENDING),
            ack_wait=options.text("ackWait", "30s"),
            reconnect_timeout=options.text("reconnectTimeout", "5m"),
        )
