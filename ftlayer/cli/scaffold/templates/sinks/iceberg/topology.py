"""Where orders go: an Iceberg table, of a catalog that pyiceberg is configured with."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sinks import IcebergSink


def add_sink(orders: Any) -> None:
    """End the topology in the table."""
    catalog = os.environ.get("SINK_CATALOG", "default")
    table = os.environ.get("SINK_TABLE", "shop.orders")
    orders.sink(IcebergSink(table, catalog), uid="sink")
