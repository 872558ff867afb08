"""The vertex in random graphs: what every output that emits roots gets, and what each channel belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark import cloudpickle

from ftlayer.config import FTStatus
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.records.partitioning import Custom, Forward, HashByKey, Rebalance, ReplayByRouting, replay_twin
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.connectors import partitions
from ftlayer.topology.explain import explain, to_dot, to_mermaid
from ftlayer.topology.job_graph import JobGraph, StreamGraph
from ftlayer.topology.job_graph_generator import (
    NopFTLayerBuilder,
    OpFTLayerBuilder,
    generate,
    job_graph,
    replay_uid,
)
from ftlayer.topology.operators import Replay, Source
from ftlayer.topology.streams.data_stream import DataStream
from ftlayer.vertex.calls import StreamOptions

SCHEMA = pa.schema([("n", pa.int32()), ("word", pa.string()), ("ts", pa.int64())])
Orders = Callable[[GraphBuilder], DataStream]


def same(record: Any) -> Any:
    return record


def by_number(key: Any, channels: int) -> int:
    return 0


def by_word(key: Any, channels: int) -> int:
    return 0


class Passes(ProcessFunction):
    def process(self, record: Any, ctx: Any) -> Any:
        return [record]


class Ticks(Passes):
    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        return None


class Meets(CoProcessFunction):
    def process_left(self, record: Any, ctx: Any) -> Any:
        return [record]

    def process_right(self, record: Any, ctx: Any) -> Any:
        return [record]


class Rings(Meets):
    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        return None


def partitioned(draw: st.DrawFn, stream: DataStream) -> DataStream:
    ways: list[Callable[[], DataStream]] = [
        lambda: stream,
        stream.rebalance,
        stream.shuffle,
        stream.broadcast,
        stream.global_,
        lambda: stream.key_by("n"),
        lambda: stream.key_by("word"),
        lambda: stream.key_by("word", "n"),
        lambda: stream.partition_custom(by_number, "n"),
        lambda: stream.partition_custom(by_word, "n"),
    ]
    return draw(st.sampled_from(ways))()


def appended(draw: st.DrawFn, streams: list[DataStream]) -> list[DataStream]:
    """Put a random operator behind one or two of the streams; return the streams it makes."""
    taken, other = draw(st.sampled_from(streams)), draw(st.sampled_from(streams))
    options: dict[str, Any] = {"parallelism": draw(st.integers(1, 3))}
    state = {**options, "volatile_state": True}
    kind = draw(st.sampled_from(["map", "union", "reduce", "process", "keyed", "connect", "join"]))
    if kind == "map":
        return [partitioned(draw, taken).map(same, **options)]
    if kind == "union":
        return [partitioned(draw, taken).union(partitioned(draw, other)).filter(same, **options)]
    if kind == "reduce":
        return [taken.key_by("n").reduce(max, **state)]
    side = draw(st.sampled_from([{}, {"bad": SCHEMA}, {"bad": SCHEMA, "late": SCHEMA}]))
    if kind == "process":
        made = taken.process(Passes(), side=side, **options)
    elif kind == "keyed":
        made = taken.key_by("word").process(draw(st.sampled_from([Passes, Ticks]))(), side=side, **state)
    elif kind == "connect":
        function = draw(st.sampled_from([Meets, Rings]))()
        made = taken.key_by("n").connect(other.key_by("n")).process(function, SCHEMA, side=side, **state)
    else:
        left, right = (stream.assign_watermarks("ts").key_by("word") for stream in (taken, other))
        return [left.join(right, lower=0, upper=1, function=max, schema=SCHEMA, **state)]
    return [made, *(made.side_output(tag) for tag in side)]


@st.composite
def graphs(draw: st.DrawFn) -> StreamGraph:
    env = GraphBuilder("shop")
    streams: list[DataStream] = []
    made_by: list[str] = []  # the operator that each stream comes from

    def take(made: list[DataStream]) -> None:
        streams.extend(made)
        made_by.extend([env.draft.graph().nodes[-1].uid] * len(made))

    for _ in range(draw(st.integers(1, 2))):
        take([env.source(partitions([], [], []), SCHEMA, parallelism=draw(st.integers(1, 3)))])
    for _ in range(draw(st.integers(0, 7))):
        take(appended(draw, streams))
    for uid, stream in zip(made_by, streams, strict=True):
        consumed = {edge.source for edge in env.draft.graph().edges}
        if uid not in consumed or draw(st.booleans()):
            partitioned(draw, stream).sink(print, parallelism=draw(st.integers(1, 3)))
    return env.build()


def replays_of(graph: JobGraph) -> list[Replay]:
    return [op for vertex in graph.vertices for op in vertex.operators if isinstance(op, Replay)]


def original_edges(graph: JobGraph, replay: Replay) -> list[Any]:
    (chain,) = (vertex.uid for vertex in graph.vertices if vertex.operators[-1].uid == replay.of)
    return [edge for edge in graph.edges_from(chain) if edge.tag == replay.tag]


@given(graphs())
def test_every_edge_of_roots_has_one_twin(stream_graph: StreamGraph) -> None:
    graph = job_graph(stream_graph)
    expected = set()
    for vertex in graph.vertices:
        last = vertex.operators[-1]
        timers = isinstance(getattr(last, "function", None), Ticks | Rings)
        if isinstance(last, Source) or timers:
            expected |= {(last.uid, edge.tag) for edge in graph.edges_from(vertex.uid)}
    assert Counter((one.of, one.tag) for one in replays_of(graph)) == Counter(expected)
    for replay in replays_of(graph):
        originals, twins = original_edges(graph, replay), graph.edges_from(replay.uid)
        assert [(one.target, one.input, one.schema) for one in twins] == [
            (one.target, one.input, one.schema) for one in originals
        ]
        assert [one.partitioner for one in twins] == [replay_twin(one.partitioner) for one in originals]
        assert [one.routing for one in twins] == [one.routing for one in originals]
        assert graph.vertex(replay.uid).parallelism == 1
        assert all(one.schema == replay.schema for one in originals)


@given(graphs())
def test_a_routing_column_for_each_distinct_rule(stream_graph: StreamGraph) -> None:
    graph = job_graph(stream_graph)
    for replay in replays_of(graph):
        columns: dict[int, set[Any]] = {}
        for edge in original_edges(graph, replay):
            twin = replay_twin(edge.partitioner)
            assert (edge.routing is not None) == isinstance(twin, ReplayByRouting)
            if edge.routing is None:
                continue
            channels = graph.vertex(edge.target).parallelism
            rule: Any = edge.partitioner
            columns.setdefault(edge.routing, set()).add(
                (rule, channels) if isinstance(rule, Custom) else rule
            )
        assert sorted(columns) == list(range(len(columns)))
        assert all(len(rules) == 1 for rules in columns.values())
        rules = [rule for rules in columns.values() for rule in rules]
        assert len(set(rules)) == len(rules)


@given(graphs())
def test_edges_that_carry_no_roots_store_nothing(stream_graph: StreamGraph) -> None:
    graph = job_graph(stream_graph)
    rooted = {(edge.source, edge.tag) for one in replays_of(graph) for edge in original_edges(graph, one)}
    rooted |= {(one.uid, "") for one in replays_of(graph)}
    for edge in graph.edges:
        assert edge.routing is None or (edge.source, edge.tag) in rooted


@given(graphs(), st.sampled_from(FTStatus))
def test_channels_and_slots(stream_graph: StreamGraph, status: FTStatus) -> None:
    graph = job_graph(stream_graph, status)
    assert [edge.number for edge in graph.edges] == list(range(len(graph.edges)))
    assert len({vertex.uid for vertex in graph.vertices}) == len(graph.vertices)
    everywhere = [subtask for slot in range(graph.slots) for subtask in graph.subtasks_in(slot)]
    assert Counter(everywhere) == Counter(
        (vertex.uid, subtask) for vertex in graph.vertices for subtask in range(vertex.parallelism)
    )
    for edge in graph.edges:
        senders, receivers = (graph.vertex(uid).parallelism for uid in (edge.source, edge.target))
        channels = graph.channels(edge)
        assert len(set(channels)) == len(channels) == (senders if edge.is_forward else senders * receivers)
        assert all(channel.edge == edge.number for channel in channels)
        assert {channel.receiver for channel in channels} == set(range(receivers))


@given(graphs(), st.sampled_from(FTStatus))
def test_chains_hold_every_operator_once_in_the_records_order(
    stream_graph: StreamGraph, status: FTStatus
) -> None:
    graph = job_graph(stream_graph, status)
    inside = [op.uid for vertex in graph.vertices for op in vertex.operators if not isinstance(op, Replay)]
    assert Counter(inside) == Counter(node.uid for node in stream_graph.nodes)
    chained = 0
    for vertex in graph.vertices:
        for before, behind in zip(vertex.operators, vertex.operators[1:], strict=False):
            (edge,) = stream_graph.edges_from(before.uid)
            assert (edge.target, edge.tag) == (behind.uid, "")
            assert isinstance(stream_graph.partitioner_of(edge), Forward)
            assert stream_graph.node(behind.uid).parallelism == vertex.parallelism
            chained += 1
    from_chains = [edge for edge in graph.edges if not edge.source.startswith("replay:")]
    assert len(from_chains) + chained == len(stream_graph.edges)


@given(graphs(), st.sampled_from(FTStatus))
def test_a_graph_travels(stream_graph: StreamGraph, status: FTStatus) -> None:
    graph = job_graph(stream_graph, status)
    again = cloudpickle.loads(cloudpickle.dumps(graph))  # type: ignore[no-untyped-call]
    assert explain(again) == explain(graph)
    assert [(edge.number, edge.source, edge.target, edge.routing) for edge in again.edges] == [
        (edge.number, edge.source, edge.target, edge.routing) for edge in graph.edges
    ]
    assert [again.subtasks_in(slot) for slot in range(again.slots)] == [
        graph.subtasks_in(slot) for slot in range(graph.slots)
    ]


@given(graphs(), st.sampled_from(FTStatus))
def test_any_graph_can_be_described(stream_graph: StreamGraph, status: FTStatus) -> None:
    graph = job_graph(stream_graph, status)
    text, mermaid, dot = explain(graph), to_mermaid(graph), to_dot(graph)
    for vertex in graph.vertices:
        assert vertex.uid in text
    for edge in graph.edges:
        assert f"#{edge.number} " in text
    twins = sum(edge.source.startswith("replay:") for edge in graph.edges)
    assert mermaid.count("-.->") == dot.count("style=dashed") == twins + len(replays_of(graph))
    assert mermaid.count("-->") == len(graph.edges) - twins


@given(graphs())
def test_the_same_graph_is_translated_alike(stream_graph: StreamGraph) -> None:
    assert explain(job_graph(stream_graph)) == explain(job_graph(stream_graph))


# ---------------------------------------------------------------- by example


def test_edges_by_the_same_key_share_a_column(env: GraphBuilder, orders: Orders) -> None:
    stream = orders(env)
    stream.key_by("user").map(same, parallelism=3).sink(print)
    stream.map(same).sink(print)
    stream.key_by("user").map(same).sink(print)
    stream.key_by("id").map(same).sink(print)
    stream.filter(same).sink(print)
    stream.rebalance().map(same).sink(print)
    graph = job_graph(env.build())
    assert [edge.routing for edge in graph.edges_from("source-1")] == [0, 1, 0, 2, 1, None]
    assert [edge.number for edge in graph.edges_from("replay:source-1")] == [7, 8, 9, 10, 11, 12]


def test_a_functions_answer_depends_on_the_number_of_channels(env: GraphBuilder, orders: Orders) -> None:
    stream = orders(env)
    for parallelism in (2, 3, 2):
        stream.partition_custom(by_number, "id").map(same, parallelism=parallelism).sink(print)
    stream.partition_custom(by_word, "id").map(same).sink(print)
    graph = job_graph(env.build())
    assert [edge.routing for edge in graph.edges_from("source-1")] == [0, 1, 0, 2]


def test_functions_need_not_be_hashable(env: GraphBuilder, orders: Orders) -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, key: Any, channels: int) -> int:
            return 0

    orders(env).partition_custom(Unhashable(), "id").sink(print)
    assert job_graph(env.build()).edges_from("source-1")[0].routing == 0


def test_outputs_of_timers(env: GraphBuilder, orders: Orders) -> None:
    sides = {"late": "n int", "unused": "n int"}
    made = orders(env).key_by("id").process(Ticks(), side=sides, volatile_state=True)
    made.key_by("user").map(same).sink(print)
    made.side_output("late").sink(print)
    graph = job_graph(env.build())
    assert [(one.of, one.tag, one.stream, one.uid) for one in replays_of(graph)] == [
        ("source-1", "", "shop/source-1", "replay:source-1"),
        ("process-1", "", "shop/process-1", "replay:process-1"),
        ("process-1", "late", "shop/process-1:late", "replay:process-1:late"),
    ]
    (late,) = graph.edges_from("replay:process-1:late")
    assert (late.target, late.tag, late.routing, late.schema.names) == ("sink-2", "", 0, ["n"])
    # An output without readers is a stream all the same: its records are complete once they are registered.
    assert [stream for stream, _ in graph.options] == [
        "shop/source-1",
        "shop/process-1",
        "shop/process-1:late",
        "shop/process-1:unused",
    ]


def test_retry_options(env: GraphBuilder) -> None:
    own = StreamOptions(max_attempts=2)
    env.source([], "n int", retry=own).sink(print)
    env.source([], "n int").sink(print)
    built = env.build()
    assert dict(job_graph(built).options) == {"shop/source-1": own, "shop/source-2": StreamOptions()}
    default = StreamOptions(timeout_ms=5)
    assert dict(generate(built, OpFTLayerBuilder(default)).options)["shop/source-2"] == default
    assert dict(job_graph(built, retry=default).options) == {"shop/source-1": own, "shop/source-2": default}


def test_without_tracking_nothing_is_added(env: GraphBuilder, orders: Orders) -> None:
    orders(env).rebalance().map(same).sink(print)
    graph = generate(env.build(), NopFTLayerBuilder())
    assert [(edge.partitioner, edge.routing) for edge in graph.edges] == [(Rebalance(), None)]
    assert (replays_of(graph), graph.tracked, graph.options) == ([], False, ())


def test_what_is_refused_when_it_is_built_is_refused_when_it_is_translated(
    off: GraphBuilder, orders: Orders
) -> None:
    from ftlayer.errors import InvalidTopologyError

    orders(off).key_by("user").reduce(max).sink(print)
    built = off.build()
    assert not job_graph(built, FTStatus.OFF).tracked
    with pytest.raises(InvalidTopologyError, match="'reduce-1'"):
        job_graph(built, FTStatus.ON)


def test_replays_are_spread_over_the_slots(env: GraphBuilder) -> None:
    for _ in range(3):
        env.source([], "n int").sink(print)
    graph = job_graph(env.build())
    assert [graph.slot_of(one.uid, 0) for one in replays_of(graph)] == [0, 1, 0]


def test_a_hash_of_a_nested_field(env: GraphBuilder) -> None:
    env.source([], "a struct<b: int>").key_by("a.b").sink(print)
    (edge,) = job_graph(env.build()).edges_from("source-1")
    assert isinstance(edge.partitioner, HashByKey)
    assert edge.routing == 0


def test_a_users_uid_is_never_that_of_a_replay(env: GraphBuilder, orders: Orders) -> None:
    from ftlayer.errors import ConfigError

    with pytest.raises(ConfigError, match="uid"):
        orders(env).uid(replay_uid("x"))
