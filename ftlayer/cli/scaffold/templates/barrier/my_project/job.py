"""The topology: orders come in, are read and checked, are added up by customer, and go out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftlayer import CheckpointConfig, FailurePolicy, StreamEnvironment
from pyspark.sql import SparkSession

from . import sink, source
from .functions import ORDER, UNREADABLE, Order
from .totals import TOTAL, add, nothing


def environment(spark: SparkSession, name: str, checkpoints: str) -> StreamEnvironment:
    """Return an empty topology with checkpoints in this directory; an order that fails, fails alone."""
    config = CheckpointConfig(
        interval="1s", directory=checkpoints, failures=FailurePolicy(max_attempts=5, dead_on=UNREADABLE)
    )
    return StreamEnvironment(spark, name=name, parallelism=2, checkpointing=config)


def build(
    env: StreamEnvironment,
    add_source: Callable[[StreamEnvironment], Any] = source.add_source,
    order_of: Callable[[Any], Order] = source.order_of,
    add_sink: Callable[[Any], None] = sink.add_sink,
) -> None:
    """Put the topology together. Tests give another source and sink."""
    orders = add_source(env).map(order_of, ORDER, uid="parse")
    add_sink(orders.key_by("customer").aggregate(nothing, add, TOTAL, uid="totals"))
