"""What the Data Sources of all connectors share: a queue's reader with a spool, and options that are numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from ftlayer.checks import MOST, check_text
from ftlayer.errors import ConfigError
from ftlayer.sources.json_stream import with_schema
from ftlayer.sources.queue_stream import QueueStreamReader
from ftlayer.topology.queues import Queue

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

MAX_ROWS = 100_000
"""Of a batch, unless ``maxRowsPerTrigger`` says otherwise."""


class QueueDataSource(DataSource):
    """What the Data Sources of all queues have in common: a reader with a spool."""

    def source(self) -> Queue:
        """Return the queue that the options say. Raises `ConfigError`."""
        raise NotImplementedError

    def schema(self) -> StructType:
        """Return the schema that the options say."""
        from pyspark.sql.pandas.types import from_arrow_schema

        return from_arrow_schema(self.source().schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        """Return the reader."""
        spool = self.options.get("spool")
        check_text(spool, "spool", "a directory for this query's messages, a path or URL")
        source = self.source()
        reader = QueueStreamReader(
            source, str(spool), option_count(self.options, "maxRowsPerTrigger", MAX_ROWS)
        )
        return with_schema(reader, source.schema, schema, self.options)


def option_count(options: Any, option: str, default: int) -> int:
    """Return an option of a Data Source that is a number of at least 1. Raises `ConfigError`."""
    text = str(options.get(option, default))
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise ConfigError(f"{option}: expected a number from 1 to {MOST}, got {text!r}")
    return int(text)


def option_flag(options: Any, option: str, *, default: bool) -> bool:
    """Return an option of a Data Source that is true or false. Raises `ConfigError`."""
    text = str(options.get(option, default)).lower()
    if text not in {"true", "false"}:
        raise ConfigError(f"{option}: expected true or false, got {text!r}")
    return text == "true"
