"""Where orders come from: a log with a JSON line an order, which grows and is rotated."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sources import TailDataSource
from pyspark.sql import DataFrame, SparkSession

from .functions import Order, parse
from .settings import STATE


def read(spark: SparkSession) -> DataFrame:
    """Return the lines of the log as a streaming DataFrame."""
    path = os.environ.get("SOURCE_PATH", "data/orders.log")
    spark.dataSource.register(TailDataSource)
    reader = spark.readStream.format("ftlayer-tail").options(path=path, spool=str(STATE / "spool"))
    return reader.load()


def order_of(record: dict[str, Any]) -> Order:
    """Make an order of a line."""
    return parse(record["value"])
