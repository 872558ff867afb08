"""Which rows a table's columns can hold, by their types."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.common.failures import RowsRejected
from ftlayer.connectors.fitting import as_column, check_fits, chunked, fitted, halved, is_held_by
from ftlayer.errors import SinkError

POINT = pa.struct([("x", pa.int32()), ("y", pa.int32())])
WIDE_POINT = pa.struct([("x", pa.int64()), ("y", pa.int64())])

HELD = [
    (pa.int8(), pa.int64()),
    (pa.uint8(), pa.int16()),
    (pa.float32(), pa.float64()),
    (pa.string(), pa.large_string()),
    (pa.string_view(), pa.string()),
    (pa.dictionary(pa.int32(), pa.string()), pa.string()),
    (pa.large_binary(), pa.binary()),
    (pa.decimal128(10, 2), pa.decimal128(12, 4)),
    (pa.timestamp("ms", "Europe/Berlin"), pa.timestamp("us", "UTC")),
    (pa.null(), pa.date32()),
    (pa.list_(pa.int32()), pa.large_list(pa.int64())),
    (POINT, WIDE_POINT),
    (pa.map_(pa.string(), pa.int32()), pa.map_(pa.large_string(), pa.int64())),
]

NOT_HELD = [
    (pa.int64(), pa.int32()),
    (pa.uint64(), pa.int64()),
    (pa.int32(), pa.uint64()),
    (pa.int64(), pa.float64()),
    (pa.float64(), pa.float32()),
    (pa.decimal128(10, 2), pa.decimal128(10, 4)),
    (pa.string(), pa.binary()),
    (pa.timestamp("us"), pa.timestamp("us", "UTC")),
    (pa.string(), pa.int64()),
    (pa.bool_(), pa.int8()),
    (WIDE_POINT, POINT),
    (pa.struct([("y", pa.int32()), ("x", pa.int32())]), POINT),
    (pa.list_(pa.int64()), pa.list_(pa.int32())),
    (pa.int64(), pa.list_(pa.int64())),
]


@pytest.mark.parametrize(("kind", "target"), HELD, ids=str)
def test_what_is_held_is_cast_as_it_is(kind: Any, target: Any) -> None:
    assert is_held_by(kind, target)
    rows, table = pa.table({"a": pa.nulls(2, kind)}), pa.schema([("a", target)])
    check_fits(rows.schema, table, "it")
    assert fitted(rows, table, "it", 0).schema == table


@pytest.mark.parametrize(("kind", "target"), NOT_HELD, ids=str)
def test_what_may_lose_something_is_refused(kind: Any, target: Any) -> None:
    with pytest.raises(SinkError, match="it: column 'a' is "):
        check_fits(pa.schema([("a", kind)]), pa.schema([("a", target)]), "it")


def test_values_stay_what_they_were() -> None:
    rows = pa.table(
        {
            "points": pa.array([[{"x": 1, "y": 2}], None], pa.list_(POINT)),
            "names": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int32())),
            "word": pa.array(["b", "b"]).dictionary_encode(),
        }
    )
    table = pa.schema(
        [
            ("word", pa.large_string()),
            ("more", pa.date32()),
            ("points", pa.list_(WIDE_POINT)),
            ("names", pa.map_(pa.string(), pa.int64())),
        ]
    )
    assert fitted(rows, table, "it", 0).to_pylist() == [
        {"word": "b", "more": None, "points": [{"x": 1, "y": 2}], "names": [("a", 1)]},
        {"word": "b", "more": None, "points": None, "names": None},
    ]


def test_columns_that_are_made() -> None:
    local = pa.timestamp("ns", "Europe/Berlin")
    assert as_column(local) == pa.timestamp("us", "UTC")
    assert as_column(pa.timestamp("ms")) == pa.timestamp("us")
    nested = pa.struct(
        [("a", pa.list_(pa.dictionary(pa.int32(), pa.large_string()))), ("b", pa.map_(pa.string(), local))]
    )
    made = pa.struct([("a", pa.list_(pa.string())), ("b", pa.map_(pa.string(), pa.timestamp("us", "UTC")))])
    assert as_column(nested) == made
    assert is_held_by(nested, made)


def test_two_columns_of_one_name_are_refused() -> None:
    number = pa.field("a", pa.int64())
    with pytest.raises(SinkError, match="two columns of the rows have the same name"):
        check_fits(pa.schema([number, number]), pa.schema([number]), "it")


def test_rows_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftlayer.connectors.fitting.CHUNK_BYTES", 20)
    batches = [pa.record_batch({"a": pa.array(list(range(size)), pa.int64())}) for size in (0, 1, 2, 0, 1, 5)]
    assert [part.num_rows for part in chunked(iter(batches))] == [3, 6]
    assert list(chunked(iter(batches[:1]))) == []


@given(st.integers(1, 3000), st.data())
def test_what_is_refused_is_found_in_bounded_tries(rows: int, data: st.DataObject) -> None:
    """As the page of PostgreSQL says."""
    step = data.draw(st.integers(1, rows))
    refused = set(range(0, rows, step)) | data.draw(st.sets(st.integers(0, rows - 1), max_size=20))
    tries = 0

    def why(start: int, end: int) -> str:
        nonlocal tries
        tries += 1
        return "no" if any(row in refused for row in range(start, end)) else ""

    assert list(halved(rows, why)) == sorted(refused)
    bad = len(refused)
    assert tries <= min(2 * rows, 2 * bad * (1 + math.ceil(math.log2(rows / bad))) + 1)


def test_rows_beside_one_that_does_not_fit_are_not_refused_for_its_sake() -> None:
    """Arrow casts lists with all the values that lie beside those of a slice."""
    lists = pa.array([[1], [2], [2**62], [3], None], pa.list_(pa.timestamp("ms")))
    table = pa.schema([("a", pa.list_(pa.timestamp("us")))])
    with pytest.raises(RowsRejected) as rejected:
        fitted(pa.table({"a": lists}), table, "it", 10)
    assert list(rejected.value.errors) == [12]
    assert fitted(pa.table({"a": lists}).slice(3), table, "it", 0).num_rows == 2
