"""DataFrames as sources, and schemas that are read off the first records. No Spark, no polars."""

from __future__ import annotations

import datetime as dt
import decimal
from collections import namedtuple
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark import cloudpickle

from ftlayer.errors import ConfigError
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.connectors import MAX_PARTITIONS, PARTITION_ROWS, partitioned, partitions, table_of
from ftlayer.topology.ddl import parse_ddl, to_ddl
from ftlayer.topology.operators import IterableSource, Source


class Foreign:
    """A DataFrame of a library that this one does not know: polars, DuckDB."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


def source_of(given: Any, schema: Any = None, parallelism: int = 4, **options: Any) -> Source:
    env = GraphBuilder("job", parallelism=parallelism)
    stream = env.source(given, schema, **options)
    stream.sink(print)
    operator = env.build().nodes[0].operator
    assert isinstance(operator, Source)
    assert operator.schema == stream.schema
    return operator


def rows_of(source: Source) -> list[Any]:
    assert isinstance(source.connector, IterableSource)
    batches = [batch for part in source.connector.partitions for batch in part()]
    assert all(isinstance(batch, pa.RecordBatch) for batch in batches)
    return pa.Table.from_batches(batches).to_pylist() if batches else []


PEOPLE = pa.table({"id": [1, 2, None], "name": ["a", None, "c"]})
ROWS = PEOPLE.to_pylist()
CATEGORIES = pa.DictionaryArray.from_arrays(
    pa.array([0, None, 1], pa.uint32()), pa.array(["a", "c"], pa.string_view())
)
"""As polars has them."""


@pytest.mark.parametrize(
    "given_",
    [
        PEOPLE,
        PEOPLE.to_batches()[0],
        PEOPLE.to_reader(),
        Foreign(PEOPLE),
        Foreign(pa.table({"id": PEOPLE["id"], "name": PEOPLE["name"].cast(pa.large_string())})),
        Foreign(pa.table({"id": PEOPLE["id"], "name": PEOPLE["name"].cast(pa.string_view())})),
        Foreign(pa.table({"id": PEOPLE["id"], "name": PEOPLE["name"].dictionary_encode()})),
        Foreign(pa.table({"id": PEOPLE["id"], "name": CATEGORIES})),
        pd.DataFrame({"id": pd.array([1, 2, None], "Int64"), "name": ["a", None, "c"]}, index=[7, 8, 9]),
        ROWS,
    ],
    ids=[
        "table",
        "batch",
        "reader",
        "stream",
        "large",
        "view",
        "dictionary",
        "categories",
        "pandas",
        "dicts",
    ],
)
def test_a_dataframe_brings_its_schema(given_: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source = source_of(given_, uid="people")
    assert source.schema == parse_ddl("id bigint, name string")
    assert rows_of(source) == ROWS
    assert capsys.readouterr().err == "people: schema 'id bigint, name string', as its rows have it\n"
    assert rows_of(cloudpickle.loads(cloudpickle.dumps(source))) == ROWS


def test_dicts_bring_the_columns_of_all_of_them() -> None:
    source = source_of([{"a": 1}, {"a": 2, "b": "x"}, {"c": 3.5}])
    assert source.schema == parse_ddl("a bigint, b string, c double")
    assert rows_of(source) == [
        {"a": 1, "b": None, "c": None},
        {"a": 2, "b": "x", "c": None},
        {"a": None, "b": None, "c": 3.5},
    ]


def test_a_schema_that_is_given_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert source_of(Foreign(PEOPLE), "id int, name string").schema == parse_ddl("id int, name string")
    assert source_of([1, 2], "n double").schema == parse_ddl("n double")
    assert capsys.readouterr().err == ""


def test_types_become_those_that_spark_has() -> None:
    frame = pd.DataFrame(
        {
            "at": pd.to_datetime(["2024-01-01T00:00:00.000001"]),
            "utc": pd.to_datetime(["2024-01-01"]).tz_localize("Europe/Vienna"),
            "small": pd.array([1], "uint8"),
            "large": pd.array([1], "uint64"),
            "kind": pd.Categorical(["a"]),
        }
    )
    source = source_of(frame)
    wanted = "at timestamp_ntz, utc timestamp, small smallint, large bigint, kind string"
    assert source.schema == parse_ddl(wanted)
    (row,) = rows_of(source)
    assert row["utc"] == dt.datetime(2023, 12, 31, 23, tzinfo=dt.UTC)
    nested = pa.table({"it": [[{"a": 1}]]}).cast(
        pa.schema([("it", pa.large_list(pa.struct([("a", pa.uint8())])))])
    )
    assert source_of(Foreign(nested)).schema == parse_ddl("it array<struct<a smallint>>")


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (pd.DataFrame({"n": pd.array([1 << 63], "uint64")}), "column 'n' is uint64, .*schema=…"),
        (pd.DataFrame({"t": [pd.Timestamp(1, unit="ns")]}), r"column 't' is timestamp\[ns\]"),
        (pd.DataFrame({"n": [1]}, index=pd.Index([1], name="key")), r"index .*'key'.*reset_index\(\)"),
        (pd.DataFrame({1: [1]}), "names of columns are texts"),
        (pd.DataFrame({"n": [1, "a"]}), "pandas.DataFrame that Arrow cannot read: .*column n"),
        (pd.DataFrame(), "at least one column"),
        (pa.table([[1], [2]], ["n", "n"]), "two columns are named 'n'"),
    ],
)
def test_what_cannot_be_read(frame: Any, said: str) -> None:
    with pytest.raises(Exception, match=said) as refused:
        source_of(frame)
    assert type(refused.value).__module__ == "ftlayer.errors"


@given(st.integers(0, 5 * PARTITION_ROWS), st.integers(1, 8))
def test_how_rows_are_dealt_out_depends_on_their_number_alone(rows: int, parallelism: int) -> None:
    table = pa.table({"n": pa.array(range(rows), pa.int64())})
    parts = partitioned(table, PARTITION_ROWS)
    assert len(parts) == max(1, -(-rows // PARTITION_ROWS))
    assert len(parts) <= MAX_PARTITIONS
    numbers = [n for part in parts for batch in part() for n in batch.column(0).to_pylist()]
    assert numbers == list(range(rows))


def test_a_large_frame_is_read_by_several_subtasks() -> None:
    frame = Foreign(pa.table({"n": range(3 * PARTITION_ROWS)}))
    env = GraphBuilder("job", parallelism=2)
    env.source(frame).sink(print)
    assert env.build().node("source-1").parallelism == 2
    assert len(partitioned(pa.table({"n": range(1_000)}), 1)) == MAX_PARTITIONS


def test_a_part_of_a_table_travels_without_the_rest() -> None:
    parts = partitioned(pa.table({"n": range(100_000)}), 1_000)
    assert len(cloudpickle.dumps(parts[0])) < 100_000 * 8 / MAX_PARTITIONS * 2


Named = namedtuple("Named", "id name")


@pytest.mark.parametrize(
    ("records", "schema"),
    [
        (range(5), "value bigint"),
        ([1.5, None], "value double"),
        (["a"], "value string"),
        ([b"a"], "value binary"),
        ([True], "value boolean"),
        ([dt.date(2024, 1, 1)], "value date"),
        ([dt.datetime(2024, 1, 1)], "value timestamp_ntz"),
        ([dt.datetime(2024, 1, 1, tzinfo=dt.UTC)], "value timestamp"),
        ([decimal.Decimal("1.50")], "value decimal(38,18)"),
        ([(1, "a"), (None, "b")], "_1 bigint, _2 string"),
        ([Named(1, "a")], "id bigint, name string"),
        ([([1], {"a": 1.0})], "_1 array<bigint>, _2 struct<a double>"),
        (partitions([], [1]), "value bigint"),
    ],
)
def test_a_schema_is_read_off_the_first_records(
    records: Any, schema: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = source_of(records)
    assert source.schema == parse_ddl(schema)
    assert f"schema '{to_ddl(source.schema)}', as its first records have it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], "there is no record .*schema="),
        (lambda: [1], "a function is called in the slots alone.*schema="),
        (partitions(lambda: [1]), "a function is called in the slots alone.*schema="),
        ([None, None], "'value' is null in the first 2 records.*schema="),
        ([(1, None)], "'_2' is null in the first 1 records.*schema="),
        ([1, "a"], "column 'value': .*schema="),
        ([True, 1], "column 'value': .*schema="),
        ([(1, 2), (1,)], "have 1 and 2 values.*schema="),
        ([(1, 2), 3], "tuples and others.*schema="),
        ([object()], "column 'value': .*schema="),
        ([()], "have no values.*schema="),
    ],
)
def test_what_they_do_not_say_is_asked_for(records: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        source_of(records)


@given(
    st.lists(
        st.tuples(st.integers(-(1 << 63), (1 << 63) - 1), st.none() | st.text(max_size=3)),
        min_size=1,
        max_size=20,
    )
)
def test_records_fit_the_schema_that_was_read_off_them(records: list[tuple[int, str | None]]) -> None:
    from ftlayer.runtime.connectors.lane import RowMaker

    if all(text is None for _, text in records):
        return
    source = source_of(records)
    batch = RowMaker("x", source.schema).batch(records)
    assert list(zip(*batch.to_pydict().values(), strict=True)) == records


def test_schemas_written_down() -> None:
    text = (
        "a bigint, b array<struct<`x y` int, z map<string,double>>>, c decimal(10,2) not null, `d``e` binary"
    )
    assert parse_ddl(to_ddl(parse_ddl(text))) == parse_ddl(text)
    assert to_ddl(pa.schema([("a", pa.uint8())])) == "a uint8"


def test_a_streaming_dataframe_of_sparks_is_refused_and_told_where_it_goes() -> None:
    """It has Arrow's interface, as all of them; what PySpark raises there is an AssertionError without a word."""

    class Streaming:
        isStreaming = True  # noqa: N815 - PySpark's name

        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            raise AssertionError

    with pytest.raises(ConfigError, match=r"a streaming DataFrame .* FTLayer\.source"):
        table_of(Streaming())
