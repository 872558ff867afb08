"""The sinks as Python Data Sources, for `DataStreamWriter.format` of plain Structured Streaming."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from ftlayer.errors import ConfigError
from ftlayer.sinks.delta import DeltaSink
from ftlayer.sinks.files import FileSink
from ftlayer.sinks.iceberg import IcebergSink
from ftlayer.sinks.postgres import PostgresSink

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class DeltaDataSource(DataSource):
    """``spark.dataSource.register(DeltaDataSource)``, then ``df.writeStream.format("ftlayer-delta")``.

    Options: ``path``, ``partitionBy`` (names with commas between them), and those of the storage behind ``storage.``
    (``storage.AWS_REGION``), see `DeltaSink`. A batch that Spark runs again after a restart from the query's checkpoint
    adds nothing.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "ftlayer-delta"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        """Return the sink."""
        names = _names(self.options.get("partitionBy", ""))
        storage = _below(self.options, "storage.")
        return DeltaSink(_required(self.options, "path"), partition_by=names, storage_options=storage)


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


class IcebergDataSource(DataSource):
    """``spark.dataSource.register(IcebergDataSource)``, then ``df.writeStream.format("ftlayer-iceberg")``.

    Options: ``table``, ``partitionBy`` (names with commas between them), ``remember``, and ``catalog``, the name of a
    configured one, or properties of one behind ``catalog.`` (``catalog.uri``), see `IcebergSink`. A batch that Spark
    runs again after a restart from the query's checkpoint adds nothing.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "ftlayer-iceberg"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        """Return the sink."""
        properties = _below(self.options, "catalog.")
        return IcebergSink(
            _required(self.options, "table"),
            properties or _required(self.options, "catalog"),
            partition_by=_names(self.options.get("partitionBy", "")),
            remember=str(self.options.get("remember", "720h")),
        )


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


def _names(listed: Any) -> list[str]:
    return [name.strip() for name in str(listed).split(",") if name.strip()]


def _below(options: Any, prefix: str) -> dict[str, str]:
    """Return the options whose names begin so, without that."""
    return {
        name[len(prefix) :]: str(value) for name, value in options.items() if name.lower().startswith(prefix)
    }
