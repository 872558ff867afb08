"""Calling the stream writer of a Python Data Source: rows as Spark hands them, and a message back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ftlayer.common.checks import check_methods, check_ran

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def call_write(writer: Any, batches: Iterable[pa.RecordBatch], schema: StructType) -> Any:
    """Have ``writer`` write the rows; return its commit message.

    An Arrow writer gets the batches, a plain one pyspark's `Row`s. Raises `TypeError` for what is no message,
    None included, and whatever the writer raises.
    """
    from pyspark.sql.datasource import WriterCommitMessage

    from ftlayer.functions.data_sources import DataSourceStreamArrowWriter

    takes_arrow = isinstance(writer, DataSourceStreamArrowWriter)
    message = writer.write(iter(batches) if takes_arrow else _rows_of(batches, schema))
    if not isinstance(message, WriterCommitMessage):
        raise TypeError(
            f"{type(writer).__name__}.write returned a {type(message).__name__}, not a WriterCommitMessage: "
            "commit would not learn what was written"
        )
    return message


def call_commit(writer: Any, messages: Sequence[Any], batch: int) -> None:
    """Have ``writer`` commit; raises `TypeError` if it has not run (`check_ran`), and whatever it raises."""
    check_ran(writer.commit(messages, batch), f"{type(writer).__name__}.commit")


def check_writer(writer: Any, what: str) -> None:
    """Raise `ConfigError` for a stream writer with a method that a call would not run (`check_runs`)."""
    check_methods(writer, ("write", "commit", "abort"), what)


def _rows_of(batches: Iterable[pa.RecordBatch], schema: StructType) -> Iterator[Any]:
    from pyspark.sql.conversion import ArrowTableToRowsConversion

    for batch in batches:
        yield from ArrowTableToRowsConversion.convert(pa.Table.from_batches([batch]), schema)
