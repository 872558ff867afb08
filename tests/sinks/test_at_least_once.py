"""Functions that send rows, as stream writers."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ftlayer.common.failures import RowsRejected
from ftlayer.connectors.at_least_once import SendingWriter, SentMessage


def batch(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch({"n": numbers})


def test_rows_that_are_rejected_are_numbered_through_all_batches() -> None:
    sent: list[int] = []

    def send(rows: pa.RecordBatch) -> None:
        numbers = rows.column(0).to_pylist()
        sent.extend(number for number in numbers if number >= 0)
        negative = {row: f"row {number}" for row, number in enumerate(numbers) if number < 0}
        if negative:
            raise RowsRejected(negative)

    writer = SendingWriter(send)
    assert writer.write(iter([batch(1, 2), batch(3)])) == SentMessage(3)
    with pytest.raises(RowsRejected) as raised:
        writer.write(iter([batch(4, -1), batch(5, 6), batch(-2, 7)]))
    assert raised.value.errors == {1: "row -1", 4: "row -2"}
    assert sent == [1, 2, 3, 4, 5, 6, 7]


def test_any_other_error_is_raised_as_it_is() -> None:
    def send(rows: pa.RecordBatch) -> None:
        raise ValueError("meant to fail")

    with pytest.raises(ValueError, match="meant to fail"):
        SendingWriter(send).write(iter([batch(1)]))
