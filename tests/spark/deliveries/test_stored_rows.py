"""Stored rows in the shape that their source has today: what may become what, and what fails a row alone."""

from __future__ import annotations

import datetime as dt
import decimal
import fractions
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.errors import CodecError
from ftlayer.spark.deliveries.source import fit_rows, may_become

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
        (pa.int64(), pa.decimal128(10, 2), [7, None, 10**8], [decimal.Decimal(7), None, "misfit"]),
        (pa.decimal128(10, 2), pa.int32(), [decimal.Decimal(7), decimal.Decimal("1.5")], [7, "misfit"]),
        (pa.bool_(), pa.decimal128(3, 1), [True], [decimal.Decimal(1)]),
        (pa.bool_(), pa.int64(), [True, False], [1, 0]),
        (pa.int64(), pa.string(), [7], ["7"]),
        (pa.string(), pa.int64(), ["7", "007", "x", "0x10", None], [7, 7, "misfit", "misfit", None]),
        (pa.string(), pa.float64(), ["1e400", "-inf", "0.1"], ["misfit", float("-inf"), 0.1]),
        (pa.string(), pa.float32(), ["1e39", "Infinity", None], ["misfit", float("inf"), None]),
        (
            pa.list_(pa.int32()),
            pa.list_(pa.field("element", pa.int64(), False)),
            [[1], [2, None], None, []],
            [[1], "misfit", None, []],
        ),
        (
            pa.map_(pa.string(), pa.list_(pa.int32())),
            pa.map_(pa.string(), pa.field("value", pa.list_(pa.field("element", pa.int32(), False)), False)),
            [[("a", [1])], [("a", None)], [("a", [None])], []],
            [[("a", [1])], "misfit", "misfit", []],
        ),
        (
            pa.struct([("x", pa.int64())]),
            pa.struct([pa.field("x", pa.int64(), False)]),
            [{"x": 1}, {"x": None}, None],
            [{"x": 1}, "misfit", None],
        ),
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


NUMBERS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_()),
    *(pa.decimal128(*each) for each in ((3, 1), (10, 2), (19, 0), (38, 0), (38, 18), (38, 37))),
]


def numbers_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_integer(kind):
        return st.integers(-2, 99) | st.integers(-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1)
    if pa.types.is_floating(kind):
        return st.integers(-2, 99).map(float) | st.floats(width=kind.bit_width)
    most = 10**kind.precision - 1
    digits = st.integers(-most, most) | st.integers(-2, 99).map(lambda n: min(most, n * 10**kind.scale))
    return digits.map(lambda n: decimal.Decimal(n).scaleb(-kind.scale, decimal.Context(prec=80)))


@settings(max_examples=400, deadline=None)
@given(
    st.data(),
    st.sampled_from(NUMBERS),
    st.sampled_from(NUMBERS),
    st.sampled_from(["plain", "list", "struct", "map"]),
)
def test_whether_a_number_fits_says_its_value(
    data: st.DataObject, old: pa.DataType, new: pa.DataType, nested: str
) -> None:
    """Each is kept or fails by itself: no column fails as a whole, whatever the types would hold at most."""
    values = data.draw(st.lists(st.none() | numbers_of(old), min_size=1, max_size=6))
    if old != new and pa.types.is_boolean(new):
        return

    def within(kind: pa.DataType) -> pa.DataType:
        if nested == "map":
            return pa.map_(pa.string(), kind)
        return {"plain": kind, "list": pa.list_(kind), "struct": pa.struct([("x", kind)])}[nested]

    def put(value: Any) -> Any:
        return {"plain": value, "list": [value], "struct": {"x": value}, "map": [("k", value)]}[nested]

    stored = pa.record_batch({"v": pa.array([put(value) for value in values], within(old))})
    found = fit_rows(stored, pa.schema([("v", within(new))]))
    for row, (value, now) in enumerate(zip(values, found.columns[0].to_pylist(), strict=True)):
        if pa.types.is_floating(old) and pa.types.is_decimal(new) and value is not None:
            # 0.1 is 0.10, though no float is.
            assert row in found.misfits or _as_float(old, _out(now, nested)) == value
        elif pa.types.is_decimal(old) and pa.types.is_floating(new) and value is not None:
            assert row in found.misfits or abs(_out(now, nested) - float(value)) <= abs(float(value)) * 2**-23
        else:
            assert (row in found.misfits) is not _holds(new, value, old), (value, now, found.misfits)
            if row not in found.misfits and value == value:
                assert now == put(value)


def _out(value: Any, nested: str) -> Any:
    return {"plain": lambda: value, "struct": lambda: value["x"]}.get(
        nested, lambda: value[0][1] if nested == "map" else value[0]
    )()


def _as_float(kind: pa.DataType, value: Any) -> float:
    with np.errstate(over="ignore"):
        return float(value) if kind.bit_width == 64 else float(np.float32(value))


def _holds(kind: pa.DataType, value: Any, old: pa.DataType) -> bool:
    if value is None or kind == old:
        return True
    if pa.types.is_floating(kind):
        return _as_float(kind, value) == value or value != value
    if value != value or value in (float("inf"), float("-inf")) or str(value) == "-0.0":
        return False
    exact = fractions.Fraction(value)
    if pa.types.is_integer(kind):
        return exact.denominator == 1 and -(2 ** (kind.bit_width - 1)) <= exact < 2 ** (kind.bit_width - 1)
    digits = exact * 10**kind.scale
    return digits.denominator == 1 and abs(digits) < 10**kind.precision


@pytest.mark.parametrize("within", [lambda kind: kind, pa.list_, lambda kind: pa.struct([("x", kind)])])
def test_a_decimal_has_no_more_digits_than_its_type(within: Callable[[pa.DataType], pa.DataType]) -> None:
    put = {"list": lambda n: [n], "struct": lambda n: {"x": n}}.get(
        str(within(pa.int8())).split("<")[0], lambda n: n
    )
    stored = pa.record_batch({"v": pa.array([put(100), put(99)], within(pa.int8()))})
    found = fit_rows(stored, pa.schema([("v", within(pa.decimal128(3, 1)))]))
    assert list(found.misfits) == [0]
    assert found.columns[0].to_pylist() == [None, put(decimal.Decimal("99.0"))]


def test_an_integer_that_a_float_has_is_kept_however_large() -> None:
    stored = pa.record_batch(
        {"v": pa.array([1 << 24, (1 << 24) + 1, (1 << 24) + 2, (1 << 31) - 1], pa.int32())}
    )
    found = fit_rows(stored, pa.schema([("v", pa.float32())]))
    assert sorted(found.misfits) == [1, 3]
    assert found.columns[0].to_pylist() == [1 << 24, None, (1 << 24) + 2, None]
