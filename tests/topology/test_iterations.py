"""Iterations: what can be closed with what, what each mode asks for, and how a circle is drawn."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.config import FTStatus
from ftlayer.errors import ConfigError, InvalidTopologyError
from ftlayer.functions.process import ProcessFunction
from ftlayer.records.partitioning import Forward, HashByKey
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.connectors import partitions
from ftlayer.topology.explain import check_forced, explain, to_dot, to_mermaid, warn_of_losses
from ftlayer.topology.job_graph import JobGraph, StreamEdge, StreamGraph
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.topology.operators import IterationHead, IterationTail
from ftlayer.topology.streams.data_stream import DataStream
from ftlayer.topology.streams.keyed_stream import IterativeStream

Orders = Callable[[GraphBuilder], DataStream]


def same(record: Any) -> Any:
    return record


def refused(*says: str, of: Callable[[], Any], error: type[Exception] = InvalidTopologyError) -> None:
    with pytest.raises(error) as caught:
        of()
    for part in says:
        assert part in str(caught.value)


def loop_of(env: GraphBuilder) -> tuple[IterativeStream, DataStream]:
    """A loop that is closed, and leads to a sink."""
    loop = env.source(partitions([], []), "n bigint, word string").iterate("2s")
    body = loop.map(same).filter(same)
    loop.close_with(body)
    body.sink(print)
    return loop, body


def run_of(env: GraphBuilder) -> JobGraph:
    return job_graph(env.build(), FTStatus.OFF)


# ---------------------------------------------------------------- acker mode


def test_with_fault_tolerance_on_it_is_refused_where_it_is_closed(env: GraphBuilder, orders: Orders) -> None:
    loop = orders(env).iterate()
    body = loop.map(same).filter(same)
    body.sink(print)
    refused(
        "iteration map-1 → filter-1 → map-1",
        "with fault tolerance on",
        "root never be complete",
        of=lambda: loop.close_with(body),
    )


def test_with_fault_tolerance_on_it_is_refused_open_too(env: GraphBuilder, orders: Orders) -> None:
    orders(env).iterate(uid="loop").map(same).sink(print)
    refused("iteration loop", "with fault tolerance on", of=env.build)


def test_a_closed_one_is_refused_where_it_is_tracked(off: GraphBuilder) -> None:
    loop_of(off)
    graph = off.build()
    refused(
        "iteration map-1 → filter-1 → map-1",
        "with fault tolerance on",
        of=lambda: job_graph(graph, FTStatus.ON),
    )


# ---------------------------------------------------------------- closing


def test_it_is_closed_by_what_comes_from_it(off: GraphBuilder, orders: Orders) -> None:
    loop, other = orders(off).iterate(), orders(off)
    refused("source-2 does not come from the iteration behind iteration-1", of=lambda: loop.close_with(other))
    refused("iteration-1 does not come from the iteration", of=lambda: loop.close_with(loop))
    mixed = loop.map(same).union(other)
    refused("source-2 does not come", of=lambda: loop.close_with(mixed))


def test_it_is_closed_by_records_of_its_schema(off: GraphBuilder, orders: Orders) -> None:
    loop = orders(off).iterate(uid="loop")
    other = loop.map(same, "id bigint")
    refused("'map-1'", "'loop'", "columns id instead of id, user", of=lambda: loop.close_with(other))


def test_it_is_closed_once(off: GraphBuilder) -> None:
    loop, body = loop_of(off)
    refused("iteration 'iteration-1' is closed twice", "filter-1", of=lambda: loop.close_with(body))


def test_it_is_closed(off: GraphBuilder, orders: Orders) -> None:
    orders(off).iterate(uid="loop").map(same).sink(print)
    refused("iteration 'loop' is never closed", "close_with", of=off.build)


def test_a_loop_without_a_way_out(off: GraphBuilder, orders: Orders) -> None:
    loop = orders(off).iterate()
    loop.close_with(loop.map(same))
    refused("no sink gets what comes from", "map-1", of=off.build)


@pytest.mark.parametrize("bad", [0, -1, "0s", "soon", None, True])
def test_the_wait_is_a_span(off: GraphBuilder, orders: Orders, bad: Any) -> None:
    refused("iterate: max_wait", error=ConfigError, of=lambda: orders(off).iterate(bad))


def test_edges_that_lead_back_are_a_tails(off: GraphBuilder) -> None:
    loop_of(off)
    graph = off.build()
    back = next(edge for edge in graph.edges if edge.feedback)
    others = tuple(edge for edge in graph.edges if not edge.feedback)

    def edged(*edges: StreamEdge) -> Callable[[], Any]:
        return lambda: job_graph(StreamGraph("loop", graph.nodes, others + edges), FTStatus.OFF)

    refused(
        "does not lead from the tail of an iteration to a head", of=edged(replace(back, source="filter-1"))
    )
    refused("has to be forward()", of=edged(replace(back, partitioner=HashByKey(None))))  # type: ignore[arg-type]
    refused("closed twice", of=edged(back, back))
    refused("has others beside it", of=edged(back, StreamEdge("iteration-1.tail", "sink-1")))


# ---------------------------------------------------------------- the graph


def test_a_tail_is_put_in_between(off: GraphBuilder) -> None:
    """Whatever the parallelism and the partitioner of what comes back, the last step is within a slot."""
    source = off.source(partitions([], []), "n bigint, word string")
    loop = source.iterate(parallelism=2).uid("loop")
    body = loop.map(same, parallelism=3)
    loop.close_with(body.key_by("word").union(body.filter(same)))
    body.sink(print)
    graph = off.build()
    (back,) = (edge for edge in graph.edges if edge.feedback)
    assert (back.source, back.target, back.partitioner) == ("loop.tail", "loop", Forward())
    assert isinstance(graph.node("loop").operator, IterationHead)
    assert isinstance(graph.node("loop.tail").operator, IterationTail)
    assert graph.node("loop.tail").parallelism == 2
    assert {edge.source for edge in graph.edges_into("loop.tail")} == {"map-1", "filter-1"}


def test_head_and_tail_are_chained_with_the_body(off: GraphBuilder) -> None:
    loop = off.source(partitions([], []), "n bigint, word string").iterate()
    body = loop.map(same)
    loop.close_with(body.filter(same))
    body.sink(print)
    chains = [[operator.uid for operator in vertex.operators] for vertex in run_of(off).vertices]
    assert chains == [["source-1"], ["iteration-1", "map-1"], ["filter-1", "iteration-1.tail"], ["sink-1"]]


def test_what_comes_back_may_be_a_side_output(off: GraphBuilder, plain: ProcessFunction) -> None:
    loop = off.source(partitions([], []), "n bigint").iterate()
    body = loop.process(plain, side={"again": "n bigint"})
    loop.close_with(body.side_output("again"))
    body.sink(print)
    (edge,) = (edge for edge in run_of(off).edges if edge.target == "iteration-1.tail")
    assert edge.tag == "again"


def test_loops_in_loops(off: GraphBuilder) -> None:
    outer = off.source(partitions([], []), "n bigint").iterate(uid="outer")
    inner = outer.map(same).iterate(uid="inner")
    body = inner.map(same)
    inner.close_with(body.filter(same))
    outer.close_with(body.filter(same))
    body.sink(print)
    graph = run_of(off)
    assert sorted(edge.target for edge in graph.edges if edge.feedback) == ["inner", "outer"]


def test_event_time_comes_from_in_front(off: GraphBuilder) -> None:
    """Watermarks do not go round: an iteration has a time if the stream in front of it has."""
    stream = off.source(partitions([], []), "n bigint, at timestamp")
    timed = stream.assign_watermarks("at").iterate()
    body = timed.map(same)
    timed.close_with(body)
    joined = body.key_by("n").join(
        timed.key_by("n"), lower=0, upper="1s", function=lambda a, b: a, schema="n bigint, at timestamp"
    )
    joined.sink(print)
    off.build()


def test_the_way_back_is_drawn_as_one(off: GraphBuilder) -> None:
    loop_of(off)
    graph = run_of(off)
    assert "iteration-1.tail ↩ iteration-1  feedback  forward" in " ".join(
        explain(graph).split("\n")
    ).replace("#4  ", "")
    assert '-.->|"feedback"|' in to_mermaid(graph)
    assert 'label="feedback", style=dashed, constraint=false' in to_dot(graph)


# ---------------------------------------------------------------- barrier mode


def test_checkpoints_have_to_be_forced(off: GraphBuilder) -> None:
    loop_of(off)
    graph = off.build()
    refused(
        "iteration 'iteration-1' (map-1 → filter-1 → map-1)",
        "force_iterations=True",
        "on the feedback edge when the barrier passed",
        of=lambda: check_forced(graph, CheckpointConfig()),
    )
    check_forced(graph, CheckpointConfig(force_iterations=True))


def test_unaligned_ones_have_to_be_forced_too(off: GraphBuilder) -> None:
    loop_of(off)
    graph = off.build()
    refused(
        "iteration 'iteration-1' (map-1 → filter-1 → map-1)",
        "force_unaligned=True",
        "unaligned=False",
        of=lambda: check_forced(graph, CheckpointConfig(unaligned=True, force_iterations=True)),
    )
    refused(
        "force_iterations=True",
        of=lambda: check_forced(graph, CheckpointConfig(unaligned=True, force_unaligned=True)),
    )
    check_forced(graph, CheckpointConfig(unaligned=True, force_iterations=True, force_unaligned=True))


def test_what_is_lost_is_said_once(off: GraphBuilder, caplog: pytest.LogCaptureFixture) -> None:
    loop_of(off)
    with caplog.at_level(logging.WARNING):
        warn_of_losses(off.build())
    (record,) = caplog.records
    assert "iteration 'iteration-1'" in record.getMessage()
    assert "a restore, and a stop with a savepoint, loses those" in record.getMessage()


def test_a_graph_without_iterations_needs_no_force(
    off: GraphBuilder, orders: Orders, caplog: pytest.LogCaptureFixture
) -> None:
    orders(off).map(same).sink(print)
    graph = off.build()
    check_forced(graph, CheckpointConfig(unaligned=True))
    warn_of_losses(graph)
    assert not caplog.records


@pytest.mark.parametrize("option", ["force_iterations", "force_unaligned"])
def test_what_gives_a_guarantee_up_is_true_or_false(option: str) -> None:
    options: Any = {option: "no"}
    refused(option, "True or False", error=ConfigError, of=lambda: CheckpointConfig(**options))


def test_key_groups_are_wired_in_a_loop(off: GraphBuilder) -> None:
    loop = off.source(partitions([], []), "n bigint").iterate()
    counted = loop.key_by("n").reduce(lambda a, b: a)
    loop.close_with(counted.filter(same))
    counted.sink(print)
    graph = job_graph(off.build(), max_parallelism=16)
    assert graph.checkpointed
    assert [edge.target for edge in graph.edges if edge.feedback] == ["iteration-1"]
    assert graph.edges[0].schema == pa.schema([("n", pa.int64())])
