"""Where orders go: a stream of Redis, with a field for each column."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sinks import RedisSink


def add_sink(orders: Any) -> None:
    """End the topology in the stream."""
    url = os.environ.get("SINK_URL", "redis://localhost")
    stream = os.environ.get("SINK_STREAM", "checked-orders")
    orders.sink(RedisSink(url, stream), uid="sink")
