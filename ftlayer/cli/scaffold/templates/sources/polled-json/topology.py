"""Where orders come from: a list as JSON, which a server is asked for again and again."""

from __future__ import annotations

import os
from typing import Any

from ftlayer import StreamEnvironment
from ftlayer.sources import PolledJsonSource

from .functions import Order, parse


def add_source(env: StreamEnvironment) -> Any:
    """Begin the topology with the list's items."""
    url = os.environ.get("SOURCE_URL", "http://localhost:8000/orders.json")
    interval = os.environ.get("SOURCE_INTERVAL", "10s")
    source = PolledJsonSource(url, id="order_id", interval=interval)
    return env.source(source, uid="source", parallelism=1)


def order_of(row: tuple[Any, ...]) -> Order:
    """Make an order of an item: id, time and its JSON."""
    return parse(row[2])
