"""Where orders come from: new rows of a table of PostgreSQL, by a column that grows."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sources import PostgresTableDataSource
from pyspark.sql import DataFrame, SparkSession

from .functions import COLUMNS, Order, checked
from .settings import STATE


def read(spark: SparkSession) -> DataFrame:
    """Return the table's rows."""
    dsn = os.environ.get("SOURCE_DSN", "postgresql://localhost/shop")
    table = os.environ.get("SOURCE_TABLE", "orders")
    spark.dataSource.register(PostgresTableDataSource)
    reader = spark.readStream.format("ftlayer-postgres-table").options(
        dsn=dsn, table=table, column="id", columns=",".join(("id", *COLUMNS)), spool=str(STATE / "spool")
    )
    return reader.load()


def order_of(record: dict[str, Any]) -> Order:
    """Make an order of a row."""
    return checked(*(record[column] for column in COLUMNS))
