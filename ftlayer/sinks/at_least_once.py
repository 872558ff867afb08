"""Sinks that send each row at least once, as stream writers: for Spark's own queries, and wrapped ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from ftlayer.failures import RowsRejected


@dataclass(frozen=True)
class SentMessage(WriterCommitMessage):
    """How many rows one `SendingWriter.write` has sent."""

    rows: int


class SendingWriter(DataSourceStreamArrowWriter):
    """Sends rows in ``write``, in the tasks; ``commit`` and ``abort`` have nothing to do.

    A task that fails, or is run again, sends its rows again.
    """

    def __init__(self, send: Callable[[pa.RecordBatch], Any]) -> None:
        """``send`` is the function that is the sink of a topology; it returns when the rows have arrived."""
        self._send = send

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SentMessage:
        """Send rows. Raises what ``send`` does; `RowsRejected` numbers the rows through all batches."""
        rows = 0
        rejected: dict[int, Exception | str] = {}
        for batch in iterator:
            try:
                self._send(batch)
            except RowsRejected as error:
                rejected |= {rows + row: reason for row, reason in error.errors.items()}
            rows += batch.num_rows
        if rejected:
            raise RowsRejected(rejected)
        return SentMessage(rows)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Nothing is left to do."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """What was sent cannot be called back."""
