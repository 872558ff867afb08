"""Where orders come from: a queue of RabbitMQ."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sources import AmqpDataSource
from pyspark.sql import DataFrame, SparkSession

from .functions import Order, parse
from .settings import STATE


def read(spark: SparkSession) -> DataFrame:
    """Return the queue's messages as a streaming DataFrame."""
    url = os.environ.get("SOURCE_URL", "amqp://guest:guest@localhost")
    queue = os.environ.get("SOURCE_QUEUE", "orders")
    spark.dataSource.register(AmqpDataSource)
    reader = spark.readStream.format("ftlayer-amqp").options(url=url, queue=queue, spool=str(STATE / "spool"))
    return reader.load()


def order_of(record: dict[str, Any]) -> Order:
    """Make an order of a message."""
    return parse(record["value"])
