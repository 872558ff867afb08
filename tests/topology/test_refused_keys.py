"""Keys, state, timers and event time that are refused, before anything runs."""

from __future__ import annotations

import pyarrow as pa
import pytest
from refusing import JOINED, SCHEMA, Orders, by_hash, graph, refused, same, sink, source

from ftlayer.config import FTStatus
from ftlayer.errors import ConfigError, InvalidTopologyError, UnhashableKeyError
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.functions.steps import Filter, Reduce
from ftlayer.records.partitioning import Custom, Forward, Rebalance
from ftlayer.records.traced import KeySelector
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.checks import check_graph
from ftlayer.topology.job_graph import StreamEdge, StreamGraph, StreamNode
from ftlayer.topology.operators import FunctionSink as Function
from ftlayer.topology.operators import IterableSource, Join, Sink, Source

# ---------------------------------------------------------------- keys


def test_keys_that_cannot_be_hashed_name_the_column(env: GraphBuilder, orders: Orders) -> None:
    refused(
        UnhashableKeyError,
        "key_by behind 'source-1'",
        "'tags'",
        "map",
        of=lambda: orders(env).key_by("id", "tags"),
    )
    floats = pa.schema([("n", pa.int32()), ("word", pa.string()), ("t", pa.timestamp("ms"))])
    stream = env.source([], floats)
    refused(UnhashableKeyError, "'t'", "microseconds", of=lambda: stream.key_by("t"))
    by_time = graph(
        [
            StreamNode(Source("in", IterableSource((list,)), floats), 2),
            StreamNode(Filter("a", same, floats), 2),
        ],
        StreamEdge("in", "a", partitioner=by_hash("t")),
        StreamEdge("a", "out"),
    )
    end = StreamNode(Sink("out", Function(print), floats), 2)
    refused(
        UnhashableKeyError,
        "from 'in' to 'a'",
        "'t'",
        of=StreamGraph("shop", (*by_time.nodes, end), by_time.edges),
    )


def test_keys_that_do_not_exist(env: GraphBuilder, orders: Orders) -> None:
    stream = orders(env)
    refused(ConfigError, "key_by behind 'source-1'", "'uzer'", "user", of=lambda: stream.key_by("uzer"))
    refused(ConfigError, "key_by", "at least one column", of=lambda: stream.key_by())
    refused(ConfigError, "names of columns, got a function", "map", of=lambda: stream.key_by(same))  # type: ignore[arg-type]
    refused(
        ConfigError, "partition_custom", "'uzer'", of=lambda: stream.partition_custom(lambda k, n: 0, "uzer")
    )
    refused(
        ConfigError,
        "name at least one column; there are ",
        of=lambda: stream.partition_custom(lambda key, n: 0),
    )
    refused(ConfigError, "key_by behind", "name at least one column; there are ", of=stream.key_by)
    refused(ConfigError, "expected a function", of=lambda: stream.partition_custom("id", "id"))  # type: ignore[arg-type]
    custom = Custom(KeySelector(("x",)), lambda key, channels: 0)
    refused(
        ConfigError,
        "from 'in' to 'out'",
        "'x'",
        of=graph([source(), sink()], StreamEdge("in", "out", partitioner=custom)),
    )


def test_a_custom_partitioner_may_go_by_what_cannot_be_hashed(env: GraphBuilder, orders: Orders) -> None:
    orders(env).partition_custom(lambda tags, channels: 0, "tags").sink(print)
    assert len(env.build().edges) == 1


def test_keys_of_two_inputs_have_equal_types(
    env: GraphBuilder, orders: Orders, both: CoProcessFunction
) -> None:
    left, right = orders(env), env.source([], "id int, user string")
    pair = left.key_by("user", "id").connect(right.key_by("user", "id"))
    refused(
        InvalidTopologyError,
        "'co_process-1'",
        "'id' of input 0 is int64 and 'id' of input 1 is int32",
        of=lambda: pair.process(both, "n int", volatile_state=True),
    )
    other = left.key_by("user").connect(right.key_by("user", "id"))
    refused(InvalidTopologyError, "1 and 2 columns", of=lambda: other.process(both, "n int"))
    timed = (stream.assign_watermarks("id" if stream is left else "user") for stream in (left,))
    keyed = next(timed).key_by("id")
    refused(InvalidTopologyError, "'join-1'", "int32", of=lambda: keyed.join(right.key_by("id"), **JOINED))


def test_a_keyed_operator_gets_its_records_by_key() -> None:
    reduce = StreamNode(Reduce("r", max, SCHEMA, ("n",), volatile_state=True), 2)
    nodes = [source(), reduce, sink()]
    for partitioner in (Forward(), Rebalance(), by_hash("word")):
        wrong = graph(nodes, StreamEdge("in", "r", partitioner=partitioner), StreamEdge("r", "out"))
        refused(InvalidTopologyError, "input 0 of 'r' has the key n", "'in'", "key_by", of=wrong)
    right = graph(nodes, StreamEdge("in", "r", partitioner=by_hash("n")), StreamEdge("r", "out"))
    check_graph(right, tracked=True)


# ---------------------------------------------------------------- state, timers, event time


def test_state_has_to_be_called_volatile(
    env: GraphBuilder, orders: Orders, plain: ProcessFunction, both: CoProcessFunction
) -> None:
    keyed = orders(env).assign_watermarks("ts").key_by("user")
    keyed.reduce(max).sink(print)
    keyed.process(plain).sink(print)
    keyed.connect(keyed).process(both, "n int").sink(print)
    keyed.join(keyed, **JOINED).sink(print)
    keyed.reduce(max, volatile_state=True, uid="fine").sink(print)
    with pytest.raises(InvalidTopologyError) as caught:
        env.build()
    for part in ("'reduce-1'", "'process-1'", "'co_process-1'", "'join-1'", "volatile_state=True"):
        assert part in str(caught.value)
    assert "barrier mode (CheckpointConfig)" in str(caught.value)
    assert "'fine'" not in str(caught.value)


def test_functions_without_keys_keep_no_state(
    env: GraphBuilder, orders: Orders, plain: ProcessFunction, both: CoProcessFunction
) -> None:
    orders(env).process(plain).sink(print)
    orders(env).connect(orders(env)).process(both, "n int").sink(print)
    assert len(env.build().nodes) == 7


def test_timers_need_a_key(
    env: GraphBuilder, orders: Orders, timed: ProcessFunction, timed_both: CoProcessFunction
) -> None:
    says = ("has timers", "key_by")
    refused(InvalidTopologyError, "'process-1'", *says, of=lambda: orders(env).process(timed))
    connected = orders(env).key_by("id").connect(orders(env))
    refused(InvalidTopologyError, "'co_process-1'", *says, of=lambda: connected.process(timed_both, "n int"))


@pytest.mark.parametrize("side", [0, 1])
def test_a_join_needs_watermarks_on_both_inputs(side: int, orders: Orders) -> None:
    env = GraphBuilder("shop", status=FTStatus.OFF)
    streams = [orders(env), orders(env)]
    streams[1 - side] = streams[1 - side].assign_watermarks("ts")
    left, right = (stream.map(same).key_by("id") for stream in streams)
    left.join(right, **JOINED).sink(print)
    refused(
        InvalidTopologyError,
        f"'join-1' works on event time, and what input {side} gets",
        "assign_watermarks",
        of=env.build,
    )


def test_one_stream_of_a_union_without_watermarks_is_enough_to_refuse(
    env: GraphBuilder, orders: Orders
) -> None:
    timed = orders(env).assign_watermarks("ts")
    mixed = timed.union(orders(env)).map(same)
    timed.key_by("id").join(mixed.key_by("id"), volatile_state=True, **JOINED).sink(print)
    refused(InvalidTopologyError, "input 1", "'map-1'", of=env.build)


def test_a_time_is_a_timestamp_or_a_number(env: GraphBuilder, orders: Orders) -> None:
    stream = orders(env)
    refused(
        InvalidTopologyError,
        "'watermarks-1'",
        "'user' is string",
        of=lambda: stream.assign_watermarks("user"),
    )
    refused(ConfigError, "no column 'when'", "ts", of=lambda: stream.assign_watermarks("when"))
    refused(ConfigError, "max_out_of_orderness", "-1s", of=lambda: stream.assign_watermarks("ts", "-1s"))
    refused(ConfigError, "idle", of=lambda: stream.assign_watermarks("ts", idle=0))


def test_bounds_of_a_join(env: GraphBuilder, orders: Orders) -> None:
    keyed = orders(env).key_by("id")
    options = {**JOINED, "lower": "1s", "upper": "-1s"}
    refused(ConfigError, "lower '1s'", "upper '-1s'", of=lambda: keyed.join(keyed, **options))
    refused(ConfigError, "join: upper", of=lambda: keyed.join(keyed, **{**JOINED, "upper": "soon"}))


def test_a_join_needs_keys(env: GraphBuilder, orders: Orders) -> None:
    keyed = orders(env).key_by("id")
    refused(
        InvalidTopologyError,
        "'source-2' has no key",
        of=lambda: keyed.join(orders(env), **JOINED),  # type: ignore[arg-type]
    )
    join = StreamNode(Join("j", max, SCHEMA, ((), ()), (SCHEMA, SCHEMA), 0, 1, volatile_state=True), 2)
    refused(
        InvalidTopologyError,
        "'j': a join needs keys",
        of=graph([source(), join, sink()], StreamEdge("in", "j"), StreamEdge("in", "j", 1)),
    )
