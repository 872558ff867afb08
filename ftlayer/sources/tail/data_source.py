"""`TailSource` as a Python Data Source."""

from __future__ import annotations

from ftlayer.checks import check_text
from ftlayer.config import MIB
from ftlayer.data_source_options import DataSourceOptions
from ftlayer.sources.data_source import QueueDataSource
from ftlayer.sources.tail.disk import ROTATED
from ftlayer.sources.tail.source import TailSource


class TailDataSource(QueueDataSource):
    """``spark.dataSource.register(TailDataSource)``, then ``spark.readStream.format("ftlayer-tail")``.

    Options: ``path`` and ``rotated`` (several with commas between them), ``rotation``, ``start``, ``quiet``,
    ``maxLine``, see `TailSource`; ``spool``, see `ftlayer.sources.queue_stream`: a directory for this query alone, a
    path or any URL of fsspec's, that driver and tasks reach; ``maxRowsPerTrigger`` (100,000). The driver follows the
    files.
    """

    @classmethod
    def name(cls) -> str:
        return "ftlayer-tail"

    def source(self, options: DataSourceOptions) -> TailSource:
        check_text(options.get("path"), "path", "paths of this machine with commas between them")
        return TailSource(
            options.names("path"),
            rotated=options.names("rotated", ",".join(ROTATED)),
            rotation=options.text("rotation", "rename"),
            start=options.text("start", "earliest"),
            quiet=options.text("quiet", "1m"),
            max_line=options.count("maxLine", MIB),
        )
