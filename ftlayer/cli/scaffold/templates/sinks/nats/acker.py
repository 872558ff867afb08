"""Where orders go: a stream of NATS JetStream, as JSON."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sinks import NatsSink


def add_sink(orders: Any) -> None:
    """End the topology in the stream, which leaves out an order id that it had a moment ago."""
    url = os.environ.get("SINK_URL", "nats://localhost")
    stream = os.environ.get("SINK_STREAM", "CHECKED")
    subject = os.environ.get("SINK_SUBJECT", "checked.orders")
    orders.sink(NatsSink(url, stream, subject, id_column="order_id"), uid="sink")
