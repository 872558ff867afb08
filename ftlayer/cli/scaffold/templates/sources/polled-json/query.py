"""Where orders come from: a list as JSON, which a server is asked for again and again."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sources import PolledJsonDataSource
from pyspark.sql import DataFrame, SparkSession

from .functions import Order, parse
from .settings import STATE


def read(spark: SparkSession) -> DataFrame:
    """Return the list's items as a streaming DataFrame."""
    url = os.environ.get("SOURCE_URL", "http://localhost:8000/orders.json")
    interval = os.environ.get("SOURCE_INTERVAL", "10s")
    spark.dataSource.register(PolledJsonDataSource)
    reader = spark.readStream.format("ftlayer-polled-json").options(
        url=url, id="order_id", interval=interval, spool=str(STATE / "spool")
    )
    return reader.load()


def order_of(record: dict[str, Any]) -> Order:
    """Make an order of an item."""
    return parse(record["item"])
