"""Where orders come from: requests of others, answered once they are durable."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sources import WebhookDataSource
from pyspark.sql import DataFrame, SparkSession

from .functions import Order, parse
from .settings import STATE


def read(spark: SparkSession) -> DataFrame:
    """Return the requests that are posted; with a secret, those that are signed with it."""
    listen = os.environ.get("SOURCE_LISTEN", "127.0.0.1:8080")
    secret = os.environ.get("SOURCE_SECRET", "")
    spark.dataSource.register(WebhookDataSource)
    reader = spark.readStream.format("ftlayer-webhook").options(listen=listen, spool=str(STATE / "spool"))
    if secret:
        reader = reader.option("signatureSecret", secret)
    return reader.load()


def order_of(record: dict[str, Any]) -> Order:
    """Make an order of a request."""
    return parse(record["body"])
