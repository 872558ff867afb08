"""The data source of deliveries: options, ranges, and stored records in the shape the source has today."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import BinaryType, LongType, StringType, StructType, TimestampType

from ftlayer.errors import CodecError, ConfigError
from ftlayer.functions.data_sources import ReadAllAvailable, ReadMaxRows, to_arrow_schema
from ftlayer.records.ids import FIRST_TRY
from ftlayer.spark.deliveries.source import (
    ALL,
    DeliveryOptions,
    DeliveryRange,
    DeliveryReader,
    DeliverySource,
    delivered_rows,
)
from ftlayer.spark.stages.pages import SOURCE_FT, make_marks, read_marks
from ftlayer.spark.stages.task import FT, Skip, StageTask
from ftlayer.vertex.calls import (
    Deliverable,
    DeliverableUpTo,
    QueryStatus,
    QueryStatusCall,
    ReadDeliveries,
    RecordBatches,
    Records,
)

SCHEMA = StructType().add("a", LongType()).add("s", StringType()).add(FT, BinaryType())
ARROW = to_arrow_schema(SCHEMA)


def records(payload: pa.RecordBatch, roots: list[int]) -> Records:
    ids = np.array(roots, np.uint64)
    return Records(payload, ids, ids, np.ones(len(ids), np.int32))


def test_stored_records_get_the_shape_of_the_source(kit: SimpleNamespace) -> None:
    payload = pa.record_batch({"s": ["x", None], "a": pa.array([1, 2], pa.int32())})
    rows = delivered_rows(records(payload, [5, 2**64 - 1]), ARROW, 10, 20)
    assert rows.schema.equals(ARROW)
    assert rows.select(["a", "s"]).to_pylist() == [{"a": 1, "s": "x"}, {"a": 2, "s": None}]
    assert read_marks(rows.column(FT)).tolist() == [
        (5, 10, 20, 5, FIRST_TRY),
        (2**64 - 1, 10, 20, 2**64 - 1, FIRST_TRY),
    ]
    (page,) = kit.read_pages(StageTask((), kit.GIVER).pages(iter([rows]), 0))
    assert page.roots == [5, 2**64 - 1]
    assert page.head.delivered == (10, 20)


def test_no_records() -> None:
    payload = pa.RecordBatch.from_pylist([], schema=pa.schema([("a", pa.int64()), ("s", pa.string())]))
    assert delivered_rows(records(payload, []), ARROW, 0, 0).num_rows == 0


def test_times_stored_with_another_zone_are_the_same_instants() -> None:
    schema = to_arrow_schema(StructType().add("t", TimestampType()).add(FT, BinaryType()))
    when = dt.datetime(2024, 7, 1, 12, tzinfo=dt.UTC)
    payload = pa.record_batch({"t": pa.array([when], pa.timestamp("us", "Europe/Berlin"))})
    rows = delivered_rows(records(payload, [1]), schema, 0, 1)
    assert rows.to_pylist()[0]["t"] == when
    assert rows.schema.equals(schema)


@pytest.mark.parametrize(
    "payload",
    [
        pa.record_batch({"a": [1], "renamed": ["x"]}),
        pa.record_batch({"a": [1], "s": ["x"], "gone": [0]}),
        pa.record_batch({"a": [[1]], "s": ["x"]}),
        pa.record_batch({"a": [True], "s": [["x"]]}),
        pa.record_batch({"a": [dt.date(2024, 7, 1)], "s": ["x"]}),
    ],
)
def test_records_that_do_not_fit_the_source_any_more_are_refused(payload: pa.RecordBatch) -> None:
    with pytest.raises(CodecError, match=r"do not fit (column '[as]'|the source, which has no such column)"):
        delivered_rows(records(payload, [1]), ARROW, 0, 1)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (pa.array(["7", "not a number", None]), "'not a number' (string)"),
        (pa.array([7, 2**63, None], pa.uint64()), f"'{2**63}' (uint64)"),
        (pa.array([7.0, 7.5, None]), "'7.5' (double)"),
    ],
)
def test_a_value_that_the_type_of_today_cannot_hold_fails_its_record_alone(
    kit: SimpleNamespace, values: pa.Array, shown: str
) -> None:
    payload = pa.record_batch({"a": values, "s": ["x", "y", "z"]})
    rows = delivered_rows(records(payload, [5, 6, 7]), ARROW, 10, 13)
    (page,) = kit.read_pages(StageTask((), kit.GIVER).pages(iter([rows]), 0))
    assert (page.roots, page.column("a"), page.head.rows_in) == ([5, 7], [7, None], 3)
    (failed,) = page.head.failures
    assert (failed.root, failed.row, failed.operator, failed.fatal) == (6, -1, "files", True)
    assert shown in failed.reason
    assert "column 'a' of the source is int64 now" in failed.reason
    # A run again leaves it out, once it is sealed.
    task = StageTask((), kit.GIVER, skip=Skip(roots=frozenset({6})))
    (again,) = kit.read_pages(task.pages(iter([rows]), 0))
    assert (again.roots, again.head.failures) == ([5, 7], ())


def test_a_column_that_may_not_be_null_needs_a_stored_one() -> None:
    payload = pa.record_batch({"a": [1]})
    with pytest.raises(CodecError, match=r"do not fit column 's'.*may not be null"):
        delivered_rows(records(payload, [1]), ARROW, 0, 1, required=("s",))


def test_a_column_that_the_source_has_gained_is_null() -> None:
    rows = delivered_rows(records(pa.record_batch({"a": [1]}), [1]), ARROW, 0, 1)
    assert [(row["a"], row["s"]) for row in rows.to_pylist()] == [(1, None)]


def test_the_columns_type_is_the_one_the_source_is_given() -> None:
    assert BinaryType().simpleString() == SOURCE_FT


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_marks_are_those_of_the_rows_that_have_one(kind: pa.DataType) -> None:
    ids = np.array([7, 2**64 - 1], np.uint64)
    marks = make_marks(ids, 3, 9, ids - np.uint64(1), ids - np.uint64(2)).cast(kind)
    column = pa.concat_arrays([pa.nulls(2, kind), marks, pa.nulls(1, kind)])
    assert read_marks(column).tolist() == [(7, 3, 9, 6, 5), (2**64 - 1, 3, 9, 2**64 - 2, 2**64 - 3)]
    assert read_marks(column.slice(1, 2)).tolist() == [(7, 3, 9, 6, 5)]
    assert read_marks(column.slice(0, 2)).tolist() == read_marks(column.slice(0, 0)).tolist() == []


# ---------------------------------------------------------------- options

OPTIONS = DeliveryOptions("grpc://127.0.0.1:1", "secret", "q/files", "q", "certs", 7, 3)


def test_options_come_back_as_they_went() -> None:
    assert DeliveryOptions.from_spark(OPTIONS.to_spark()) == OPTIONS
    plain = DeliveryOptions("a", "t", "s", "q")
    assert "root_certs" not in plain.to_spark()
    assert DeliveryOptions.from_spark(plain.to_spark()) == plain


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"address": ""}, "address"),
        ({"token": ""}, "token"),
        ({"stream": ""}, "stream"),
        ({"query": ""}, "query"),
        ({"max_rows": "0"}, "max_rows"),
        ({"max_rows": "many"}, "max_rows"),
        ({"partitions": "-1"}, "partitions"),
        ({"partitions": "²"}, "partitions"),
    ],
)
def test_options_that_are_missing_or_wrong_are_named(change: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=f"'{named}'"):
        DeliveryOptions.from_spark({**OPTIONS.to_spark(), **change})


def test_the_source_does_not_guess_its_schema() -> None:
    source = DeliverySource(OPTIONS.to_spark())
    assert DeliverySource.name() == "ftlayer"
    with pytest.raises(ConfigError, match=r"needs \.schema"):
        source.schema()


# ---------------------------------------------------------------- the reader


class FakeClient:
    """A stream with ``end`` rows, and what was asked of it."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.offered = 0
        self.asked: list[Any] = []

    def call(self, call: Any) -> Any:
        self.asked.append(call)
        if isinstance(call, Deliverable):
            end = min(self.end, call.start + call.max_rows)
            self.offered = max(self.offered, end)
            return DeliverableUpTo(end)
        if isinstance(call, QueryStatusCall):
            assert call.query == "q"
            return QueryStatus(0, self.end - self.offered, 0, 0, 0, -1)
        assert isinstance(call, ReadDeliveries)
        values = list(range(call.start, call.end))
        payload = pa.record_batch(
            {"a": pa.array(values, pa.int64()), "s": pa.nulls(len(values), pa.string())}
        )
        return RecordBatches((records(payload, [value + 1 for value in values]),))

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def close(self) -> None:
        pass


def reader_of(client: FakeClient, partitions: int = 2) -> DeliveryReader:
    class Options(DeliveryOptions):
        def client(self) -> Any:
            return client

    return DeliveryReader(Options("a", "t", "s", "q", max_rows=5, partitions=partitions), SCHEMA)


def test_offsets_follow_the_vertex_and_the_limit() -> None:
    client = FakeClient(12)
    reader = reader_of(client)
    assert reader.initialOffset() == {"next": 0}
    assert reader.getDefaultReadLimit() == ReadMaxRows(5)
    assert reader.latestOffset({"next": 3}, ReadMaxRows(5)) == {"next": 8}
    assert reader.latestOffset({"next": 12}, ReadMaxRows(5)) == {"next": 12}
    assert reader.latestOffset({"next": 3}, ReadAllAvailable()) == {"next": 12}
    assert client.asked[-1] == Deliverable("s", 3, ALL)


def test_progress_says_how_far_deliveries_go_beyond_what_spark_was_told_of() -> None:
    client = FakeClient(12)
    reader = reader_of(client)
    assert reader.reportLatestOffset() is None
    reader.latestOffset({"next": 3}, ReadMaxRows(5))
    assert reader.reportLatestOffset() == {"next": 12}
    reader.latestOffset({"next": 8}, ReadMaxRows(5))
    assert reader.reportLatestOffset() == {"next": 12}
    client.end = 30
    assert reader.reportLatestOffset() == {"next": 30}


def test_available_now_reads_up_to_what_there_was_at_its_start() -> None:
    client = FakeClient(12)
    reader = reader_of(client)
    reader.prepareForTriggerAvailableNow()
    client.end = 30
    assert reader.latestOffset({"next": 9}, ReadMaxRows(5)) == {"next": 12}
    # A batch that was planned before may have gone further: never back.
    assert reader.latestOffset({"next": 20}, ReadMaxRows(5)) == {"next": 20}


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 7))
def test_a_range_is_split_without_gaps_and_each_row_knows_the_whole(
    first: int, rows: int, partitions: int
) -> None:
    reader = reader_of(FakeClient(100), partitions)
    parts = list(reader.partitions({"next": first}, {"next": first + rows}))
    assert len(parts) == min(partitions, rows)
    seen: list[int] = []
    for part in parts:
        assert isinstance(part, DeliveryRange)
        assert part.last > part.first
        for batch in reader.read(part):
            seen += batch.column("a").to_pylist()
            marks = read_marks(batch.column(FT))
            assert set(marks["start"].tolist()) == {first}
            assert set(marks["end"].tolist()) == {first + rows}
    assert seen == list(range(first, first + rows))
