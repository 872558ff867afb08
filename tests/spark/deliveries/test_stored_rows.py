"""Stored rows in the shape that their source has today: what may become what, and what fails a row alone."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.errors import CodecError
from ftlayer.spark.deliveries.stored_rows import fit_rows, may_become

ZONED = pa.timestamp("us", "UTC")
NAIVE = pa.timestamp("us")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (pa.int64(), pa.bool_()),
        (pa.float64(), pa.bool_()),
        (pa.string(), pa.bool_()),
        (pa.int64(), ZONED),
        (ZONED, pa.int64()),
        (ZONED, NAIVE),
        (NAIVE, ZONED),
        (pa.string(), ZONED),
        (pa.date32(), pa.int32()),
        (pa.int64(), pa.list_(pa.int64())),
        (pa.list_(pa.int64()), pa.list_(pa.bool_())),
        (pa.struct([("x", pa.int64())]), pa.struct([("y", pa.int64())])),
        (pa.struct([("x", pa.int64())]), pa.struct([])),
        (pa.map_(pa.string(), pa.int64()), pa.map_(pa.string(), pa.bool_())),
    ],
)
def test_a_type_of_another_kind_is_refused(old: pa.DataType, new: pa.DataType) -> None:
    assert not may_become(old, new)
    with pytest.raises(CodecError, match=r"column 'v' of the source as it is now: .* is not read as"):
        fit_rows(pa.record_batch({"v": pa.nulls(1, old)}), pa.schema([("v", new)]))


@pytest.mark.parametrize(
    "now",
    [
        pa.schema([("w", pa.int64())]),
        pa.schema([("v", pa.bool_())]),
        pa.schema([("v", pa.int64()), pa.field("w", pa.int64(), nullable=False)]),
    ],
    ids=["a column is gone", "another kind of type", "a column that may not be null"],
)
def test_a_refusal_says_how_the_records_that_wait_come_through(now: pa.Schema) -> None:
    """They are no dead letters, and the vertex may be an embedded one: `ftlayer dead` reaches none of them."""
    with pytest.raises(CodecError, match=r"query\.drain\(timeout\) returns True") as raised:
        fit_rows(pa.record_batch({"v": [1]}), now)
    assert "ftlayer dead" not in str(raised.value)


@pytest.mark.parametrize(
    ("old", "new", "values", "fitted"),
    [
        (pa.int32(), pa.int64(), [1, None], [1, None]),
        (pa.int64(), pa.int32(), [1, 2**31], [1, "misfit"]),
        (pa.int64(), pa.float64(), [1, 2**53 + 1], [1.0, "misfit"]),
        (pa.float64(), pa.float32(), [0.5, 0.1, float("inf")], [0.5, "misfit", float("inf")]),
        (pa.float64(), pa.int64(), [2.0, 2.5], [2, "misfit"]),
        (pa.decimal128(4, 2), pa.decimal128(6, 2), [decimal.Decimal("1.25")], [decimal.Decimal("1.25")]),
        (pa.bool_(), pa.int64(), [True, False], [1, 0]),
        (pa.int64(), pa.string(), [7], ["7"]),
        (pa.string(), pa.int64(), ["7", "007", "x"], [7, 7, "misfit"]),
        (
            NAIVE,
            pa.date32(),
            [dt.datetime(2024, 1, 1), dt.datetime(2024, 1, 1, 5)],
            [dt.date(2024, 1, 1), "misfit"],
        ),
        (pa.binary(), pa.string(), [b"x", b"\xff"], ["x", "misfit"]),
        (
            pa.struct([("x", pa.int64())]),
            pa.struct([("x", pa.int32())]),
            [{"x": 1}, {"x": 2**40}],
            [{"x": 1}, "misfit"],
        ),
        (pa.list_(pa.int64()), pa.list_(pa.int16()), [[1], [2**20], None], [[1], "misfit", None]),
    ],
)
def test_a_value_that_fits_is_kept_and_one_that_does_not_fails_alone(
    old: pa.DataType, new: pa.DataType, values: list[Any], fitted: list[Any]
) -> None:
    stored = pa.record_batch({"v": pa.array(values, old)})
    found = fit_rows(stored, pa.schema([("v", new)]))
    (column,) = found.columns
    assert column.type == new
    wrong = {row for row, value in enumerate(fitted) if value == "misfit"}
    assert set(found.misfits) == wrong
    assert column.to_pylist() == [None if row in wrong else value for row, value in enumerate(fitted)]


@given(
    st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), max_size=20),
    st.sampled_from([pa.int8(), pa.int32(), pa.float32(), pa.float64()]),
)
def test_no_number_is_changed_without_a_word(values: list[int | None], new: pa.DataType) -> None:
    found = fit_rows(pa.record_batch({"v": pa.array(values, pa.int64())}), pa.schema([("v", new)]))
    for row, (value, now) in enumerate(zip(values, found.columns[0].to_pylist(), strict=True)):
        assert (now is None and row in found.misfits) or now == value


def test_long_values_are_shown_in_part() -> None:
    found = fit_rows(pa.record_batch({"v": ["x" * 10_000]}), pa.schema([("v", pa.int64())]))
    assert len(found.misfits[0]) < 500
