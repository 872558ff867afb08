"""Records between Arrow and Python, in both forms."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row

from ftlayer.errors import SourceRowError
from ftlayer.functions.conversion import DICTS, VALUES, Form, python_values, records_in_form, to_batch
from ftlayer.functions.keyed import convert
from ftlayer.runtime.connectors.lane import RowMaker

BY_TYPE: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): st.integers(-128, 127),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(max_size=4),
    pa.large_string(): st.text(max_size=4),
    pa.binary(): st.binary(max_size=4),
    pa.date32(): st.dates(),
    pa.decimal128(9, 2): st.decimals(-99_999, 99_999, places=2),
    pa.list_(pa.int64()): st.lists(st.none() | st.integers(-5, 5), max_size=3),
    pa.struct([("x", pa.int64())]): st.fixed_dictionaries({"x": st.none() | st.integers(-5, 5)}),
    pa.timestamp("us", "UTC"): st.datetimes(timezones=st.just(dt.UTC)),
    pa.timestamp("ms"): st.datetimes().map(lambda time: time.replace(microsecond=0)),
}


@st.composite
def tables(draw: Any) -> tuple[pa.Schema, list[tuple[Any, ...]]]:
    kinds = draw(st.lists(st.sampled_from(list(BY_TYPE)), min_size=1, max_size=4))
    schema = pa.schema([(f"c{place}", kind) for place, kind in enumerate(kinds)])
    row = st.tuples(*(st.none() | BY_TYPE[kind] for kind in kinds))
    return schema, draw(st.lists(row, max_size=6))


@settings(max_examples=200, deadline=None)
@given(tables(), st.integers(0, 3))
def test_records_of_all_types_come_back_in_both_forms(
    table: tuple[pa.Schema, list[tuple[Any, ...]]], start: int
) -> None:
    schema, rows = table
    values = [row[0] for row in rows] if len(schema) == 1 else rows
    batch = to_batch(values, schema, VALUES)
    assert batch.schema == schema
    assert list(VALUES.read(batch.slice(start))) == values[start:]
    dicts = [dict(zip(schema.names, row, strict=True)) for row in rows]
    assert DICTS.read(batch) == dicts
    assert to_batch(dicts, schema, DICTS).equals(batch)


ZONES = st.sampled_from([None, "UTC", "Europe/Berlin", "America/New_York", "+02:30", "-11:00"])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.none() | st.integers(-(2**33), 2**36) | st.integers(-(2**63), 2**63 - 1), max_size=4),
    st.sampled_from(["s", "ms", "us"]),
    ZONES,
    st.integers(0, 2),
)
def test_timestamps_are_read_as_arrow_reads_them(
    ticks: list[int | None], unit: str, zone: str | None, start: int
) -> None:
    column = pa.array(ticks, pa.int64()).view(pa.timestamp(unit, zone)).slice(start)
    try:
        expected = column.to_pylist()
    except (ValueError, OverflowError):
        with pytest.raises((ValueError, OverflowError)):
            python_values(column)
        return
    found = python_values(column)
    assert found == expected
    for one, other in zip(found, expected, strict=True):
        if one is not None:
            assert (one.tzinfo, one.fold, one.isoformat()) == (other.tzinfo, other.fold, other.isoformat())


def test_both_sides_of_a_clock_that_was_set_back() -> None:
    instants = [dt.datetime(2024, 10, 27, hour, 30, tzinfo=dt.UTC) for hour in range(3)]
    column = pa.array(instants, pa.timestamp("us", "Europe/Berlin"))
    assert [time.isoformat() for time in python_values(column)] == [
        "2024-10-27T02:30:00+02:00",
        "2024-10-27T02:30:00+01:00",
        "2024-10-27T03:30:00+01:00",
    ]


@pytest.mark.parametrize("form", [DICTS, VALUES])
def test_in_the_place_of_an_unreadable_record_is_the_reason(form: Form) -> None:
    text = pa.array([b"ok", b"\xff"], pa.binary()).view(pa.string())
    when = pa.array([0, 2**62], pa.int64()).view(pa.timestamp("us", "UTC"))
    for name, column in (("text", text), ("when", when)):
        good, bad = records_in_form(pa.record_batch({"n": [1, 2], name: column}), form)
        assert isinstance(bad, ValueError)
        assert f"column {name!r} of the record" in str(bad)
        assert not isinstance(good, Exception)


@pytest.mark.parametrize("bad", [1.5, math.inf, math.nan, "1", True, 2**63, [1], b"1"])
def test_nothing_is_bent_to_fit_an_integer(bad: Any) -> None:
    schema = pa.schema([("n", pa.int64())])
    for rows in ([bad], [1, bad], [bad, 1]):
        with pytest.raises((TypeError, ValueError, OverflowError, pa.ArrowException)):
            to_batch(rows, schema, VALUES)
        with pytest.raises((TypeError, ValueError, OverflowError, pa.ArrowException)):
            to_batch([{"n": value} for value in rows], schema, DICTS)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9) | st.just("bad"), max_size=3), min_size=1, max_size=20))
def test_just_what_does_not_fit_is_left_out(groups: list[list[Any]]) -> None:
    schema = pa.schema([("n", pa.int64())])
    failed: list[int] = []
    rows = [value for group in groups for value in group]
    batch, kept = convert(
        rows, [len(group) for group in groups], schema, VALUES, lambda place, error: failed.append(place)
    )
    assert failed == [place for place, group in enumerate(groups) if "bad" in group]
    assert list(kept) == [0 if "bad" in group else len(group) for group in groups]
    assert batch.column(0).to_pylist() == [v for group in groups if "bad" not in group for v in group]
    assert batch.schema == schema


def test_one_misfit_among_thousands_is_found_in_few_conversions() -> None:
    calls = 0

    class Counting(type(VALUES)):  # type: ignore[misc]
        def columns(self, rows: Any, schema: pa.Schema, *, lax: bool = False) -> Any:
            nonlocal calls
            calls += 1
            return super().columns(rows, schema)

    rows = [*range(3_000), "bad", *range(1_000)]
    failed: list[int] = []
    batch, _ = convert(
        rows,
        [1] * len(rows),
        pa.schema([("n", pa.int64())]),
        Counting(),
        lambda place, _: failed.append(place),
    )
    assert (failed, batch.num_rows) == ([3_000], 4_000)
    assert calls <= 2 * math.ceil(math.log2(len(rows))) + 3


NOON = dt.datetime(2024, 1, 1, 12)
AWARE = NOON.replace(tzinfo=dt.UTC)
TS, NTZ = pa.timestamp("us", "UTC"), pa.timestamp("us")
POINT = pa.struct([("x", pa.int64()), ("y", pa.float64())])


class Named(NamedTuple):
    y: float
    x: int


BENT: list[tuple[pa.DataType, Any]] = [
    *(
        (kind, value)
        for kind in (pa.int8(), pa.int64())
        for value in (1.5, Decimal("1.2"), np.bool_(True), "1", 2**70)
    ),
    *((kind, UUID(int=5)) for kind in (pa.int64(), pa.date32(), TS, pa.duration("us"), pa.time64("us"))),
    (pa.int64(), Fraction(1, 2)),
    (pa.float64(), np.uint64(2**64 - 1)),
    (pa.date32(), np.array(5)),
    (pa.time64("us"), np.datetime64(5, "ns")),
    *((kind, empty) for kind in (POINT, pa.map_(pa.string(), pa.int64())) for empty in ("", b"")),
    *((POINT, value) for value in ([], [(None, 1)], [("x", 1), ("x", 2)])),
    (pa.int64(), np.datetime64(5, "ns")),
    (pa.int64(), np.timedelta64(5, "ns")),
    *(
        (kind, value)
        for kind in (pa.float32(), pa.float64())
        for value in (True, np.bool_(True), "1.5", 2**70 + 1)
    ),
    (pa.float32(), 1e300),
    (pa.float32(), np.float64(-1e300)),
    *((pa.bool_(), value) for value in (1, 1.0, "true")),
    *((pa.decimal128(10, 2), value) for value in (Decimal("1.239"), 1.5, True, "1.5", Decimal("1e9"), 10**9)),
    *((kind, b"ab") for kind in (pa.string(), pa.large_string())),
    (pa.string(), bytearray(b"ab")),
    (pa.string(), 1),
    (pa.binary(), "ab"),
    *(
        (pa.date32(), value)
        for value in (1, 1.5, NOON, AWARE, AWARE.replace(hour=0), pd.NaT, pd.Timestamp(1))
    ),
    *(
        (kind, value)
        for kind in (TS, NTZ)
        for value in (5, 5.0, Decimal(5), True, "2024-01-01", pd.Timestamp(1))
    ),
    (NTZ, AWARE),
    (NTZ, pd.Timestamp("2024-01-01", tz="Asia/Tokyo")),
    (pa.timestamp("ms"), NOON.replace(microsecond=5)),
    (pa.timestamp("s", "UTC"), AWARE.replace(microsecond=5_000)),
    (pa.duration("us"), 5),
    (pa.duration("us"), pd.Timedelta(1)),
    (pa.duration("ms"), dt.timedelta(microseconds=5)),
    (pa.time64("us"), 5),
    (pa.time64("us"), dt.time(1, tzinfo=dt.UTC)),
    *((pa.list_(pa.int64()), value) for value in ([1, 1.5], b"ab", np.array([1.5]), {1: 2}, "12")),
    (pa.list_(pa.list_(NTZ)), [[AWARE]]),
    *(
        (POINT, value)
        for value in ({"z": 1}, {"x": 1, "y": 1.0, "z": 1}, {"x": 1.5}, (1.5, 1.0), Named(1.0, 2))
    ),
    (POINT, Row(y=1.0, x=2)),
    (pa.list_(POINT), [{"z": 1}]),
    (pa.map_(pa.string(), POINT), {"k": {"z": 1}}),
    (pa.map_(pa.string(), pa.int64()), {"k": 1.5}),
    (pa.map_(pa.string(), pa.int64()), [(b"k", 1)]),
    (pa.dictionary(pa.int32(), pa.string()), b"ab"),
]

KEPT: list[tuple[pa.DataType, Any, Any]] = [
    (pa.int64(), 2.0, 2),
    (pa.int64(), np.int8(3), 3),
    (pa.float64(), 3, 3.0),
    (pa.float32(), math.inf, math.inf),
    (pa.float32(), 0.1, float(np.float32(0.1))),
    (pa.decimal128(10, 2), 7, Decimal(7)),
    (pa.decimal128(10, 2), Decimal("1.5"), Decimal("1.5")),
    (pa.date32(), dt.datetime(2024, 1, 1), dt.date(2024, 1, 1)),
    (TS, NOON, AWARE),
    (TS, pd.Timestamp("2024-01-01 12:00", tz="UTC"), AWARE),
    (NTZ, NOON, NOON),
    (pa.timestamp("ms"), NOON.replace(microsecond=5_000), NOON.replace(microsecond=5_000)),
    (pa.duration("us"), dt.timedelta(1), dt.timedelta(1)),
    (pa.binary(), bytearray(b"ab"), b"ab"),
    (pa.list_(pa.int64()), np.array([1, 2]), [1, 2]),
    (POINT, {"x": 1}, {"x": 1, "y": None}),
    (POINT, (1, 2.0), {"x": 1, "y": 2.0}),
    (POINT, Row(x=1, y=2.0), {"x": 1, "y": 2.0}),
    (pa.map_(pa.string(), pa.int64()), {"k": 1}, [("k", 1)]),
]


@pytest.mark.parametrize(("kind", "value"), BENT, ids=lambda each: str(each)[:40])
@pytest.mark.parametrize("form", [VALUES, DICTS])
def test_what_a_column_would_bend_is_a_misfit(kind: pa.DataType, value: Any, form: Form) -> None:
    """Alone, and beside values that fit: nothing comes out as null, or as another value."""
    schema = pa.schema([("v", kind)])
    for values in ([value], [None, value, None]):
        rows = values if form is VALUES else [{"v": each} for each in values]
        with pytest.raises((TypeError, ValueError, OverflowError, pa.ArrowException)):
            to_batch(rows, schema, form)
    with pytest.raises(SourceRowError):
        RowMaker("s", schema).batch([value])


@pytest.mark.parametrize(("kind", "value", "expected"), KEPT, ids=lambda each: str(each)[:40])
def test_what_loses_nothing_is_taken(kind: pa.DataType, value: Any, expected: Any) -> None:
    schema = pa.schema([("v", kind)])
    assert to_batch([{"v": value}, {}], schema).column(0).to_pylist() == [expected, None]
    assert to_batch([value], schema, VALUES).column(0).to_pylist() == [expected]


def test_tuples_with_names_go_by_name() -> None:
    schema = pa.schema([("x", pa.int64()), ("y", pa.float64())])

    class Other(NamedTuple):
        a: int
        b: float

    class Wrong(NamedTuple):
        a: int
        x: float

    for row in (Row(y=2.0, x=1), Row(x=1, y=2.0), Named(2.0, 1), (1, 2.0), Other(1, 2.0)):
        assert to_batch([row, (3, 4.0)], schema, VALUES).to_pylist()[0] == {"x": 1, "y": 2.0}
        assert RowMaker("s", schema).batch([row]).to_pylist() == [{"x": 1, "y": 2.0}]
    for row in (Row(x=1, z=2.0), Wrong(1, 2.0)):
        with pytest.raises(TypeError, match="is not one of x, y"):
            to_batch([row], schema, VALUES)


def test_keys_that_are_no_field_are_left_out_where_that_is_asked_for() -> None:
    schema = pa.schema([("p", pa.list_(POINT))])
    rows = [{"p": [{"x": 1, "z": 2}], "q": 3}]
    assert to_batch(rows, schema, lax=True).to_pylist() == [{"p": [{"x": 1, "y": None}]}]
    with pytest.raises(TypeError, match="no column 'q'"):
        to_batch(rows, schema)
