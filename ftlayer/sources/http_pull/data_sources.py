"""`SseSource` and `PolledJsonSource` as Python Data Sources."""

from __future__ import annotations

from ftlayer.data_source_options import DataSourceOptions
from ftlayer.sources.data_source import QueueDataSource
from ftlayer.sources.http_pull.polled import PolledJsonSource
from ftlayer.sources.http_pull.sse import SseSource


class SseDataSource(QueueDataSource):
    """``spark.dataSource.register(SseDataSource)``, then ``spark.readStream.format("ftlayer-sse")``.

    Options: ``url``, ``header.<name>``, ``idleTimeout``, ``reconnectTimeout``, see `SseSource`; ``spool``, see
    `ftlayer.sources.queue_stream`; ``maxRowsPerTrigger`` (100,000). The driver connects.
    """

    @classmethod
    def name(cls) -> str:
        return "ftlayer-sse"

    def source(self, options: DataSourceOptions) -> SseSource:
        return SseSource(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            headers=options.below("header."),
            idle_timeout=options.text("idleTimeout", "2m"),
            reconnect_timeout=options.text("reconnectTimeout", "5m"),
        )


class PolledJsonDataSource(QueueDataSource):
    """``spark.dataSource.register(PolledJsonDataSource)``, then ``spark.readStream.format("ftlayer-polled-json")``.

    Options: ``url``, ``id`` (names with commas between them), ``items``, ``cursor``, ``param``, ``interval``,
    ``header.<name>``, ``timeout``, ``reconnectTimeout``, see `PolledJsonSource`; ``spool``, see
    `ftlayer.sources.queue_stream`; ``maxRowsPerTrigger`` (100,000). The driver connects.
    """

    @classmethod
    def name(cls) -> str:
        return "ftlayer-polled-json"

    def source(self, options: DataSourceOptions) -> PolledJsonSource:
        return PolledJsonSource(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            id=options.names("id", "id"),
            items=options.text("items", ""),
            cursor=options.text("cursor", ""),
            param=options.text("param", ""),
            interval=options.text("interval", "10s"),
            headers=options.below("header."),
            timeout=options.text("timeout", "30s"),
            reconnect_timeout=options.text("reconnectTimeout", "5m"),
        )
