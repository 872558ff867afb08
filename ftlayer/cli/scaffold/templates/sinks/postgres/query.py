"""Where orders go: a table of PostgreSQL."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sinks import PostgresDataSource


def add_sink(orders: Any, checkpoint: str) -> Any:
    """End the query in the table, which is there; return its writer."""
    dsn = os.environ.get("SINK_DSN", "postgresql://localhost/shop")
    table = os.environ.get("SINK_TABLE", "checked_orders")
    return orders.write_stream(PostgresDataSource, checkpoint=checkpoint, dsn=dsn, table=table)
