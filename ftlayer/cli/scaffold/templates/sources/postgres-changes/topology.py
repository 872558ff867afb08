"""Where orders come from: rows that are inserted into a table of PostgreSQL, by logical replication."""

from __future__ import annotations

import os
from typing import Any

from ftlayer import StreamEnvironment
from ftlayer.sources import PostgresChangesSource

from .functions import COLUMNS, Order, checked
from .settings import NAME


def add_source(env: StreamEnvironment) -> Any:
    """Begin the topology with the inserts into the table, those of before its first start included."""
    dsn = os.environ.get("SOURCE_DSN", "postgresql://localhost/shop")
    table = os.environ.get("SOURCE_TABLE", "orders")
    source = PostgresChangesSource(dsn, table, NAME, columns=COLUMNS, initial="copy")
    return env.source(source, uid="source", parallelism=1).filter(is_insert, uid="inserts")


def is_insert(row: tuple[Any, ...]) -> bool:
    """Whether a change is a new row: updates, deletes and truncates are left out."""
    return row[0] in ("insert", "read")


def order_of(row: tuple[Any, ...]) -> Order:
    """Make an order of a change: operation, place in the log (4 columns), then the table's columns."""
    return checked(*row[5:8])
