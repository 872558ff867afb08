"""String and binary views: rows may share what they show, and take along what others show."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.records.ipc import UNREADABLE, read_one_batch
from ftlayer.vertex.store.rows import take_rows

ROWS = 2_000
MIB = 1 << 20


def stream(column: pa.Array) -> bytes:
    batch = pa.record_batch([column], ["x"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def overlapping(kind: pa.DataType) -> pa.Array:
    """Return a million rows that all show the same MiB."""
    views = np.zeros((MIB, 4), np.int32)
    views[:, 0] = MIB
    views[:, 1] = int.from_bytes(b"aaaa", "little")
    return pa.Array.from_buffers(kind, MIB, [None, pa.py_buffer(views), pa.py_buffer(b"a" * MIB)])


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()])
def test_text_that_is_shown_a_million_times_is_refused(kind: pa.DataType) -> None:
    """Looking at it took hours, and copying it a TiB."""
    column = overlapping(kind)
    nested = pa.ListArray.from_arrays(pa.array([0, MIB], pa.int32()), column)
    coded = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), column)
    for sent in (column, coded, pa.StructArray.from_arrays([column], ["a"]), nested):
        with pytest.raises(ValueError, match="rows share their text"):
            read_one_batch(stream(sent))


def test_what_cannot_be_taken_apart_is_refused() -> None:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([60_000], pa.int32()), pa.array(["x" * MIB]))
    with pytest.raises(UNREADABLE, match="run-end encoded"):
        read_one_batch(stream(runs))
    views = pa.array(["a", "b"], pa.string_view())
    numbers = pa.array([0, 1], pa.int32())
    lists = pa.ListViewArray.from_arrays(numbers, numbers, views)
    either = pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [views, numbers])
    for column in (pa.StructArray.from_arrays([lists], ["a"]), either):
        with pytest.raises(UNREADABLE, match="send them as string"):
            read_one_batch(stream(column))
    plain = pa.ListViewArray.from_arrays(numbers, numbers, pa.array(["a", "b"]))
    assert read_one_batch(stream(plain)).column(0).equals(plain)


def texts() -> pa.Array:
    values = [None if row % 7 == 0 else f"{row:06}" + "y" * 500 for row in range(ROWS)]
    return pa.array(values, pa.string_view())


COLUMNS = {
    "string": texts,
    "binary": lambda: texts().cast(pa.large_binary()).cast(pa.binary_view()),
    "struct": lambda: pa.StructArray.from_arrays([texts(), pa.array(range(ROWS))], ["a", "n"]),
    "list": lambda: pa.ListArray.from_arrays(range(ROWS + 1), texts()),
    "large list": lambda: pa.LargeListArray.from_arrays(range(ROWS + 1), texts()),
    "fixed list": lambda: pa.FixedSizeListArray.from_arrays(texts(), 1),
    "map": lambda: pa.MapArray.from_arrays(range(ROWS + 1), pa.array(range(ROWS)), texts()),
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("rows", [[5], [7, 8, 9], list(range(1, ROWS, 2)), [1_999, 3], []])
def test_rows_take_along_their_own_text_alone(name: str, rows: list[int]) -> None:
    """Every second row of a MiB was written as a GiB."""
    whole = read_one_batch(stream(COLUMNS[name]()))
    assert len(whole) == ROWS
    taken = take_rows(whole, np.array(rows, np.int64))
    taken.validate(full=True)
    assert taken.schema == whole.schema
    assert taken.column(0).to_pylist() == [whole.column(0)[row].as_py() for row in rows]
    assert taken.serialize().size < 1_000 + 700 * len(rows)


def test_columns_beside_them() -> None:
    """Some have no kernel for `take`."""
    rows = [9, 4, 5]
    numbers = pa.array(range(ROWS))
    kinds = pa.array([row % 2 for row in range(ROWS)], pa.int8())
    starts, sizes = pa.array(range(ROWS), pa.int32()), pa.array([1] * ROWS, pa.int32())
    beside = {
        "either": pa.UnionArray.from_sparse(kinds, [numbers, numbers]),
        "lists": pa.ListViewArray.from_arrays(starts, sizes, numbers),
        "coded": pa.DictionaryArray.from_arrays(starts, texts()),
        "null": pa.nulls(ROWS),
    }
    whole = pa.record_batch({"x": texts(), **beside}).replace_schema_metadata({"a": "b"})
    taken = take_rows(whole, np.array(rows, np.int64))
    assert taken.schema.equals(whole.schema, check_metadata=True)
    assert taken.to_pylist() == [whole.slice(row, 1).to_pylist()[0] for row in rows]


def test_a_whole_batch_is_not_copied() -> None:
    whole = pa.record_batch([texts()], ["x"])
    assert take_rows(whole, np.arange(ROWS)) is whole
