"""Where orders go: a queue of RabbitMQ, as JSON."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sources import AmqpDataSource


def add_sink(orders: Any, checkpoint: str) -> Any:
    """End the query in the queue, which is there; return its writer."""
    url = os.environ.get("SINK_URL", "amqp://guest:guest@localhost")
    queue = os.environ.get("SINK_QUEUE", "checked-orders")
    return orders.write_stream(
        AmqpDataSource, checkpoint=checkpoint, url=url, routingKey=queue, messageId="order_id"
    )
