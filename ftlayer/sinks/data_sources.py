"""The sinks as Python Data Sources, for `DataStreamWriter.format` of plain Structured Streaming."""

from __future__ import annotations

from ftlayer.data_sources import DataSourceOptions, OptionsDataSource
from ftlayer.sinks.delta import DeltaSink
from ftlayer.sinks.files import FileSink
from ftlayer.sinks.iceberg import IcebergSink
from ftlayer.sinks.postgres import PostgresSink


class DeltaDataSource(OptionsDataSource):
    """``spark.dataSource.register(DeltaDataSource)``, then ``df.writeStream.format("ftlayer-delta")``.

    Options: ``path``, ``partitionBy`` (names with commas between them), and those of the storage behind ``storage.``
    (``storage.AWS_REGION``), see `DeltaSink`. A batch that Spark runs again after a restart from the query's checkpoint
    adds nothing.
    """

    format = "ftlayer-delta"

    def sink(self, options: DataSourceOptions) -> DeltaSink:
        path, storage = options.required("path"), options.below("storage.")
        return options.made(DeltaSink, path=path, storage_options=storage)


class FileDataSource(OptionsDataSource):
    """``spark.dataSource.register(FileDataSource)``, then ``df.writeStream.format("ftlayer-files")``.

    Options: ``path``, ``fileFormat`` (parquet). A batch that Spark runs again after a restart from the query's
    checkpoint adds nothing.
    """

    format = "ftlayer-files"

    def sink(self, options: DataSourceOptions) -> FileSink:
        return options.made(FileSink, {"format": "fileFormat"}, path=options.required("path"))


class IcebergDataSource(OptionsDataSource):
    """``spark.dataSource.register(IcebergDataSource)``, then ``df.writeStream.format("ftlayer-iceberg")``.

    Options: ``table``, ``partitionBy`` (names with commas between them), ``remember``, and ``catalog``, the name of a
    configured one, or properties of one behind ``catalog.`` (``catalog.uri``), see `IcebergSink`. A batch that Spark
    runs again after a restart from the query's checkpoint adds nothing.
    """

    format = "ftlayer-iceberg"

    def sink(self, options: DataSourceOptions) -> IcebergSink:
        table, catalog = options.required("table"), options.below("catalog.") or options.required("catalog")
        return options.made(IcebergSink, table=table, catalog=catalog)


class PostgresDataSource(OptionsDataSource):
    """``spark.dataSource.register(PostgresDataSource)``, then ``df.writeStream.format("ftlayer-postgres")``.

    Options: ``dsn``, ``table``, ``name``; see `PostgresSink`.
    """

    format = "ftlayer-postgres"

    def sink(self, options: DataSourceOptions) -> PostgresSink:
        dsn, table = options.required("dsn"), options.required("table")
        return options.made(PostgresSink, dsn=dsn, table=table)
