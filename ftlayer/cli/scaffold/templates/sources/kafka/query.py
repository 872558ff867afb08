"""Where orders come from: a topic of Kafka."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sources import KafkaDataSource
from pyspark.sql import DataFrame, SparkSession

from .functions import Order, parse
from .settings import NAME


def read(spark: SparkSession) -> DataFrame:
    """Return the topic's messages as a streaming DataFrame."""
    servers = os.environ.get("SOURCE_SERVERS", "localhost:9092")
    topic = os.environ.get("SOURCE_TOPIC", "orders")
    spark.dataSource.register(KafkaDataSource)
    reader = spark.readStream.format("ftlayer-kafka").options(
        **{"kafka.bootstrap.servers": servers, "subscribe": topic, "kafka.group.id": NAME}
    )
    return reader.load()


def order_of(record: dict[str, Any]) -> Order:
    """Make an order of a message."""
    return parse(record["value"])
