"""Where orders go: a server that takes each as a request of its own, as JSON."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sinks import HttpSink


def add_sink(orders: Any) -> None:
    """End the topology with requests; the server knows an order that comes again by its `Idempotency-Key`."""
    url = os.environ.get("SINK_URL", "http://localhost:8000/orders")
    token = os.environ.get("SINK_TOKEN", "")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    orders.sink(HttpSink(url, key="order_id", headers=headers), uid="sink")
