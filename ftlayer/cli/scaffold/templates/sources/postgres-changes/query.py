"""Where orders come from: rows that are inserted into a table of PostgreSQL, by logical replication."""

from __future__ import annotations

import os
from typing import Any

from ftlayer.sources import PostgresChangesDataSource
from pyspark.sql import DataFrame, SparkSession

from .functions import COLUMNS, Order, checked
from .settings import NAME, STATE


def read(spark: SparkSession) -> DataFrame:
    """Return the inserts into the table, those of before the first start included."""
    dsn = os.environ.get("SOURCE_DSN", "postgresql://localhost/shop")
    table = os.environ.get("SOURCE_TABLE", "orders")
    spark.dataSource.register(PostgresChangesDataSource)
    reader = spark.readStream.format("ftlayer-postgres-changes").options(
        dsn=dsn, table=table, slot=NAME, columns=",".join(COLUMNS), initial="copy", spool=str(STATE / "spool")
    )
    return reader.load().where("_operation in ('insert', 'read')")


def order_of(record: dict[str, Any]) -> Order:
    """Make an order of a change."""
    return checked(*(record[column] for column in COLUMNS))
