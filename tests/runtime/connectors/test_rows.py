from __future__ import annotations

import datetime
import decimal
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.errors import SourceChangedError, SourceError
from ftlayer.runtime.connectors.lane import Misfit, RowMaker, SparkRowMaker, skipped, slices

ID = pa.schema([("id", pa.int64())])
PAIR = pa.schema([("id", pa.int64()), ("name", pa.string())])


def maker(schema: pa.Schema) -> RowMaker:
    return RowMaker("clicks", schema)


def test_bare_values_and_tuples() -> None:
    assert maker(ID).batch([1, None, 3]).to_pydict() == {"id": [1, None, 3]}
    assert maker(PAIR).batch([(1, "a"), [2, None]]).to_pydict() == {"id": [1, 2], "name": ["a", None]}


def test_a_bare_list_is_one_value() -> None:
    schema = pa.schema([("tags", pa.list_(pa.string()))])
    assert maker(schema).batch([["a"], ["b", "c"]]).to_pydict() == {"tags": [["a"], ["b", "c"]]}


def test_rows_go_by_name() -> None:
    from pyspark.sql import Row

    assert maker(PAIR).batch([Row(name="a", id=1), (2, "b")]).to_pydict() == {
        "id": [1, 2],
        "name": ["a", "b"],
    }
    assert maker(ID).batch([Row(id=1), 2]).to_pydict() == {"id": [1, 2]}
    with pytest.raises(SourceError, match="a Row of id, nick is not one of id, name"):
        maker(PAIR).batch([Row(id=1, nick="a")])


@pytest.mark.parametrize(
    ("schema", "bad"),
    [
        (ID, "1"),
        (ID, 1.5),
        (ID, True),
        (ID, 2**63),
        (ID, math.nan),
        (PAIR, (1,)),
        (PAIR, (1, "a", 2)),
        (PAIR, "ab"),
        (PAIR, {"id": 1, "name": "a"}),
        (PAIR, 7),
        (PAIR, None),
        (PAIR, (1, 2)),
        (PAIR, (1, "\ud800")),
        (pa.schema([pa.field("id", pa.int64(), nullable=False)]), None),
        (pa.schema([("id", pa.int8())]), 300),
    ],
)
def test_what_does_not_fit_is_shown(schema: pa.Schema, bad: Any) -> None:
    good = {1: 5, 2: (5, "x")}[len(schema)]
    with pytest.raises(
        SourceError, match=r"source 'clicks' gave .* does not fit its schema \(id int"
    ) as caught:
        maker(schema).batch([good, bad, good])
    assert repr(bad)[:150] in str(caught.value)


def test_a_large_misfit_is_shown_in_part() -> None:
    with pytest.raises(SourceError) as caught:
        maker(ID).batch(["x" * 10_000_000])
    assert len(str(caught.value)) < 800


def test_a_misfit_that_cannot_be_shown() -> None:
    class Shy:
        def __index__(self) -> int:
            raise SystemExit("no")

        def __repr__(self) -> str:
            raise KeyboardInterrupt("no")

    with pytest.raises(SourceError, match="a Shy"):
        maker(ID).batch([Shy()])


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.none()))
def test_integers_come_through(rows: list[int | None]) -> None:
    assert maker(ID).batch(rows).to_pydict() == {"id": rows}


@given(st.lists(st.floats() | st.none()))
def test_floats_come_through(rows: list[float | None]) -> None:
    batch = maker(pa.schema([("x", pa.float64())])).batch(rows)
    assert repr(batch.column(0).to_pylist()) == repr(rows)


def test_record_batches_are_put_in_order() -> None:
    given_batch = pa.record_batch({"name": ["a"], "id": pa.array([1], pa.int32())})
    (checked,) = maker(PAIR).checked(given_batch)
    assert isinstance(checked, pa.RecordBatch)
    assert checked.schema.equals(PAIR)
    assert checked.to_pydict() == {"id": [1], "name": ["a"]}


def test_record_batches_lose_metadata_of_their_own() -> None:
    other = ID.with_metadata({"from": "pandas"})
    (checked,) = maker(ID).checked(pa.record_batch({"id": [1]}, schema=other))
    assert isinstance(checked, pa.RecordBatch)
    assert checked.schema.equals(ID, check_metadata=True)


@pytest.mark.parametrize(
    "columns",
    [
        {"id": [1, 2]},
        {"id": [1, 2], "name": ["a", "b"], "more": [0, 0]},
        {"id": ["x", "y"], "name": ["a", "b"]},
        {"id": [1.5, 2.5], "name": ["a", "b"]},
    ],
)
def test_record_batches_of_which_no_row_fits(columns: dict[str, list[Any]]) -> None:
    parts = maker(PAIR).checked(pa.record_batch(columns))
    for row, part in zip(pa.table(columns).to_pylist(), parts, strict=True):
        assert isinstance(part, Misfit)
        assert part.payload.to_pylist() == [{"row": repr(row)}]
        assert part.reason.startswith(
            f"source 'clicks' gave {row!r}, which does not fit its schema (id int64, name"
        )
    assert maker(PAIR).checked(pa.record_batch({"id": pa.array([], pa.binary()), "name": []})) == []


@given(st.lists(st.integers(-5, 5).map(lambda n: n * 2**30) | st.none(), max_size=30))
def test_rows_of_record_batches_that_do_not_fit_are_told_one_by_one(numbers: list[int | None]) -> None:
    """Integers too large, and nulls where none may be."""
    schema = pa.schema([pa.field("n", pa.int32(), nullable=False)])
    found: list[Any] = []
    for part in RowMaker("s", schema, "n").checked(pa.record_batch({"n": pa.array(numbers, pa.int64())})):
        if isinstance(part, Misfit):
            found.append((part.offset, *part.payload["row"].to_pylist()))
        else:
            assert part.schema.equals(schema)
            found += part["n"].to_pylist()
    assert found == [n if n is not None and -(2**31) <= n < 2**31 else (n, f"{{'n': {n}}}") for n in numbers]


@pytest.mark.parametrize("names", [["row"], ["row", "id"], ["id"]])
def test_no_letter_of_a_misfit_is_taken_for_a_row_of_the_source(names: list[str]) -> None:
    schema = pa.schema([pa.field(name, pa.string()) for name in names])
    (part,) = RowMaker("s", schema).parts([object()])
    assert isinstance(part, Misfit)
    assert not part.payload.schema.equals(schema)
    # It looks the same in every process.
    assert part.payload.column(0).to_pylist() == ["<object object>"]


# ---------------------------------------------------------------- as Spark takes them


def test_a_reader_gives_tuples_of_one_value_too() -> None:
    from pyspark.sql import Row

    made = SparkRowMaker("clicks", ID).batch([(1,), [2], Row(id=3)])
    assert made.to_pydict() == {"id": [1, 2, 3]}
    with pytest.raises(SourceError):
        SparkRowMaker("clicks", ID).batch([1])


def test_values_are_bent_as_spark_bends_them() -> None:
    schema = pa.schema(
        [
            ("text", pa.string()),
            ("price", pa.decimal128(10, 2)),
            ("tags", pa.list_(pa.string())),
            ("inner", pa.struct([("a", pa.int64())])),
            ("counts", pa.map_(pa.string(), pa.int64())),
            ("day", pa.date32()),
        ]
    )
    row = (5, decimal.Decimal("1.5"), ["a"], {"a": 1}, {"x": 2}, datetime.date(2024, 1, 2))
    made = SparkRowMaker("clicks", schema).batch([row, (None,) * 6])
    assert made.column("text").to_pylist() == ["5", None]
    assert made.column("price").to_pylist() == [decimal.Decimal("1.50"), None]
    assert made.column("inner").to_pylist() == [{"a": 1}, None]
    assert made.column("counts").to_pylist() == [[("x", 2)], None]


def test_instants_without_a_zone_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        schema = pa.schema([("at", pa.timestamp("us", "UTC"))])
        made = SparkRowMaker("clicks", schema).batch([(datetime.datetime(2024, 1, 1, 0, 0),)])
        assert made.column(0).cast(pa.int64()).to_pylist() == [1_704_085_200_000_000]
    finally:
        monkeypatch.undo()
        time.tzset()


# ---------------------------------------------------------------- cutting


@given(st.integers(0, 50), st.integers(1, 60), st.integers(1, 500))
def test_slices_leave_nothing_out(rows: int, max_rows: int, max_bytes: int) -> None:
    batch = pa.record_batch({"id": list(range(rows))}, schema=ID)
    parts = list(slices(batch, max_rows, max_bytes))
    assert [value for part in parts for value in part.column(0).to_pylist()] == list(range(rows))
    assert all(part.num_rows <= max_rows for part in parts)
    assert len(parts) >= 1


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(0, 30), st.booleans())
def test_skipping(sizes: list[int], skip: int, batches: bool) -> None:
    total = sum(sizes)
    if batches:
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        items: list[Any] = [
            pa.record_batch({"id": list(range(start, start + size))}, schema=ID)
            for start, size in zip(starts, sizes, strict=True)
        ]
    else:
        items = list(range(total))
    if skip > total:
        with pytest.raises(
            SourceChangedError, match=rf"p ends behind {total} records now, and {skip} of it were"
        ):
            skipped(iter(items), skip, "p")
        return
    left = [
        value
        for item in skipped(iter(items), skip, "p")
        for value in (item.column(0).to_pylist() if batches else [item])
    ]
    assert left == list(range(total))[skip:]


def test_skipped_records_may_be_none() -> None:
    assert list(skipped(iter([None, None, 1]), 2, "p")) == [1]
