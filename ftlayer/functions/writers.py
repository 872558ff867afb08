"""Calling the stream writer of a Python Data Source: rows as Spark hands them, and a message back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def call_write(writer: Any, batches: Iterable[pa.RecordBatch], schema: StructType) -> Any:
    """Have ``writer`` write the rows; return its commit message.

    An Arrow writer gets the batches, a plain one pyspark's `Row`s. Raises `TypeError` for what is no message,
    None included, and whatever the writer raises.
    """
    from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

    takes_arrow = isinstance(writer, DataSourceStreamArrowWriter)
    message = writer.write(iter(batches) if takes_arrow else _rows_of(batches, schema))
    if not isinstance(message, WriterCommitMessage):
        raise TypeError(
            f"{type(writer).__name__}.write returned a {type(message).__name__}, not a WriterCommitMessage: "
            "commit would not learn what was written"
        )
    return message


def _rows_of(batches: Iterable[pa.RecordBatch], schema: StructType) -> Iterator[Any]:
    from pyspark.sql.conversion import ArrowTableToRowsConversion

    for batch in batches:
        yield from ArrowTableToRowsConversion.convert(pa.Table.from_batches([batch]), schema)
