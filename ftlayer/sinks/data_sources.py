"""The sinks as Python Data Sources, for `DataStreamWriter.format` of plain Structured Streaming."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from ftlayer.errors import ConfigError
from ftlayer.sinks.files import FileSink
from ftlayer.sinks.postgres import PostgresSink

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class FileDataSource(DataSource):
    """``spark.dataSource.register(FileDataSource)``, then ``df.writeStream.format("ftlayer-files")``.

    Options: ``path``, ``fileFormat`` (parquet). A batch that Spark runs again after a restart from the query's
    checkpoint adds nothing.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "ftlayer-files"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        """Return the sink."""
        return FileSink(_required(self.options, "path"), self.options.get("fileFormat", "parquet"))


class PostgresDataSource(DataSource):
    """``spark.dataSource.register(PostgresDataSource)``, then ``df.writeStream.format("ftlayer-postgres")``.

    Options: ``dsn``, ``table``, ``name``; see `PostgresSink`.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "ftlayer-postgres"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        """Return the sink."""
        dsn, table = (_required(self.options, option) for option in ("dsn", "table"))
        return PostgresSink(dsn, table, name=self.options.get("name", ""))


def _required(options: Any, option: str) -> str:
    value = options.get(option)
    if not value:
        raise ConfigError(f"option {option!r} is missing: .option({option!r}, …)")
    return str(value)
