"""Records to Arrow and back by the C extension: the same as Arrow's own conversion, or nothing."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.functions.conversion import plain_columns, read_plain
from ftlayer.records.kernels import native

_INTEGERS = {
    bits: st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) | st.integers(-3, 3)
    for bits in (8, 16, 32, 64)
}
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_VALUES = [
    (pa.bool_(), st.booleans()),
    *((getattr(pa, f"int{bits}")(), values) for bits, values in _INTEGERS.items()),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.string(), _TEXT),
    (pa.binary(), st.binary(max_size=12)),
]


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.Schema, list[object]]:
    chosen = draw(st.lists(st.sampled_from(_VALUES), min_size=1, max_size=5))
    nullable = draw(st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen)))
    fields, columns = [], []
    rows = draw(st.integers(0, 40))
    for place, ((kind, values), nulls) in enumerate(zip(chosen, nullable, strict=True)):
        fields.append(pa.field(f"c{place}", kind, nullable=nulls))
        cell = st.none() | values if nulls else values
        columns.append(draw(st.lists(cell, min_size=rows, max_size=rows)))
    records = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
    return pa.schema(fields), list(records)


def batch_of(columns: list[pa.Array | list[object]], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


@settings(deadline=None)
@given(tables(), st.data())
def test_plain_records_become_what_arrow_makes_of_them_and_come_back(
    table: tuple[pa.Schema, list[object]], data: st.DataObject
) -> None:
    schema, records = table
    columns = plain_columns(records, schema)
    assert columns is not None
    batch = batch_of(columns, schema)
    batch.validate(full=True)
    rows = [(record,) for record in records] if len(schema) == 1 else records
    expected = [[row[place] for row in rows] for place in range(len(schema))]  # type: ignore[index]
    for column, values, field in zip(batch.columns, expected, schema, strict=True):
        assert column.equals(pa.array(values, field.type))
    start = data.draw(st.integers(0, len(records)))
    length = data.draw(st.integers(0, len(records) - start))
    assert read_plain(batch.slice(start, length)) == records[start : start + length]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int8(), 128),
        (pa.int16(), -(2**15) - 1),
        (pa.int32(), 2**31),
        (pa.int64(), 2**63),
        (pa.int64(), 1.0),
        (pa.int64(), True),
        (pa.int64(), "1"),
        (pa.float64(), 1),
        (pa.float64(), Decimal(1)),
        (pa.bool_(), 1),
        (pa.string(), b"bytes"),
        (pa.string(), "\ud800"),
        (pa.binary(), "text"),
        (pa.binary(), bytearray(b"x")),
    ],
)
def test_what_is_not_plain_is_left_to_others(kind: pa.DataType, value: object) -> None:
    schema = pa.schema([("a", kind), ("b", pa.int64())])
    plain = [(None, 1)] * 20
    assert plain_columns(plain, schema) is not None
    assert plain_columns([*plain, (value, 2)], schema) is None


@pytest.mark.parametrize("record", [(1,), (1, 2, 3), [1, 2], 1, None, {"a": 1, "b": 2}])
def test_a_record_that_is_no_tuple_of_the_width_is_left_to_others(record: object) -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.int64())])
    assert plain_columns([(1, 2), record], schema) is None


def test_a_null_where_there_may_be_none_is_left_to_others() -> None:
    schema = pa.schema([pa.field("a", pa.int64(), nullable=False)])
    assert plain_columns([1, None], schema) is None


def test_columns_of_other_types_come_as_lists() -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.list_(pa.int64()))])
    columns = plain_columns([(1, [2]), (3, None)], schema)
    assert columns is not None
    assert columns[0].equals(pa.array([1, 3]))
    assert columns[1] == [[2], None]
    assert read_plain(batch_of(columns, schema)) is None
    assert plain_columns([[1], [2]], pa.schema([("b", pa.list_(pa.int64()))])) is None


def test_text_grows_as_long_as_it_has_to() -> None:
    texts = ["", "é" * 10_000, "x" * 100_000, ""]
    columns = plain_columns(texts, pa.schema([("a", pa.string())]))
    assert columns is not None
    assert columns[0].to_pylist() == texts


def test_text_that_is_not_utf8_is_a_value_error() -> None:
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    )
    with pytest.raises(ValueError, match="utf-8"):
        read_plain(pa.RecordBatch.from_arrays([broken], ["a"]))


def test_kernels_refuse_what_they_would_misread() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1, 2])], ["a"])
    with pytest.raises(IndexError):
        native.read_records(*batch.__arrow_c_array__(), 1, 2)
    with pytest.raises(TypeError):
        native.read_records(*pa.array([1]).__arrow_c_array__(), 0, 1)
    with pytest.raises(ValueError, match="each column"):
        native.write_records([1], b"l", b"")
    with pytest.raises(ValueError, match="type 'x'"):
        native.write_records([1], b"x", b"\1")
    with pytest.raises(TypeError, match="list or a tuple"):
        native.write_records({1}, b"l", b"\1")  # type: ignore[arg-type]
