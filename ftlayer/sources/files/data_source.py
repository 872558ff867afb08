"""`FilesSource`, and `FileSink`, as a Python Data Source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftlayer.sinks import FileDataSource
from ftlayer.sources.data_source import option_count, option_flag
from ftlayer.sources.files.source import MAX_BYTES, MAX_FILES, SPLIT_BYTES, FilesSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class FilesDataSource(FileDataSource):
    """``spark.dataSource.register(FilesDataSource)``, then ``format("ftlayer-files")`` to read or to write.

    Options of a reader: ``path``, ``fileFormat``, ``journal``, ``columns`` (like ``"id bigint, name string"``),
    ``position``, ``malformed``, ``header``, ``delimiter``, ``maxFilesPerTrigger``, ``maxBytesPerTrigger``,
    ``splitBytes``, ``poll``, ``minAge``, ``remember``, ``ignoreMissing``. See `FilesSource`.

    A writer has those of `FileDataSource`.
    """

    def schema(self) -> StructType:
        """Return the schema that the options say."""
        from pyspark.sql.pandas.types import from_arrow_schema

        return from_arrow_schema(self._source().schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        """Return the reader."""
        return self._source()

    def _source(self) -> FilesSource:
        options = self.options
        return FilesSource(
            options.get("path"),  # type: ignore[arg-type]  # It is checked there.
            str(options.get("fileFormat", "text")),
            journal=options.get("journal"),  # type: ignore[arg-type]
            schema=options.get("columns"),
            position=option_flag(options, "position", default=True),
            malformed=str(options.get("malformed", "")),
            header=option_flag(options, "header", default=True),
            delimiter=str(options.get("delimiter", ",")),
            max_files=option_count(options, "maxFilesPerTrigger", MAX_FILES),
            max_bytes=option_count(options, "maxBytesPerTrigger", MAX_BYTES),
            split_bytes=option_count(options, "splitBytes", SPLIT_BYTES),
            poll=str(options.get("poll", "1s")),
            min_age=str(options.get("minAge", "0s")),
            remember=str(options.get("remember", "168h")),
            ignore_missing=option_flag(options, "ignoreMissing", default=False),
        )
