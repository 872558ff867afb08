"""Where orders go: Parquet files."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sinks import FileDataSource


def add_sink(orders: Any, checkpoint: str) -> Any:
    """End the query in files; return its writer."""
    path = os.environ.get("SINK_PATH", "out")
    return orders.write_stream(FileDataSource, checkpoint=checkpoint, path=path, fileFormat="parquet")
