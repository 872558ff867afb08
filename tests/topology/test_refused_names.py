"""Names, schemas and rates that are refused, before anything runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from refusing import Orders, graph, mapped, refused, same, sink, source

from ftlayer.config import FTStatus
from ftlayer.errors import ConfigError, InvalidTopologyError
from ftlayer.functions.process import ProcessFunction
from ftlayer.functions.steps import Map
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.job_graph import StreamNode

# ---------------------------------------------------------------- names


def test_a_uid_is_unique(env: GraphBuilder, orders: Orders) -> None:
    stream = orders(env).map(same, uid="clean")
    says = "uid 'clean' is given to several operators"
    refused(InvalidTopologyError, says, of=lambda: stream.filter(same, uid="clean"))
    refused(InvalidTopologyError, says, of=lambda: stream.filter(same).uid("clean"))
    refused(InvalidTopologyError, "'source-1'", of=lambda: stream.map(same, uid="source-1"))
    stream.uid("clean")
    refused(
        InvalidTopologyError,
        "uid 'a' is given to several operators (map(same), map(same))",
        of=graph([source(), mapped("a"), mapped("a"), sink()]),
    )


def test_an_automatic_uid_that_is_taken(env: GraphBuilder, orders: Orders) -> None:
    stream = orders(env).map(same, uid="filter-1")
    refused(InvalidTopologyError, "uid 'filter-1'", of=lambda: stream.filter(same))


@pytest.mark.parametrize("name", ["", "a/b", "a:b", "a b", "x" * 101, 7, None])
def test_names_have_letters_that_can_be_filed_under(
    name: Any, env: GraphBuilder, orders: Orders, plain: ProcessFunction
) -> None:
    says = "letters, digits, '_', '-', '.'"
    stream = orders(env)
    if name is not None:
        refused(ConfigError, "uid", says, of=lambda: stream.map(same, uid=name))
    refused(ConfigError, "uid", says, of=lambda: stream.uid(name))
    refused(ConfigError, "name of the topology", says, of=lambda: GraphBuilder(name))
    if name != "":
        refused(ConfigError, "side output", says, of=lambda: stream.process(plain, side={name: "n int"}))
    assert len(env.draft.graph().nodes) == 1


@pytest.mark.parametrize("rate", [0, -1, 0.0001, 2e9, float("inf"), float("nan"), True, "100/s"])
def test_a_rate_limit_is_a_number_of_records_a_second(
    rate: Any, env: GraphBuilder, orders: Orders, plain: ProcessFunction
) -> None:
    async def look_up(record: Any) -> Any:
        return record

    stream = orders(env)
    keyed = stream.key_by(stream.schema.names[0])
    for method, function, of in (
        ("map", same, stream.map),
        ("flat_map", same, stream.flat_map),
        ("filter", same, stream.filter),
        ("map_async", look_up, stream.map_async),
        ("process", plain, stream.process),
        ("process", plain, keyed.process),
    ):
        call = partial(of, function, rate_limit=rate)  # type: ignore[operator]
        refused(ConfigError, f"{method}: rate_limit: expected a number from 0.001", of=call)
    assert len(env.draft.graph().nodes) == 1


def test_the_job_is_not_called_as_the_ingest() -> None:
    refused(ConfigError, "'ingest'", "choose another", of=lambda: GraphBuilder("ingest"))


def test_the_status_is_on_or_off(orders: Orders) -> None:
    assert GraphBuilder("shop", status="off").draft.status is FTStatus.OFF
    refused(ConfigError, "status", "'maybe'", of=lambda: GraphBuilder("shop", status="maybe"))
    env = GraphBuilder("shop", status="on")
    orders(env).key_by("id").reduce(max).sink(print)
    refused(InvalidTopologyError, "volatile_state", of=env.build)


def test_a_side_output_needs_a_tag(env: GraphBuilder, orders: Orders, plain: ProcessFunction) -> None:
    refused(InvalidTopologyError, "the empty tag", of=lambda: orders(env).process(plain, side={"": "n int"}))


@pytest.mark.parametrize(
    "name", ["source_record_id", "record_id", "key_hash", "attempt", "origin", "_ft", "_ft_row", "_FT_x"]
)
def test_reserved_columns(name: str, env: GraphBuilder, orders: Orders, plain: ProcessFunction) -> None:
    schema = pa.schema([("n", pa.int32()), (name, pa.int64())])
    says = f"column {name!r} has a reserved name"
    refused(InvalidTopologyError, "source", says, of=lambda: env.source([], schema))
    refused(InvalidTopologyError, "map", says, "rename it", of=lambda: orders(env).map(same, schema))
    refused(
        InvalidTopologyError, "'late'", says, of=lambda: orders(env).process(plain, side={"late": schema})
    )
    bad = StreamNode(Map("a", same, schema), 2)
    refused(InvalidTopologyError, "'a'", says, of=graph([source(), bad]))


def test_schemas_that_are_none(env: GraphBuilder, orders: Orders) -> None:
    twice = pa.schema([("n", pa.int32()), ("n", pa.int64())])
    refused(InvalidTopologyError, "two columns are named 'n'", of=lambda: env.source([], twice))
    refused(InvalidTopologyError, "at least one column", of=lambda: env.source([], pa.schema([])))
    refused(ConfigError, "expected a pyarrow.Schema, got dict", of=lambda: env.source([], {}))
    refused(ConfigError, "give schema=", of=lambda: env.source([]))
    refused(ConfigError, "expected a type", of=lambda: orders(env).map(same, "n"))


def test_columns_that_are_one_to_spark(env: GraphBuilder, orders: Orders) -> None:
    """Sources from a DDL text, a DataFrame and dicts; what a function gives; side outputs."""
    table = pa.table({"a": [1], "A": [2]})
    side = {"late": "a bigint, A bigint"}
    refused(
        InvalidTopologyError,
        "the columns 'a' and 'A' are one to Spark",
        "rename one (or set spark.sql.caseSensitive)",
        of=lambda: env.source([], "a bigint, b bigint, A bigint", uid="numbers"),
    )
    one = "'a' and 'A' are one to Spark"
    refused(InvalidTopologyError, one, of=lambda: env.source(table))
    refused(InvalidTopologyError, one, of=lambda: env.source([{"a": 1, "A": 2}]))
    refused(InvalidTopologyError, one, of=lambda: orders(env).map(same, "a bigint, A bigint"))
    refused(
        InvalidTopologyError, one, of=lambda: orders(env).process(ProcessFunction(), "n bigint", side=side)
    )


def test_columns_that_differ_in_case_alone_where_the_session_looks_at_it(
    env: GraphBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftlayer.common.checks.case_matters", lambda: True)
    env.source([], "a bigint, A bigint")
