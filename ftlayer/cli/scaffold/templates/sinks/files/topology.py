"""Where orders go: Parquet files."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sinks import FileSink


def add_sink(orders: Any) -> None:
    """End the topology in files."""
    path = os.environ.get("SINK_PATH", "out")
    orders.sink(FileSink(path), uid="sink")
