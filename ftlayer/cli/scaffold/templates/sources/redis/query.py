"""Where orders come from: a stream of Redis, whose entries have JSON in the field `value`."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sources import RedisDataSource
from pyspark.sql import DataFrame, SparkSession

from .functions import Order, parse
from .settings import NAME, STATE


def read(spark: SparkSession) -> DataFrame:
    """Return the stream's entries as a streaming DataFrame."""
    url = os.environ.get("SOURCE_URL", "redis://localhost")
    stream = os.environ.get("SOURCE_STREAM", "orders")
    spark.dataSource.register(RedisDataSource)
    reader = spark.readStream.format("ftlayer-redis").options(
        url=url, stream=stream, group=NAME, fields="value", spool=str(STATE / "spool")
    )
    return reader.load()


def order_of(record: dict[str, Any]) -> Order:
    """Make an order of an entry."""
    return parse(record["value"])
