"""The query: orders come in, are read and checked, and go out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftlayer import FTLayer
from pyspark.sql import DataFrame, SparkSession

from . import sink, source
from .functions import COLUMNS, ORDER, UNREADABLE, Order
from .settings import NAME


def build(
    spark: SparkSession,
    layer: FTLayer,
    checkpoint: str,
    read: Callable[[SparkSession], DataFrame] = source.read,
    order_of: Callable[[dict[str, Any]], Order] = source.order_of,
    add_sink: Callable[[Any, str], Any] = sink.add_sink,
) -> Any:
    """Put the query together and return its writer, to be started. Tests give another source and sink."""

    def to_row(record: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(COLUMNS, order_of(record), strict=True))

    records = layer.source(read(spark), name=NAME)
    orders = records.map(to_row, ORDER, name="parse", dead_on=UNREADABLE)
    return add_sink(orders, checkpoint)
