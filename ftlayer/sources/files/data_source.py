"""`FilesSource`, and `FileSink`, as a Python Data Source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftlayer.data_sources import DataSourceOptions, from_arrow_schema
from ftlayer.sinks import FileDataSource
from ftlayer.sources.files.source import MAX_BYTES, MAX_FILES, SPLIT_BYTES, FilesSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class FilesDataSource(FileDataSource):
    """``spark.dataSource.register(FilesDataSource)``, then ``format("ftlayer-files")`` to read or to write.

    Options of a reader: ``path``, ``fileFormat``, ``journal``, ``columns`` (like ``"id bigint, name string"``),
    ``position``, ``malformed``, ``header``, ``delimiter``, ``maxFilesPerTrigger``, ``maxBytesPerTrigger``,
    ``splitBytes``, ``poll``, ``minAge``, ``remember``, ``ignoreMissing``, ``encoding``,
    ``errors``. See `FilesSource`.

    A writer has those of `FileDataSource`.
    """

    def schema(self) -> StructType:
        return from_arrow_schema(self._reader().schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        return self._reader()

    def _reader(self) -> FilesSource:
        options = DataSourceOptions(self.options, self.name())
        source = FilesSource(
            options.get("path"),  # type: ignore[arg-type]  # It is checked there.
            options.text("fileFormat", "text"),
            journal=options.get("journal"),  # type: ignore[arg-type]
            schema=options.get("columns"),
            position=options.flag("position", default=True),
            malformed=options.text("malformed", ""),
            header=options.flag("header", default=True),
            delimiter=options.text("delimiter", ","),
            max_files=options.count("maxFilesPerTrigger", MAX_FILES),
            max_bytes=options.count("maxBytesPerTrigger", MAX_BYTES),
            split_bytes=options.count("splitBytes", SPLIT_BYTES),
            poll=options.text("poll", "1s"),
            min_age=options.text("minAge", "0s"),
            remember=options.text("remember", "168h"),
            ignore_missing=options.flag("ignoreMissing", default=False),
            encoding=options.text("encoding", "utf-8"),
            errors=options.text("errors", "fail"),
        )
        options.check_all_known()
        options.note_limit(source)
        return source
