"""Checks of a Python Data Source's stream writer before it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ftlayer.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def checked_writer(sink: str, writer: Any) -> Any:
    """Return ``writer``; `ConfigError` unless it is a Python Data Source's stream writer."""
    from pyspark.sql.datasource import DataSourceStreamWriter

    if not isinstance(writer, DataSourceStreamWriter):
        raise ConfigError(
            f"sink {sink!r}: expected a DataSourceStreamWriter or a DataSourceStreamArrowWriter of "
            f"pyspark.sql.datasource, got a {type(writer).__name__}"
        )
    return writer


def spark_schema(sink: str, schema: pa.Schema) -> StructType:
    """Return the schema as plain writers get to see it; `ConfigError` for a type that Spark lacks."""
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import from_arrow_schema

    try:
        return from_arrow_schema(schema)
    except PySparkException as error:
        raise ConfigError(f"sink {sink!r}: Spark has no type for a column of ({schema}): {error}") from error
