"""What the fluent API writes into the graph."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.errors import ConfigError
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.functions.steps import MapBatches, Process
from ftlayer.records.partitioning import Broadcast, Custom, Forward, Global, HashByKey, Rebalance, Shuffle
from ftlayer.records.traced import KeySelector
from ftlayer.sources import FromJson
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.job_graph import StreamGraph
from ftlayer.topology.operators import AssignWatermarks, CoProcess, Join, PushSource, Sink
from ftlayer.topology.streams.data_stream import DataStream
from ftlayer.vertex.calls import StreamOptions

Orders = Callable[[GraphBuilder], DataStream]


def double(record: Any) -> Any:
    return record


def by_id(key: Any, channels: int) -> int:
    return int(key) % channels


def edge_into(graph: StreamGraph, uid: str, which: int = 0) -> Any:
    return graph.partitioner_of(graph.edges_into(uid)[which])


def program(env: GraphBuilder, orders: Orders) -> StreamGraph:
    stream = orders(env).map(double).filter(bool).map(double, "n int")
    stream.sink(print)
    stream.flat_map(double).sink(print, uid="archive")
    return env.build()


def test_the_same_calls_give_the_same_uids(orders: Orders) -> None:
    first, second = (program(GraphBuilder("shop"), orders) for _ in range(2))
    uids = [node.uid for node in first.nodes]
    assert uids == ["source-1", "map-1", "filter-1", "map-2", "sink-1", "flat_map-1", "archive"]
    assert [node.uid for node in second.nodes] == uids


def test_a_uid_given_to_one_operator_renames_no_other(env: GraphBuilder, orders: Orders) -> None:
    stream = orders(env).uid("orders").map(double, uid="clean").map(double)
    stream.map(double).uid("last").sink(print)
    assert [node.uid for node in env.build().nodes] == ["orders", "clean", "map-2", "last", "sink-1"]


def test_schemas_follow_the_operators(env: GraphBuilder, orders: Orders) -> None:
    source = orders(env)
    assert source.schema.names == ["id", "user", "ts", "tags"]
    assert source.map(double).schema == source.schema
    assert source.map(double, pa.schema([("n", pa.int8())])).filter(bool).schema.names == ["n"]
    assert source.flat_map(double, "word string").schema == pa.schema([("word", pa.string())])
    assert source.key_by("user").reduce(max).schema == source.schema
    counts = source.key_by("user").aggregate(tuple, max, "user string, n bigint")
    assert counts.schema.names == ["user", "n"]


def test_the_parser_of_schemas_can_be_replaced() -> None:
    asked: list[str] = []

    def parse(text: str) -> pa.Schema:
        asked.append(text)
        return pa.schema([("x", pa.int8())])

    env = GraphBuilder("shop", parse_schema=parse)
    assert env.source([], "anything").map(double, "else").schema.names == ["x"]
    assert asked == ["anything", "else"]


def test_edges_are_forward_between_equal_parallelisms_and_rebalance_elsewhere(
    env: GraphBuilder, orders: Orders
) -> None:
    orders(env).map(double).map(double, parallelism=3).map(double).sink(print)
    graph = env.build()
    assert [node.parallelism for node in graph.nodes] == [2, 2, 3, 2, 2]
    partitioners = [graph.partitioner_of(edge) for edge in graph.edges]
    assert partitioners == [Forward(), Rebalance(), Rebalance(), Forward()]


def test_parallelism_can_be_set_behind_an_operator(env: GraphBuilder, orders: Orders) -> None:
    stream = orders(env).map(double)
    stream.sink(print)
    stream.set_parallelism(5)
    assert env.build().node("map-1").parallelism == 5
    assert edge_into(env.build(), "sink-1") == Rebalance()


def test_explicit_partitioners(env: GraphBuilder, orders: Orders) -> None:
    source = orders(env)
    made = {
        "forward": (source.forward(), Forward()),
        "rebalance": (source.rebalance(), Rebalance()),
        "shuffle": (source.shuffle(7), Shuffle(7)),
        "broadcast": (source.broadcast(), Broadcast()),
        "global": (source.global_(), Global()),
        "custom": (source.partition_custom(by_id, "id"), Custom(KeySelector(("id",)), by_id)),
        "hash": (source.key_by("id", "user"), HashByKey(KeySelector(("id", "user")))),
        "last": (source.key_by("id").shuffle().global_(), Global()),
    }
    for uid, (stream, _) in made.items():
        stream.map(double, uid=uid).sink(print)
    graph = env.build()
    assert {uid: edge_into(graph, uid) for uid in made} == {uid: wanted for uid, (_, wanted) in made.items()}


def test_a_keyed_stream_keeps_its_partitioning_in_front_of_an_operator_without_keys(
    env: GraphBuilder, orders: Orders
) -> None:
    orders(env).key_by("user").map(double).sink(print)
    assert edge_into(env.build(), "map-1") == HashByKey(KeySelector(("user",)))


def test_a_union_keeps_the_partitioner_of_each(env: GraphBuilder, orders: Orders) -> None:
    first, second = orders(env), orders(env)
    both = first.key_by("user").union(second, first.broadcast())
    both.map(double).sink(print)
    graph = env.build()
    assert [(edge.source, graph.partitioner_of(edge)) for edge in graph.edges_into("map-1")] == [
        ("source-1", HashByKey(KeySelector(("user",)))),
        ("source-2", Forward()),
        ("source-1", Broadcast()),
    ]


def test_a_union_can_be_keyed(env: GraphBuilder, orders: Orders) -> None:
    orders(env).union(orders(env)).key_by("user").reduce(max, volatile_state=True).sink(print)
    graph = env.build()
    assert [edge_into(graph, "reduce-1", which) for which in (0, 1)] == [
        HashByKey(KeySelector(("user",)))
    ] * 2


def test_side_outputs(env: GraphBuilder, orders: Orders, plain: ProcessFunction) -> None:
    stream = orders(env).process(plain, side={"late": "n int", "bad": "text string"})
    late = stream.side_output("late")
    assert late.schema == pa.schema([("n", pa.int32())])
    late.map(double).sink(print)
    stream.sink(print)
    graph = env.build()
    assert [(edge.tag, edge.target) for edge in graph.edges_from("process-1")] == [
        ("late", "map-1"),
        ("", "sink-2"),
    ]
    operator = graph.node("process-1").operator
    assert isinstance(operator, Process)
    assert (operator.keys, [tag for tag, _ in operator.side]) == ((), ["late", "bad"])


def test_an_operator_whose_side_output_alone_is_used_leads_somewhere(
    env: GraphBuilder, orders: Orders, plain: ProcessFunction
) -> None:
    orders(env).process(plain, side={"bad": "n int"}).side_output("bad").sink(print)
    assert len(env.build().edges) == 2


def test_watermarks(env: GraphBuilder, orders: Orders) -> None:
    orders(env).assign_watermarks("ts", "0s", idle="5s").sink(print)
    orders(env).assign_watermarks("id").sink(print)
    graph = env.build()
    first, second = graph.node("watermarks-1").operator, graph.node("watermarks-2").operator
    assert isinstance(first, AssignWatermarks)
    assert isinstance(second, AssignWatermarks)
    assert (first.column, first.out_of_orderness_ms, first.idle_ms) == ("ts", 0, 5_000)
    assert (second.column, second.out_of_orderness_ms, second.idle_ms) == ("id", 1_000, None)


def test_connected_streams_share_keys_only_where_both_have_some(
    env: GraphBuilder, orders: Orders, both: CoProcessFunction
) -> None:
    left, right = orders(env), env.source([], "name string, n int")
    left.key_by("user").connect(right.key_by("name")).process(both, "x int", volatile_state=True).sink(print)
    left.key_by("user").connect(right.broadcast()).process(both, "x int").sink(print)
    graph = env.build()
    keyed, mixed = graph.node("co_process-1").operator, graph.node("co_process-2").operator
    assert isinstance(keyed, CoProcess)
    assert isinstance(mixed, CoProcess)
    assert keyed.keys == (("user",), ("name",))
    assert mixed.keys == ((), ())
    assert keyed.inputs == (left.schema, right.schema)
    edges = graph.edges_into("co_process-2")
    assert [(edge.source, edge.input) for edge in edges] == [("source-1", 0), ("source-2", 1)]
    assert edges[0].partitioner == HashByKey(KeySelector(("user",)))


def test_a_stream_may_be_joined_with_itself(env: GraphBuilder, orders: Orders) -> None:
    keyed = orders(env).assign_watermarks("ts").key_by("id")
    pairs = keyed.join(
        keyed, lower="-5s", upper="0s", function=lambda a, b: 1, schema="n int", volatile_state=True
    )
    pairs.sink(print)
    graph = env.build()
    operator = graph.node("join-1").operator
    assert isinstance(operator, Join)
    assert (operator.lower_ms, operator.upper_ms) == (-5_000, 0)
    assert [(edge.source, edge.input) for edge in graph.edges_into("join-1")] == [
        ("watermarks-1", 0),
        ("watermarks-1", 1),
    ]


def test_behind_a_join_records_have_times(env: GraphBuilder, orders: Orders) -> None:
    left = orders(env).assign_watermarks("ts").key_by("id")
    right = orders(env).assign_watermarks("ts").map(double).key_by("id")
    options: dict[str, Any] = {"lower": 0, "upper": 10, "function": lambda a, b: 1, "volatile_state": True}
    once = left.join(right, schema="id bigint", **options)
    once.key_by("id").join(left, schema="n int", **options).sink(print)
    assert len(env.build().nodes) == 8


def test_without_tracking_state_needs_no_word(off: GraphBuilder, orders: Orders) -> None:
    orders(off).key_by("user").reduce(max).sink(print)
    assert off.build().node("reduce-1").parallelism == 2


def test_retry_options_of_a_source(env: GraphBuilder) -> None:
    own = StreamOptions(max_attempts=2)
    env.source([], "n int", retry=own).sink(print)
    assert env.build().node("source-1").retry == own


def test_a_function_of_batches_may_say_what_its_schema_is(env: GraphBuilder, orders: Orders) -> None:
    objects = orders(env).map_batches(FromJson("n int", column="user", keep=["id"]))
    assert objects.schema == pa.schema([("n", pa.int32()), orders(env).schema.field("id")])
    assert orders(env).map_batches(FromJson("n int"), "n int").schema.names == ["n"]
    with pytest.raises(
        ConfigError, match="FromJson: there is no column 'value'; messages have id, user, ts, tags"
    ):
        orders(env).map_batches(FromJson("n int"))


def test_map_batches(env: GraphBuilder, orders: Orders) -> None:
    orders(env).map_batches(double, "n int", kind="pandas", tagged=True).sink(print)
    operator = env.build().node("map_batches-1").operator
    assert isinstance(operator, MapBatches)
    assert (operator.kind, operator.tagged, operator.schema.names) == ("pandas", True, ["n"])


def test_a_push_source_has_one_subtask_unless_told_otherwise(env: GraphBuilder) -> None:
    push = PushSource(lambda push: None)
    env.source(push, "n int").sink(print)
    env.source(push, "n int", parallelism=2).sink(print)
    graph = env.build()
    assert [graph.node(uid).parallelism for uid in ("source-1", "source-2")] == [1, 2]


def test_display_names(env: GraphBuilder, orders: Orders) -> None:
    orders(env).map(double).key_by("user").reduce(max, volatile_state=True).sink(print)
    names = [node.name for node in env.build().nodes]
    assert names == ["source(2 iterables)", "map(double)", "reduce(max by user)", "sink(print)"]


def test_a_node_that_is_a_sink_gets_the_schema_of_its_stream(env: GraphBuilder, orders: Orders) -> None:
    stream = orders(env)
    stream.sink(print)
    operator = env.build().node("sink-1").operator
    assert isinstance(operator, Sink)
    assert operator.schema == stream.schema


@pytest.mark.parametrize("room", ["job_graph", "builder", "explain", "job_graph_generator"])
def test_what_slots_import_is_light(room: str) -> None:
    code = (
        f"import sys, ftlayer.topology.{room}; "
        "print([name for name in ('pyspark', 'pandas', 'numba', 'lmdb') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
