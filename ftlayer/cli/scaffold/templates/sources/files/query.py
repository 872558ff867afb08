"""Where orders come from: files of JSON lines, and those that come later."""

from __future__ import annotations

import os
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from .functions import Order, parse


def read(spark: SparkSession) -> DataFrame:
    """Return the lines of the files as a streaming DataFrame."""
    path = os.environ.get("SOURCE_PATH", "data/*.jsonl")
    return spark.readStream.option("maxFilesPerTrigger", 100).text(path)


def order_of(record: dict[str, Any]) -> Order:
    """Make an order of a line."""
    return parse(record["value"])
