"""Where orders go: the terminal, to look at them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def add_sink(orders: Any) -> None:
    """End the topology on the terminal: what a slot prints is on standard error."""
    orders.sink(show, uid="sink")


def show(batch: pa.RecordBatch) -> None:
    """Print the rows of a batch."""
    for row in batch.to_pylist():
        print(row, flush=True)
