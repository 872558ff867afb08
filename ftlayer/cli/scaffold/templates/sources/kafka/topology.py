"""Where orders come from: a topic of Kafka."""

from __future__ import annotations

import os
from typing import Any

from ftlayer import StreamEnvironment
from ftlayer.sources import KafkaSource

from .functions import Order, parse
from .settings import NAME


def add_source(env: StreamEnvironment) -> Any:
    """Begin the topology with the topic's messages."""
    servers = os.environ.get("SOURCE_SERVERS", "localhost:9092")
    topic = os.environ.get("SOURCE_TOPIC", "orders")
    source = KafkaSource(servers, topic, group=NAME)
    return env.source(source, uid="source")


def order_of(row: tuple[Any, ...]) -> Order:
    """Make an order of a message: key, value, topic and so on."""
    return parse(row[1])
