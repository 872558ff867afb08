"""Where orders come from: a log with a JSON line an order, which grows and is rotated."""

from __future__ import annotations

import os
from typing import Any

from ftlayer import StreamEnvironment
from ftlayer.sources import TailSource

from .functions import Order, parse


def add_source(env: StreamEnvironment) -> Any:
    """Begin the topology with the lines of the log."""
    path = os.environ.get("SOURCE_PATH", "data/orders.log")
    source = TailSource(path)
    return env.source(source, uid="source")


def order_of(row: tuple[Any, ...]) -> Order:
    """Make an order of a line: path, inode, offset and text."""
    return parse(row[3])
