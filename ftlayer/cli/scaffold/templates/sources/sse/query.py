"""Where orders come from: Server-Sent Events of a server."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sources import SseDataSource
from pyspark.sql import DataFrame, SparkSession

from .functions import Order, parse
from .settings import STATE


def read(spark: SparkSession) -> DataFrame:
    """Return the server's events as a streaming DataFrame."""
    url = os.environ.get("SOURCE_URL", "http://localhost:8000/orders")
    spark.dataSource.register(SseDataSource)
    reader = spark.readStream.format("ftlayer-sse").options(url=url, spool=str(STATE / "spool"))
    return reader.load()


def order_of(record: dict[str, Any]) -> Order:
    """Make an order of an event."""
    return parse(record["data"])
