"""The sinks as Python Data Sources, for `DataStreamWriter.format` of plain Structured Streaming."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from ftlayer.data_sources import DataSourceOptions
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
        return "ftlayer-delta"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        options = DataSourceOptions(self.options, self.name())
        sink = DeltaSink(
            options.required("path"),
            partition_by=options.names("partitionBy"),
            storage_options=options.below("storage."),
        )
        options.check_all_known()
        return sink


class FileDataSource(DataSource):
    """``spark.dataSource.register(FileDataSource)``, then ``df.writeStream.format("ftlayer-files")``.

    Options: ``path``, ``fileFormat`` (parquet). A batch that Spark runs again after a restart from the query's
    checkpoint adds nothing.
    """

    @classmethod
    def name(cls) -> str:
        return "ftlayer-files"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        options = DataSourceOptions(self.options, self.name())
        sink = FileSink(options.required("path"), options.text("fileFormat", "parquet"))
        options.check_all_known()
        return sink


class IcebergDataSource(DataSource):
    """``spark.dataSource.register(IcebergDataSource)``, then ``df.writeStream.format("ftlayer-iceberg")``.

    Options: ``table``, ``partitionBy`` (names with commas between them), ``remember``, and ``catalog``, the name of a
    configured one, or properties of one behind ``catalog.`` (``catalog.uri``), see `IcebergSink`. A batch that Spark
    runs again after a restart from the query's checkpoint adds nothing.
    """

    @classmethod
    def name(cls) -> str:
        return "ftlayer-iceberg"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        options = DataSourceOptions(self.options, self.name())
        sink = IcebergSink(
            options.required("table"),
            options.below("catalog.") or options.required("catalog"),
            partition_by=options.names("partitionBy"),
            remember=options.text("remember", "720h"),
        )
        options.check_all_known()
        return sink


class PostgresDataSource(DataSource):
    """``spark.dataSource.register(PostgresDataSource)``, then ``df.writeStream.format("ftlayer-postgres")``.

    Options: ``dsn``, ``table``, ``name``; see `PostgresSink`.
    """

    @classmethod
    def name(cls) -> str:
        return "ftlayer-postgres"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        options = DataSourceOptions(self.options, self.name())
        sink = PostgresSink(options.required("dsn"), options.required("table"), name=options.text("name", ""))
        options.check_all_known()
        return sink
