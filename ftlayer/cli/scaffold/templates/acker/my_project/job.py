"""The topology: orders come in, are read and checked, and go out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftlayer import StreamEnvironment

from . import sink, source
from .functions import ORDER, UNREADABLE, Order


def build(
    env: StreamEnvironment,
    add_source: Callable[[StreamEnvironment], Any] = source.add_source,
    order_of: Callable[[Any], Order] = source.order_of,
    add_sink: Callable[[Any], None] = sink.add_sink,
) -> None:
    """Put the topology together. Tests give another source and sink."""
    orders = add_source(env).map(order_of, ORDER, uid="parse", dead_on=UNREADABLE)
    add_sink(orders)
