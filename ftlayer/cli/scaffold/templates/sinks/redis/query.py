"""Where orders go: a stream of Redis, with a field for each column."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sources import RedisDataSource


def add_sink(orders: Any, checkpoint: str) -> Any:
    """End the query in the stream; return its writer."""
    url = os.environ.get("SINK_URL", "redis://localhost")
    stream = os.environ.get("SINK_STREAM", "checked-orders")
    return orders.write_stream(RedisDataSource, checkpoint=checkpoint, url=url, stream=stream)
