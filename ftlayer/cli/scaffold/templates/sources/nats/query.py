"""Where orders come from: a stream of NATS JetStream."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sources import NatsDataSource
from pyspark.sql import DataFrame, SparkSession

from .functions import Order, parse
from .settings import NAME, STATE


def read(spark: SparkSession) -> DataFrame:
    """Return the stream's messages as a streaming DataFrame."""
    url = os.environ.get("SOURCE_URL", "nats://localhost")
    stream = os.environ.get("SOURCE_STREAM", "ORDERS")
    spark.dataSource.register(NatsDataSource)
    reader = spark.readStream.format("ftlayer-nats").options(
        url=url, stream=stream, consumer=NAME, spool=str(STATE / "spool")
    )
    return reader.load()


def order_of(record: dict[str, Any]) -> Order:
    """Make an order of a message."""
    return parse(record["value"])
