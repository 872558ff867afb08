"""`MqttSource` as a Python Data Source."""

from __future__ import annotations

from ftlayer.sources.data_source import QueueDataSource, option_count
from ftlayer.sources.mqtt.source import MAX_PENDING, MqttSource


class MqttDataSource(QueueDataSource):
    """``spark.dataSource.register(MqttDataSource)``, then ``format("ftlayer-mqtt")`` to read.

    Options: ``url``, ``topic``, ``group``, ``qos``, ``version``, ``sessionExpiry``, ``maxPending``,
    ``reconnectTimeout``, see `MqttSource`; ``spool`` and ``maxRowsPerTrigger`` as of `RedisDataSource`.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "ftlayer-mqtt"

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
