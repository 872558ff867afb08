"""Where orders come from: requests of others, answered once they are durable."""

from __future__ import annotations

import os
from typing import Any

from ftlayer import StreamEnvironment
from ftlayer.sources import HmacSignature, WebhookSource

from .functions import Order, parse


def add_source(env: StreamEnvironment) -> Any:
    """Begin the topology with the requests that are posted; with a secret, those that are signed with it."""
    listen = os.environ.get("SOURCE_LISTEN", "127.0.0.1:8080")
    secret = os.environ.get("SOURCE_SECRET", "")
    source = WebhookSource(listen, signature=HmacSignature(secret) if secret else None)
    return env.source(source, uid="source", parallelism=1)


def order_of(row: tuple[Any, ...]) -> Order:
    """Make an order of a request: id, time, path and body."""
    return parse(row[3])
