"""Where orders go: a topic of Kafka, as JSON."""

from __future__ import annotations

import json
import os
from typing import Any

from ftlayer.sources import KafkaDataSource

from .settings import STATE


def add_sink(orders: Any, checkpoint: str) -> Any:
    """End the query in the topic, exactly once for consumers that read what is committed; return its writer."""
    servers = os.environ.get("SINK_SERVERS", "localhost:9092")
    topic = os.environ.get("SINK_TOPIC", "checked-orders")
    messages = orders.map(message, "key string, value string", name="message")
    options = {"kafka.bootstrap.servers": servers, "topic": topic, "staging": str(STATE / "kafka")}
    return messages.write_stream(KafkaDataSource, checkpoint=checkpoint, **options)


def message(record: dict[str, Any]) -> dict[str, str]:
    """Return a message of Kafka for a record."""
    return {"key": record["order_id"], "value": json.dumps(record)}
