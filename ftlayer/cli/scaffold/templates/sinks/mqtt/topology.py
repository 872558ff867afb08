"""Where orders go: a topic of MQTT, as JSON."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sinks import MqttSink


def add_sink(orders: Any) -> None:
    """End the topology in the topic."""
    url = os.environ.get("SINK_URL", "mqtt://localhost")
    topic = os.environ.get("SINK_TOPIC", "checked-orders")
    orders.sink(MqttSink(url, topic=topic), uid="sink")
