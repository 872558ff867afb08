"""Built-in aggregates as users write them: what they give, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import ftlayer as ft
from ftlayer.config import FTStatus
from ftlayer.errors import ConfigError
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.job_graph import display_name, kind_of
from ftlayer.topology.streams.keyed_stream import KeyedStream


@pytest.fixture
def keyed() -> KeyedStream:
    schema = (
        "k string, place struct<city string>, at timestamp, n int, big bigint, x float, price decimal(10,2), "
        "day date, ok boolean, names array<string>"
    )
    stream = GraphBuilder("aggregates", status=FTStatus.OFF).source([], schema)
    return stream.assign_watermarks("at").key_by("k")


def test_results_have_the_keys_columns_and_types_as_in_spark(keyed: KeyedStream) -> None:
    found = keyed.aggregate(
        ft.count(),
        ft.count("names"),
        ft.sum("n"),
        ft.sum("x"),
        ft.sum("price"),
        ft.min("day"),
        ft.max("at"),
        ft.max("ok"),
        ft.mean("price", name="average"),
    )
    assert found.schema == pa.schema(
        [
            ("k", pa.string()),
            ("count", pa.int64()),
            ("count_names", pa.int64()),
            ("sum_n", pa.int64()),
            ("sum_x", pa.float64()),
            ("sum_price", pa.decimal128(20, 2)),
            ("min_day", pa.date32()),
            ("max_at", pa.timestamp("us", tz="UTC")),
            ("max_ok", pa.bool_()),
            ("average", pa.float64()),
        ]
    )


def test_windows_have_their_times_too(keyed: KeyedStream) -> None:
    found = keyed.window(ft.tumbling("1m")).aggregate(ft.max("x"), volatile_state=True)
    assert found.schema.names == ["k", "window_start", "window_end", "max_x"]
    assert found.schema.field("max_x").type == pa.float32()


def test_keys_may_be_fields_of_structs(keyed: KeyedStream) -> None:
    found = keyed.key_by("place.city", "k").aggregate(ft.count())
    assert found.schema.names == ["place.city", "k", "count"]


def test_an_operator_says_what_it_aggregates(keyed: KeyedStream) -> None:
    graph = GraphBuilder("names", status=FTStatus.OFF)
    counted = graph.source([], "k string, n int").key_by("k").aggregate(ft.count(), ft.sum("n"))
    counted.sink(print)
    operator = next(node.operator for node in graph.build().nodes if node.uid.startswith("aggregate"))
    assert kind_of(operator) == "aggregate"
    assert display_name(operator) == "aggregate(count, sum_n by k)"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda s: s.aggregate(ft.sum("k")), "sum: column 'k' is string; it takes integers"),
        (lambda s: s.aggregate(ft.mean("day")), "mean: column 'day' is date32"),
        (lambda s: s.aggregate(ft.min("names")), "min: column 'names' is list"),
        (lambda s: s.aggregate(ft.max("nothing")), "max: there is no column 'nothing'; there are k, place"),
        (lambda s: s.aggregate(ft.count(), ft.count()), "two columns of the result are called 'count'"),
        (lambda s: s.aggregate(ft.sum("n", name="K")), "two columns of the result are called 'k'"),
        (lambda s: s.aggregate(ft.count(), "sum"), "got a str"),
        (lambda s: s.aggregate(ft.sum("n", name="_ft_sum")), "reserved"),
        (lambda s: s.aggregate(ft.count(), in_place=False), "in_place"),
        (lambda s: s.window(ft.session("5ms")).aggregate(ft.count(), merge=max), "neither result nor merge"),
        (lambda s: ft.sum(None), "sum: column: expected the name of a column"),
        (lambda s: ft.count(name=""), "count: name: expected the name of a column"),
        (lambda s: ft.mean("n", alias="m"), "there is no option 'alias'"),
    ],
)
def test_what_makes_no_sense_is_refused(keyed: KeyedStream, make: Callable[[Any], Any], says: str) -> None:
    with pytest.raises((ConfigError, ft.FTLayerError), match=says):
        make(keyed)
