"""The JSON objects in a connector's messages as a stream reader of a Python Data Source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from ftlayer.data_source_options import DataSourceOptions
from ftlayer.errors import ConfigError
from ftlayer.sources.from_json import FromJson
from ftlayer.sources.logs import LogReader
from ftlayer.sources.queue_stream import QueueStreamReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


JSON_OPTIONS = ("column", "keep")
"""The options of `with_schema`."""


class JsonReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A reader of messages whose rows are the JSON objects in them."""

    def __init__(self, messages: LogReader | QueueStreamReader, from_json: FromJson) -> None:
        self._messages = messages
        self._from_json = from_json

    def initialOffset(self) -> Any:  # noqa: N802 - Spark's name
        """As the reader of messages does, here and below."""
        return self._messages.initialOffset()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return self._messages.getDefaultReadLimit()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._messages.prepareForTriggerAvailableNow()

    def latestOffset(self, start: Any, limit: ReadLimit) -> Any:  # noqa: N802 - Spark's name
        return self._messages.latestOffset(start, limit)

    def reportLatestOffset(self) -> Any:  # noqa: N802 - Spark's name
        return self._messages.reportLatestOffset()

    def partitions(self, start: Any, end: Any) -> Sequence[InputPartition]:
        return self._messages.partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the objects of a partition's messages. Raises `ValueError` for the first one that does not fit."""
        return map(self._objects, self._messages.read(partition))

    def _objects(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        try:
            return self._from_json(batch)
        except ValueError:
            # One by one, for the message of the one that does not fit.
            for row in range(batch.num_rows):
                self._from_json(batch.slice(row, 1))
            raise

    def commit(self, end: Any) -> None:
        self._messages.commit(end)

    def stop(self) -> None:
        self._messages.stop()


def with_schema(
    reader: LogReader | QueueStreamReader, messages: pa.Schema, wanted: StructType, options: DataSourceOptions
) -> DataSourceStreamReader:
    """Return the reader, or one of the JSON objects in its messages, if the user's schema is not that of messages.

    Options: ``column``, where messages have the object (``value``); ``keep``, names of columns of messages that the
    schema has too, with commas between them. Raises `ConfigError` as `FromJson` does.
    """
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    options.know(*JSON_OPTIONS)
    if wanted == from_arrow_schema(messages):
        return reader
    column, keep = options.text("column", "value"), options.names("keep")
    given = to_arrow_schema(wanted)
    for name in keep:
        if name not in given.names:
            raise ConfigError(f"keep: the schema has no column {name!r}")
    objects = pa.schema([field for field in given if field.name not in keep])
    from_json = FromJson(objects, column=column, keep=keep)
    if from_json.result_schema(messages).names != given.names:
        raise ConfigError("schema: the columns of keep come last, in their order")
    return JsonReader(reader, from_json)
