"""`FilesSource`, and `FileSink`, as a Python Data Source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftlayer.data_sources import from_arrow_schema
from ftlayer.sinks import FileDataSource
from ftlayer.sources.files.source import FilesSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class FilesDataSource(FileDataSource):
    """``spark.dataSource.register(FilesDataSource)``, then ``format("ftlayer-files")`` to read or to write.

    Options of a reader are the parameters of `FilesSource`, in camel case (``splitBytes``), but ``storage_options``;
    its ``format`` is called ``fileFormat`` here, ``schema`` ``columns`` (``"id bigint, name string"``), ``max_files``
    ``maxFilesPerTrigger`` and ``max_bytes`` ``maxBytesPerTrigger``. A writer has those of `FileDataSource`.
    """

    def schema(self) -> StructType:
        return from_arrow_schema(self._reader().schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        return self._reader()

    def _reader(self) -> FilesSource:
        options = self.given()
        names = {
            "format": "fileFormat",
            "schema": "columns",
            "max_files": "maxFilesPerTrigger",
            "max_bytes": "maxBytesPerTrigger",
        }
        source = options.made(FilesSource, names)
        options.check_all_known()
        options.note_limit(source)
        return source
