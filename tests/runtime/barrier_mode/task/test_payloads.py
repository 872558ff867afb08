"""Rows packed one by one, and read together."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ftlayer.records.ipc import may_share, read_one_batch, row_alone
from ftlayer.runtime.barrier_mode.task.failing.attempts import OtherColumnsError, RowPacker, rows_of

COLUMNS: list[Any] = [
    pa.array([1, None, 3]),
    pa.array(["a", "b" * 70, None]),
    pa.array([[1, 2], [], None]),
    pa.array([{"x": 1}, None, {"x": 3}]),
    pa.array(["a", "b", None]).dictionary_encode(),
    pa.array([["a"], None, ["b", "a"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
    pa.array(["a", "b" * 70, None], pa.string_view()),
]


def packed(batch: pa.RecordBatch, packer: RowPacker) -> list[bytes]:
    shares = may_share(batch.schema)
    return [packer.pack(row_alone(batch, row, shares=shares)) for row in range(batch.num_rows)]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: str(column.type)[:20])
def test_rows_come_back_together_as_they_were(column: Any) -> None:
    schema = pa.schema([pa.field("n", pa.int64(), nullable=False), pa.field("c", column.type)])
    batch = pa.record_batch([pa.array([7, 8, 9]), column], schema=schema)
    payloads = packed(batch, RowPacker())
    assert rows_of(payloads, schema).to_pylist() == batch.to_pylist()
    assert rows_of(payloads[2:0:-1], schema).to_pylist() == batch.to_pylist()[2:0:-1]
    assert rows_of(payloads[:1], schema).schema == schema


def test_each_payload_is_a_stream_of_its_own_with_the_metadata_of_its_row() -> None:
    packer = RowPacker()
    for metadata in (None, {"a": "1"}, {"a": "2"}):
        schema = pa.schema([pa.field("n", pa.int64())], metadata)
        (payload,) = packed(pa.record_batch([pa.array([7])], schema=schema), packer)
        found = read_one_batch(payload)
        assert found.to_pylist() == [{"n": 7}]
        assert found.schema.equals(schema, check_metadata=True)
    other = pa.record_batch({"text": ["x"]})
    assert read_one_batch(*packed(other, packer)).equals(other)


def test_rows_with_other_metadata_than_the_input_are_read() -> None:
    schema = pa.schema([pa.field("n", pa.int64())])
    noted = pa.record_batch([pa.array([7, 8])], schema=schema.with_metadata({"a": "1"}))
    assert rows_of(packed(noted, RowPacker()), schema).to_pylist() == [{"n": 7}, {"n": 8}]


def test_rows_of_another_schema_are_not_taken_for_those_of_the_input() -> None:
    payloads = packed(pa.record_batch({"n": [7]}), RowPacker()) + packed(
        pa.record_batch({"m": ["x"]}), RowPacker()
    )
    with pytest.raises(OtherColumnsError):
        rows_of(payloads, pa.schema([pa.field("n", pa.int64())]))


def test_streams_of_many_batches_or_of_none_are_told_apart_from_rows() -> None:
    schema = pa.schema([pa.field("n", pa.int64())])
    first, second = packed(pa.record_batch([pa.array([7, 8])], schema=schema), RowPacker())
    head, end = bytes(schema.serialize()), second[-8:]
    both = first[: -len(end)] + second[len(head) :]
    assert rows_of([both, second], schema).to_pylist() == [{"n": 7}, {"n": 8}]
    for payloads in ([head + end], [first, head + end]):
        with pytest.raises((StopIteration, pa.ArrowException)):
            rows_of(payloads, schema)
