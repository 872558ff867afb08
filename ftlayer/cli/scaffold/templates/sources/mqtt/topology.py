"""Where orders come from: topics of MQTT."""

from __future__ import annotations

import os
from typing import Any

from ftlayer import StreamEnvironment
from ftlayer.sources import MqttSource

from .functions import Order, parse


def add_source(env: StreamEnvironment) -> Any:
    """Begin the topology with the topics' messages."""
    url = os.environ.get("SOURCE_URL", "mqtt://localhost")
    topic = os.environ.get("SOURCE_TOPIC", "orders/#")
    source = MqttSource(url, topic)
    return env.source(source, uid="source", parallelism=1)


def order_of(row: tuple[Any, ...]) -> Order:
    """Make an order of a message: value, topic and so on."""
    return parse(row[0])
