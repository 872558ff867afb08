"""Where orders go: a table of PostgreSQL."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sinks import PostgresSink


def add_sink(orders: Any) -> None:
    """End the topology in the table, which is there."""
    dsn = os.environ.get("SINK_DSN", "postgresql://localhost/shop")
    table = os.environ.get("SINK_TABLE", "checked_orders")
    orders.sink(PostgresSink(dsn, table), uid="sink")
