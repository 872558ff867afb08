"""`TailSource` as a Python Data Source."""

from __future__ import annotations

from ftlayer.checks import check_text
from ftlayer.config import MIB
from ftlayer.sources.data_source import QueueDataSource, option_count
from ftlayer.sources.tail.disk import ROTATED
from ftlayer.sources.tail.source import TailSource


class TailDataSource(QueueDataSource):
    """``spark.dataSource.register(TailDataSource)``, then ``spark.readStream.format("ftlayer-tail")``.

    Options: ``path`` and ``rotated`` (several with commas between them), ``rotation``, ``start``, ``quiet``,
    ``maxLine``, see `TailSource`; ``spool``, see `ftlayer.sources.spool`: a directory for this query alone, a path or
    any URL of fsspec's, that driver and tasks reach; ``maxRowsPerTrigger`` (100,000). The driver follows the files.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "ftlayer-tail"

    def source(self) -> TailSource:
        """See `QueueDataSource.source`."""
        options = self.options
        paths = options.get("path", "")
        check_text(paths, "path", "paths of this machine with commas between them")
        return TailSource(
            _cut(paths),
            rotated=_cut(options.get("rotated", ",".join(ROTATED))),
            rotation=str(options.get("rotation", "rename")),
            start=str(options.get("start", "earliest")),
            quiet=str(options.get("quiet", "1m")),
            max_line=option_count(options, "maxLine", MIB),
        )


def _cut(texts: str) -> list[str]:
    return [text.strip() for text in texts.split(",") if text.strip()]
