"""Where orders go: a topic of Kafka, as JSON."""

from __future__ import annotations

import json
import os
from typing import Any

from ftlayer.sinks import KafkaSink

from .functions import COLUMNS
from .settings import STATE


def add_sink(orders: Any) -> None:
    """End the topology in the topic: exactly once for consumers that read what is committed, with each checkpoint."""
    servers = os.environ.get("SINK_SERVERS", "localhost:9092")
    topic = os.environ.get("SINK_TOPIC", "checked-orders")
    messages = orders.map(message, "key string, value string", uid="message")
    messages.sink(KafkaSink(servers, topic, staging=STATE / "kafka"), uid="sink")


def message(row: tuple[Any, ...]) -> tuple[str, str]:
    """Return a message of Kafka, key and value, for a row."""
    return row[0], json.dumps(dict(zip((*COLUMNS, "total"), row, strict=True)))
