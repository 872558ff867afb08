"""Where orders come from: new rows of a table of PostgreSQL, by a column that grows."""

from __future__ import annotations

import os
from typing import Any

from ftlayer import StreamEnvironment
from ftlayer.sources import PostgresTableSource

from .functions import COLUMNS, Order, checked


def add_source(env: StreamEnvironment) -> Any:
    """Begin the topology with the table's rows."""
    dsn = os.environ.get("SOURCE_DSN", "postgresql://localhost/shop")
    table = os.environ.get("SOURCE_TABLE", "orders")
    source = PostgresTableSource(dsn, table, "id", columns=("id", *COLUMNS))
    return env.source(source, uid="source", parallelism=1)


def order_of(row: tuple[Any, ...]) -> Order:
    """Make an order of a row: its number, then the order's columns."""
    return checked(*row[1:4])
