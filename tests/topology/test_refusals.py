"""Graphs whose operators do not go together: each is refused with the error's class, their names, and a way out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from refusing import JOINED, SCHEMA, Orders, by_hash, graph, mapped, refused, same, sink, source

from ftlayer.config import FTStatus
from ftlayer.errors import ConfigError, InvalidTopologyError
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.functions.steps import Map, Process
from ftlayer.records.partitioning import OutgoingRows
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.checks import check_graph
from ftlayer.topology.job_graph import StreamEdge, StreamNode
from ftlayer.topology.job_graph_generator import job_graph

# ---------------------------------------------------------------- circles, dead ends, loose ends


@pytest.mark.parametrize("tracked", [True, False])
def test_a_circle_names_its_operators_alone(tracked: bool) -> None:
    circle = graph(
        [source(), mapped("a"), mapped("b"), mapped("c"), sink()],
        StreamEdge("in", "a"),
        StreamEdge("a", "b"),
        StreamEdge("b", "a"),
        StreamEdge("b", "c"),
        StreamEdge("c", "out"),
    )
    with pytest.raises(InvalidTopologyError) as caught:
        check_graph(circle, tracked=tracked)
    assert "a → b → a" in str(caught.value) or "b → a → b" in str(caught.value)
    assert ("root never be complete" in str(caught.value)) is tracked
    assert ("external queue" in str(caught.value)) is tracked
    assert ("without an iteration; begin one with iterate()" in str(caught.value)) is not tracked


def test_an_operator_that_feeds_itself() -> None:
    refused(
        InvalidTopologyError,
        "iteration a → a",
        of=graph(
            [source(), mapped("a"), sink()],
            StreamEdge("in", "a"),
            StreamEdge("a", "a"),
            StreamEdge("a", "out"),
        ),
    )


def test_operators_that_lead_nowhere_are_named(env: GraphBuilder, orders: Orders) -> None:
    stream = orders(env)
    stream.sink(print)
    stream.map(same).filter(same, uid="lost")
    refused(
        InvalidTopologyError,
        "no sink gets what comes from 'map-1' (map(same)), 'lost' (filter(same))",
        "sink(…)",
        of=env.build,
    )


def test_a_graph_without_source_or_sink(env: GraphBuilder, orders: Orders) -> None:
    refused(InvalidTopologyError, "'shop' has no source", of=env.build)
    orders(env)
    refused(InvalidTopologyError, "no sink", "'source-1'", of=env.build)


def test_edges_need_ends() -> None:
    nodes = [source(), sink()]
    whole = StreamEdge("in", "out")
    refused(InvalidTopologyError, "there is no 'x'", of=graph(nodes, whole, StreamEdge("in", "x")))
    refused(InvalidTopologyError, "no side output 'x'", of=graph(nodes, StreamEdge("in", "out", tag="x")))
    refused(
        InvalidTopologyError,
        "'out' has 1 inputs",
        "number 1",
        of=graph(nodes, whole, StreamEdge("in", "out", 1)),
    )
    refused(
        InvalidTopologyError,
        "'out' is a sink and 'a' comes behind",
        of=graph([*nodes, mapped("a")], whole, StreamEdge("out", "a")),
    )
    refused(InvalidTopologyError, "'a' gets no records", of=graph([*nodes, mapped("a")], whole))
    refused(InvalidTopologyError, "'in' has 0 inputs", of=graph(nodes, whole, StreamEdge("in", "in")))


# ---------------------------------------------------------------- parallelism, partitioners


def test_forward_between_different_parallelisms(env: GraphBuilder, orders: Orders) -> None:
    orders(env).map(same).forward().sink(print, parallelism=3)
    refused(
        InvalidTopologyError,
        "from 'map-1' to 'sink-1'",
        "there are 2 and 3 subtasks",
        "rebalance()",
        of=env.build,
    )


@pytest.mark.parametrize("wrong", [0, -1, 40_000, 1.5, "2", True])
def test_parallelism_is_a_number_of_subtasks(wrong: Any, env: GraphBuilder, orders: Orders) -> None:
    says = ("parallelism of", "1 to 32768", repr(wrong))
    refused(ConfigError, *says, of=lambda: GraphBuilder("shop", parallelism=wrong))
    refused(ConfigError, *says, "'map-1'", of=lambda: orders(env).map(same, parallelism=wrong))
    refused(ConfigError, *says, of=lambda: orders(env).set_parallelism(wrong))


@dataclass(frozen=True)
class Odd:
    """A partitioner of somebody else's."""

    def select(self, rows: OutgoingRows, channels: int) -> Any:
        return np.zeros(len(rows.record_ids), np.int32)

    def routing(self, rows: OutgoingRows, channels: int) -> Any:
        return None


def test_a_partitioner_without_twin_behind_a_source() -> None:
    nodes = [source(), mapped("a"), sink()]
    behind = graph(nodes, StreamEdge("in", "a", partitioner=Odd()), StreamEdge("a", "out"))
    refused(InvalidTopologyError, "from 'in' to 'a'", "Odd has no replay twin", "use Custom", of=behind)
    check_graph(behind, tracked=False)
    check_graph(graph(nodes, StreamEdge("in", "a"), StreamEdge("a", "out", partitioner=Odd())), tracked=True)


def test_a_partitioner_without_twin_behind_timers(timed: ProcessFunction) -> None:
    process = StreamNode(Process("t", timed, SCHEMA, ("n",), (), volatile_state=True), 2)
    behind = graph(
        [source(), process, sink()],
        StreamEdge("in", "t", partitioner=by_hash("n")),
        StreamEdge("t", "out", partitioner=Odd()),
    )
    refused(InvalidTopologyError, "from 't' to 'out'", "Odd", of=behind)


def test_too_much_to_store_with_a_record(env: GraphBuilder) -> None:
    schema = pa.schema([(f"c{number}", pa.int32()) for number in range(33)])
    stream = env.source([], schema)
    for name in schema.names:
        stream.key_by(name).sink(print)
    built = env.build()
    refused(InvalidTopologyError, "'source-1'", "33 different keys", "32", of=lambda: job_graph(built))
    assert not job_graph(built, FTStatus.OFF).tracked


# ---------------------------------------------------------------- what goes together


def test_a_union_is_of_one_schema(env: GraphBuilder, orders: Orders) -> None:
    stream = orders(env)
    refused(
        InvalidTopologyError,
        "union of 'source-1' with 'map-1'",
        "columns n instead of id, user, ts, tags",
        of=lambda: stream.union(stream.map(same, "n int")),
    )
    one, other = env.source([], "n int"), env.source([], "n bigint not null")
    refused(
        InvalidTopologyError, "column 'n' is int64 not null instead of int32", of=lambda: one.union(other)
    )


def test_edges_of_one_input_have_one_schema() -> None:
    other = StreamNode(Map("b", same, pa.schema([("n", pa.int32())])), 2)
    refused(
        InvalidTopologyError,
        "input 0 of 'out' gets records of another schema from 'b'",
        of=graph([source(), other, sink()], StreamEdge("in", "b"), StreamEdge("b", "out")),
    )
    refused(
        InvalidTopologyError,
        "input 0 of 'a' gets records of another schema from 'b'",
        of=graph(
            [source(), other, mapped("a"), sink()],
            StreamEdge("in", "b"),
            StreamEdge("in", "a"),
            StreamEdge("b", "a"),
            StreamEdge("a", "out"),
        ),
    )


def test_streams_of_two_topologies(env: GraphBuilder, orders: Orders) -> None:
    stream, other = orders(env), orders(GraphBuilder("bar"))
    for attempt in (
        lambda: stream.union(other),
        lambda: stream.connect(other),
        lambda: stream.key_by("id").join(other.key_by("id"), **JOINED),
        lambda: stream.iterate().close_with(other),
    ):
        refused(InvalidTopologyError, "'shop'", "'bar'", of=attempt)
    refused(ConfigError, "expected a stream, got a list", of=lambda: stream.union([]))  # type: ignore[arg-type]


def test_side_outputs_are_declared(env: GraphBuilder, orders: Orders, plain: ProcessFunction) -> None:
    refused(
        InvalidTopologyError,
        "'source-1' has no side output 'late'",
        "it has none",
        of=lambda: orders(env).side_output("late"),
    )
    made = orders(env).process(plain, side={"bad": "n int"})
    refused(InvalidTopologyError, "it has 'bad'", of=lambda: made.side_output("late"))


def test_methods_of_an_operator_come_right_behind_it(
    env: GraphBuilder, orders: Orders, plain: ProcessFunction
) -> None:
    stream = orders(env)
    side = stream.process(plain, side={"bad": "n int"}).side_output("bad")
    for wrong in (stream.key_by("id"), stream.union(stream), stream.broadcast(), side):
        refused(InvalidTopologyError, "uid(…)", "right behind", of=partial(wrong.uid, "x"))
        refused(InvalidTopologyError, "set_parallelism(…)", of=partial(wrong.set_parallelism, 2))


def test_functions_are_functions(
    env: GraphBuilder, orders: Orders, plain: ProcessFunction, both: CoProcessFunction
) -> None:
    stream = orders(env)
    wrong: Any = 7
    for method in (stream.map, stream.flat_map, stream.filter, stream.map_batches):
        refused(ConfigError, method.__name__, "expected a function, got an int", of=partial(method, wrong))
    keyed = stream.key_by("id")
    refused(ConfigError, "reduce", of=lambda: keyed.reduce("max"))  # type: ignore[arg-type]
    refused(ConfigError, "join", of=lambda: keyed.join(keyed, **{**JOINED, "function": None}))
    refused(ConfigError, "process", "got a function", of=lambda: stream.process(same))
    refused(ConfigError, f"write {type(plain).__name__}(…)", of=lambda: stream.process(type(plain)))
    refused(ConfigError, "a CoProcessFunction", of=lambda: stream.connect(stream).process(plain, "n int"))
    refused(ConfigError, "a ProcessFunction", of=lambda: stream.process(both))
    refused(ConfigError, "kind", "'polars'", of=lambda: stream.map_batches(same, kind="polars"))  # type: ignore[arg-type]


def test_what_was_refused_leaves_nothing_behind(env: GraphBuilder, orders: Orders) -> None:
    stream = orders(env)
    refused(ConfigError, of=lambda: stream.map(same, uid="no/name"))
    refused(ConfigError, of=lambda: stream.map(same, parallelism=0))
    refused(InvalidTopologyError, of=lambda: stream.map(same, uid="source-1"))
    stream.map(same).sink(print)
    assert [node.uid for node in env.build().nodes] == ["source-1", "map-1", "sink-1"]
