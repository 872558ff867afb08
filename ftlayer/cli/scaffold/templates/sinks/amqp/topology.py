"""Where orders go: a queue of RabbitMQ, as JSON."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sinks import AmqpSink


def add_sink(orders: Any) -> None:
    """End the topology in the queue, which is there."""
    url = os.environ.get("SINK_URL", "amqp://guest:guest@localhost")
    queue = os.environ.get("SINK_QUEUE", "checked-orders")
    orders.sink(AmqpSink(url, routing_key=queue, message_id="order_id"), uid="sink")
