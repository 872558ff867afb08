"""Where orders go: a Delta table."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sinks import DeltaDataSource


def add_sink(orders: Any, checkpoint: str) -> Any:
    """End the query in the table; return its writer."""
    path = os.environ.get("SINK_PATH", "out/orders")
    return orders.write_stream(DeltaDataSource, checkpoint=checkpoint, path=path)
