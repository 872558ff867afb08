"""What the Data Sources of all queues share: a reader with a spool, or with the user's schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ftlayer.common.checks import check_text
from ftlayer.connectors.from_json import JSON_OPTIONS, with_schema
from ftlayer.connectors.queue_stream import QueueStreamReader
from ftlayer.functions.data_sources import DataSourceOptions, OptionsDataSource, from_arrow_schema
from ftlayer.topology.operators import Queue

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

MAX_ROWS = 100_000
"""Of a batch, unless ``maxRowsPerTrigger`` says otherwise."""


class QueueDataSource(OptionsDataSource):
    """What the Data Sources of all queues have in common: a reader with a spool.

    Attributes:
        _queue_class: of the source.
    """

    _queue_class: ClassVar[type[Queue]]

    def source(self, options: DataSourceOptions) -> Queue:
        return options.made(self._queue_class)

    def schema(self) -> StructType:
        """Return the schema that the options say. Raises `ConfigError` for an option that is none."""
        options = self.given()
        source = self.source(options)
        _check_spool(options)
        options.know("maxRowsPerTrigger", *JSON_OPTIONS)
        options.check_all_known()
        return from_arrow_schema(source.schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        options = self.given()
        source = self.source(options)
        spool, rows = _check_spool(options), options.count("maxRowsPerTrigger", MAX_ROWS)
        reader = with_schema(QueueStreamReader(source, spool, rows), source.schema, schema, options)
        options.check_all_known()
        return options.note_limit(reader)


def _check_spool(options: DataSourceOptions) -> str:
    spool = options.get("spool")
    check_text(spool, "spool", "a directory for this query's messages, a path or URL")
    return str(spool)
