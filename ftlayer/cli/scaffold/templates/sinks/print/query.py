"""Where orders go: the terminal, to look at them."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame


def add_sink(orders: Any, checkpoint: str) -> Any:
    """End the query on the terminal; return its writer."""
    return orders.sink(show, checkpoint=checkpoint)


def show(rows: DataFrame, batch: int) -> None:
    """Print the first rows of a batch."""
    if not rows.isEmpty():
        rows.show(truncate=False)
