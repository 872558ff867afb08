"""Where orders go: an Iceberg table, of a catalog that pyiceberg is configured with."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sinks import IcebergDataSource


def add_sink(orders: Any, checkpoint: str) -> Any:
    """End the query in the table; return its writer."""
    catalog = os.environ.get("SINK_CATALOG", "default")
    table = os.environ.get("SINK_TABLE", "shop.orders")
    return orders.write_stream(IcebergDataSource, checkpoint=checkpoint, table=table, catalog=catalog)
