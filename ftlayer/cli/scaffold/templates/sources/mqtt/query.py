"""Where orders come from: topics of MQTT."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sources import MqttDataSource
from pyspark.sql import DataFrame, SparkSession

from .functions import Order, parse
from .settings import STATE


def read(spark: SparkSession) -> DataFrame:
    """Return the topics' messages as a streaming DataFrame."""
    url = os.environ.get("SOURCE_URL", "mqtt://localhost")
    topic = os.environ.get("SOURCE_TOPIC", "orders/#")
    spark.dataSource.register(MqttDataSource)
    reader = spark.readStream.format("ftlayer-mqtt").options(url=url, topic=topic, spool=str(STATE / "spool"))
    return reader.load()


def order_of(record: dict[str, Any]) -> Order:
    """Make an order of a message."""
    return parse(record["value"])
