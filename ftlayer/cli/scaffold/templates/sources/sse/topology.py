"""Where orders come from: Server-Sent Events of a server."""

from __future__ import annotations

import os
from typing import Any

from ftlayer import StreamEnvironment
from ftlayer.sources import SseSource

from .functions import Order, parse


def add_source(env: StreamEnvironment) -> Any:
    """Begin the topology with the server's events."""
    url = os.environ.get("SOURCE_URL", "http://localhost:8000/orders")
    source = SseSource(url)
    return env.source(source, uid="source", parallelism=1)


def order_of(row: tuple[Any, ...]) -> Order:
    """Make an order of an event: id, time, name and data."""
    return parse(row[3])
