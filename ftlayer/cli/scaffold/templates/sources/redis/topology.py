"""Where orders come from: a stream of Redis, whose entries have JSON in the field `value`."""

from __future__ import annotations

import os
from typing import Any

from ftlayer import StreamEnvironment
from ftlayer.sources import RedisSource

from .functions import Order, parse
from .settings import NAME


def add_source(env: StreamEnvironment) -> Any:
    """Begin the topology with the stream's entries."""
    url = os.environ.get("SOURCE_URL", "redis://localhost")
    stream = os.environ.get("SOURCE_STREAM", "orders")
    source = RedisSource(url, stream, NAME, fields=["value"])
    return env.source(source, uid="source")


def order_of(row: tuple[Any, ...]) -> Order:
    """Make an order of an entry: id, time and value."""
    return parse(row[2])
