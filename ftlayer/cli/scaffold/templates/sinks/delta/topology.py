"""Where orders go: a Delta table."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sinks import DeltaSink


def add_sink(orders: Any) -> None:
    """End the topology in the table."""
    path = os.environ.get("SINK_PATH", "out/orders")
    orders.sink(DeltaSink(path), uid="sink")
