"""Where orders come from: a stream of NATS JetStream."""

from __future__ import annotations

import os
from typing import Any

from ftlayer import StreamEnvironment
from ftlayer.sources import NatsSource

from .functions import Order, parse
from .settings import NAME


def add_source(env: StreamEnvironment) -> Any:
    """Begin the topology with the stream's messages."""
    url = os.environ.get("SOURCE_URL", "nats://localhost")
    stream = os.environ.get("SOURCE_STREAM", "ORDERS")
    source = NatsSource(url, stream, NAME)
    return env.source(source, uid="source", parallelism=1)


def order_of(row: tuple[Any, ...]) -> Order:
    """Make an order of a message: value, subject and so on."""
    return parse(row[0])
