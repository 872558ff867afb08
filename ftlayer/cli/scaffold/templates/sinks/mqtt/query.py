"""Where orders go: a topic of MQTT, as JSON."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sources import MqttDataSource


def add_sink(orders: Any, checkpoint: str) -> Any:
    """End the query in the topic; return its writer."""
    url = os.environ.get("SINK_URL", "mqtt://localhost")
    topic = os.environ.get("SINK_TOPIC", "checked-orders")
    return orders.write_stream(MqttDataSource, checkpoint=checkpoint, url=url, topic=topic)
