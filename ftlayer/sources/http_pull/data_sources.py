"""`SseSource` and `PolledJsonSource` as Python Data Sources."""

from __future__ import annotations

from typing import Any

from ftlayer.sources.data_source import QueueDataSource
from ftlayer.sources.http_pull.polled import PolledJsonSource
from ftlayer.sources.http_pull.sse import SseSource


class SseDataSource(QueueDataSource):
    """``spark.dataSource.register(SseDataSource)``, then ``spark.readStream.format("ftlayer-sse")``.

    Options: ``url``, ``header.<name>``, ``idleTimeout``, ``reconnectTimeout``, see `SseSource`; ``spool``, see
    `ftlayer.sources.spool`; ``maxRowsPerTrigger`` (100,000). The driver connects.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "ftlayer-sse"

    def source(self) -> SseSource:
        """See `QueueDataSource.source`."""
        options = self.options
        return SseSource(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            headers=_headers(options),
            idle_timeout=str(options.get("idleTimeout", "2m")),
            reconnect_timeout=str(options.get("reconnectTimeout", "5m")),
        )


class PolledJsonDataSource(QueueDataSource):
    """``spark.dataSource.register(PolledJsonDataSource)``, then ``spark.readStream.format("ftlayer-polled-json")``.

    Options: ``url``, ``id`` (names with commas between them), ``items``, ``cursor``, ``param``, ``interval``,
    ``header.<name>``, ``timeout``, ``reconnectTimeout``, see `PolledJsonSource`; ``spool``, see
    `ftlayer.sources.spool`; ``maxRowsPerTrigger`` (100,000). The driver connects.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "ftlayer-polled-json"

    def source(self) -> PolledJsonSource:
        """See `QueueDataSource.source`."""
        options = self.options
        return PolledJsonSource(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            id=[name.strip() for name in str(options.get("id", "id")).split(",") if name.strip()],
            items=str(options.get("items", "")),
            cursor=str(options.get("cursor", "")),
            param=str(options.get("param", "")),
            interval=str(options.get("interval", "10s")),
            headers=_headers(options),
            timeout=str(options.get("timeout", "30s")),
            reconnect_timeout=str(options.get("reconnectTimeout", "5m")),
        )


def _headers(options: Any) -> dict[str, str]:
    return {
        name[len("header.") :]: str(value)
        for name, value in options.items()
        if name.lower().startswith("header.")
    }
