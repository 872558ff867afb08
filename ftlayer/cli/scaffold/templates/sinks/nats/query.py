"""Where orders go: a stream of NATS JetStream, as JSON."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sources import NatsDataSource


def add_sink(orders: Any, checkpoint: str) -> Any:
    """End the query in the stream; return its writer."""
    url = os.environ.get("SINK_URL", "nats://localhost")
    stream = os.environ.get("SINK_STREAM", "CHECKED")
    subject = os.environ.get("SINK_SUBJECT", "checked.orders")
    return orders.write_stream(NatsDataSource, checkpoint=checkpoint, url=url, stream=stream, subject=subject)
