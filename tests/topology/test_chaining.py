"""Which operators share a subtask, with the vertex in the graph and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ftlayer.config import FTStatus
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.records.partitioning import Forward
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.topology.streams.data_stream import DataStream

Orders = Callable[[GraphBuilder], DataStream]
BOTH = pytest.mark.parametrize("status", list(FTStatus))


def same(record: Any) -> Any:
    return record


def chains(graph: JobGraph) -> list[str]:
    """The chains but those of the vertex, each as its operators' uids."""
    return [
        " ".join(operator.uid for operator in vertex.operators)
        for vertex in graph.vertices
        if not vertex.uid.startswith("replay:")
    ]


def translate(env: GraphBuilder, status: FTStatus) -> JobGraph:
    return job_graph(env.build(), status)


@BOTH
def test_a_source_is_never_chained(status: FTStatus, env: GraphBuilder, orders: Orders) -> None:
    orders(env).map(same).filter(same).sink(print)
    assert chains(translate(env, status)) == ["source-1", "map-1 filter-1 sink-1"]


@BOTH
def test_a_change_of_parallelism_ends_a_chain(status: FTStatus, env: GraphBuilder, orders: Orders) -> None:
    orders(env).map(same).map(same, parallelism=3).sink(print)
    assert chains(translate(env, status)) == ["source-1", "map-1", "map-2", "sink-1"]


@BOTH
@pytest.mark.parametrize("method", ["rebalance", "shuffle", "broadcast", "global_"])
def test_a_partitioner_ends_a_chain(status: FTStatus, method: str, env: GraphBuilder, orders: Orders) -> None:
    stream = orders(env).map(same)
    getattr(stream, method)().map(same).forward().sink(print)
    assert chains(translate(env, status)) == ["source-1", "map-1", "map-2 sink-1"]


@BOTH
def test_keys_begin_a_chain_even_at_parallelism_one(status: FTStatus) -> None:
    env = GraphBuilder("shop")
    stream = env.source([], "n int").rebalance().map(same)
    stream.key_by("n").reduce(max, volatile_state=True).map(same).sink(print)
    assert chains(translate(env, status)) == ["source-1", "map-1", "reduce-1 map-2 sink-1"]


@BOTH
def test_two_consumers_end_a_chain(status: FTStatus, env: GraphBuilder, orders: Orders) -> None:
    stream = orders(env).map(same)
    stream.filter(same).sink(print)
    stream.sink(print)
    assert chains(translate(env, status)) == ["source-1", "map-1", "filter-1 sink-1", "sink-2"]


@BOTH
def test_a_union_begins_a_chain(status: FTStatus, env: GraphBuilder, orders: Orders) -> None:
    first, second = (orders(env).map(same) for _ in range(2))
    first.union(second).map(same).sink(print)
    assert chains(translate(env, status)) == ["source-1", "map-1", "source-2", "map-2", "map-3 sink-1"]


@BOTH
def test_a_union_with_itself_has_two_edges(status: FTStatus, env: GraphBuilder, orders: Orders) -> None:
    stream = orders(env).map(same)
    stream.union(stream).map(same).sink(print)
    graph = translate(env, status)
    assert chains(graph) == ["source-1", "map-1", "map-2 sink-1"]
    assert [(edge.source, edge.input) for edge in graph.edges_into("map-2")] == [("map-1", 0)] * 2


@BOTH
def test_two_inputs_begin_a_chain(
    status: FTStatus, env: GraphBuilder, orders: Orders, both: CoProcessFunction
) -> None:
    left, right = (orders(env).map(same) for _ in range(2))
    left.connect(right).process(both, "n int").map(same).sink(print)
    assert chains(translate(env, status)) == [
        "source-1",
        "map-1",
        "source-2",
        "map-2",
        "co_process-1 map-3 sink-1",
    ]


@BOTH
def test_side_outputs_leave_from_the_end_of_a_chain(
    status: FTStatus, env: GraphBuilder, orders: Orders, plain: ProcessFunction
) -> None:
    stream = orders(env).map(same).process(plain, side={"bad": "n int", "unused": "n int"})
    stream.map(same).sink(print)
    stream.side_output("bad").sink(print)
    graph = translate(env, status)
    assert chains(graph) == ["source-1", "map-1 process-1", "map-2 sink-1", "sink-2"]
    main, bad = graph.edges_from("map-1")
    assert (main.tag, main.schema.names) == ("", ["id", "user", "ts", "tags"])
    assert (bad.tag, bad.schema.names, bad.target) == ("bad", ["n"], "sink-2")
    assert isinstance(bad.partitioner, Forward)


def test_nothing_is_chained_behind_timers_with_tracking(
    env: GraphBuilder, orders: Orders, timed: ProcessFunction
) -> None:
    orders(env).key_by("id").process(timed, volatile_state=True).map(same).sink(print)
    assert chains(translate(env, FTStatus.ON)) == ["source-1", "process-1", "map-1 sink-1"]
    assert chains(translate(env, FTStatus.OFF)) == ["source-1", "process-1 map-1 sink-1"]


@BOTH
def test_watermarks_and_functions_without_timers_are_chained(
    status: FTStatus, env: GraphBuilder, orders: Orders, plain: ProcessFunction
) -> None:
    orders(env).assign_watermarks("ts").process(plain).map_batches(same).flat_map(same).sink(print)
    assert chains(translate(env, status)) == [
        "source-1",
        "watermarks-1 process-1 map_batches-1 flat_map-1 sink-1",
    ]


def test_tracking_changes_neither_numbers_nor_partitioners_between_the_same_chains(
    env: GraphBuilder, orders: Orders
) -> None:
    orders(env).key_by("id").map(same).sink(print)
    orders(env).map(same).broadcast().sink(print)
    on, off = translate(env, FTStatus.ON), translate(env, FTStatus.OFF)
    assert [
        (edge.number, edge.source, edge.target, edge.partitioner) for edge in on.edges[: len(off.edges)]
    ] == [(edge.number, edge.source, edge.target, edge.partitioner) for edge in off.edges]
    assert (on.tracked, off.tracked, off.options) == (True, False, ())


def test_the_order_of_chains_is_that_of_the_records(env: GraphBuilder, orders: Orders) -> None:
    first = orders(env)
    late = env.source([], first.schema).uid("late")
    late.union(first.map(same)).map(same, uid="last").sink(print)
    assert chains(translate(env, FTStatus.ON)) == ["source-1", "late", "map-1", "last sink-1"]


@BOTH
def test_a_rate_limit_begins_a_chain(status: FTStatus, env: GraphBuilder, orders: Orders) -> None:
    limited = orders(env).map(same).map(same, rate_limit=10).filter(same).flat_map(list, rate_limit=0.5)
    limited.process(ProcessFunction(), rate_limit=3).filter(same, rate_limit=7).sink(print)
    assert chains(translate(env, status)) == [
        "source-1",
        "map-1",
        "map-2 filter-1",
        "flat_map-1",
        "process-1",
        "filter-2 sink-1",
    ]
