"""Where orders come from: a queue of RabbitMQ."""

from __future__ import annotations

import os
from typing import Any

from ftlayer import StreamEnvironment
from ftlayer.sources import AmqpSource

from .functions import Order, parse


def add_source(env: StreamEnvironment) -> Any:
    """Begin the topology with the queue's messages."""
    url = os.environ.get("SOURCE_URL", "amqp://guest:guest@localhost")
    queue = os.environ.get("SOURCE_QUEUE", "orders")
    source = AmqpSource(url, queue)
    return env.source(source, uid="source", parallelism=1)


def order_of(row: tuple[Any, ...]) -> Order:
    """Make an order of a message: value, routing key and so on."""
    return parse(row[0])
