"""Each graph that is refused: with the error's class, the operators by name, and a way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.config import FTStatus
from ftlayer.errors import ConfigError, InvalidTopologyError, UnhashableKeyError
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.functions.steps import Filter, Map, Process, Reduce
from ftlayer.partitioning.partitioners import Custom, Forward, OutgoingRows, Rebalance
from ftlayer.records.selector import KeySelector
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.checks import check_graph
from ftlayer.topology.graph import StreamEdge, StreamGraph, StreamNode
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.topology.operators import FunctionSink as Function
from ftlayer.topology.operators import IterableSource, Join, PushSource, Sink, Source
from ftlayer.topology.streams.data_stream import DataStream

Orders = Callable[[GraphBuilder], DataStream]
SCHEMA = pa.schema([("n", pa.int32()), ("word", pa.string())])
JOINED: dict[str, Any] = {"lower": 0, "upper": "1s", "function": lambda a, b: 1, "schema": "n int"}


def same(record: Any) -> Any:
    return record


def source(uid: str = "in", parallelism: int = 2) -> StreamNode:
    return StreamNode(Source(uid, IterableSource((list,)), SCHEMA), parallelism)


def mapped(uid: str, parallelism: int = 2) -> StreamNode:
    return StreamNode(Map(uid, same, SCHEMA), parallelism)


def sink(uid: str = "out") -> StreamNode:
    return StreamNode(Sink(uid, Function(print), SCHEMA), 2)


def graph(nodes: list[StreamNode], *edges: StreamEdge, name: str = "shop") -> StreamGraph:
    return StreamGraph(name, tuple(nodes), edges)


def refused(
    error: type[Exception], *says: str, of: StreamGraph | Callable[[], Any], tracked: bool = True
) -> None:
    attempt = (lambda: check_graph(of, tracked=tracked)) if isinstance(of, StreamGraph) else of
    with pytest.raises(error) as caught:
        attempt()
    for part in says:
        assert part in str(caught.value)


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
    monkeypatch.setattr("ftlayer.columns._case_matters", lambda: True)
    env.source([], "a bigint, A bigint")


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
    process = StreamNode(Process("t", timed, ("n",), SCHEMA, (), True), 2)
    behind = graph(
        [source(), process, sink()],
        StreamEdge("in", "t", partitioner=_hash("n")),
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


# ---------------------------------------------------------------- keys


def _hash(*columns: str) -> Any:
    from ftlayer.partitioning.partitioners import HashByKey

    return HashByKey(KeySelector(columns))


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
        StreamEdge("in", "a", partitioner=_hash("t")),
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
    reduce = StreamNode(Reduce("r", max, ("n",), SCHEMA, True), 2)
    nodes = [source(), reduce, sink()]
    for partitioner in (Forward(), Rebalance(), _hash("word")):
        wrong = graph(nodes, StreamEdge("in", "r", partitioner=partitioner), StreamEdge("r", "out"))
        refused(InvalidTopologyError, "input 0 of 'r' has the key n", "'in'", "key_by", of=wrong)
    right = graph(nodes, StreamEdge("in", "r", partitioner=_hash("n")), StreamEdge("r", "out"))
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
    join = StreamNode(Join("j", max, ((), ()), (SCHEMA, SCHEMA), 0, 1, SCHEMA, True), 2)
    refused(
        InvalidTopologyError,
        "'j': a join needs keys",
        of=graph([source(), join, sink()], StreamEdge("in", "j"), StreamEdge("in", "j", 1)),
    )


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
        refused(ConfigError, method.__name__, "expected a function, got a int", of=partial(method, wrong))
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


# ---------------------------------------------------------------- what is no source


def numbers() -> Iterator[int]:
    yield 1


def needs(argument: int) -> list[int]:
    return [argument]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (numbers(), "a generator can be gone through just once"),
        (iter([1]), "a list_iterator can be gone through just once"),
        (map(same, [1]), "the generator function itself"),
        (needs, "needs needs arguments (argument"),
        ("path.csv", "got a str"),
        (b"x", "got a bytes"),
        ({"n": 1}, "got a dict"),
        (7, "expected an iterable of records"),
        (None, "got a NoneType"),
    ],
)
def test_what_is_no_source(wrong: Any, says: str, env: GraphBuilder) -> None:
    refused(ConfigError, "source", says, of=lambda: env.source(wrong, "n int"))


@pytest.mark.parametrize("wrong", ["path", 7, None])
def test_what_is_no_sink(wrong: Any, env: GraphBuilder, orders: Orders) -> None:
    refused(ConfigError, "sink", f"got a {type(wrong).__name__}", of=lambda: orders(env).sink(wrong))


def test_options_of_a_sink(env: GraphBuilder, orders: Orders) -> None:
    stream = orders(env)
    refused(ConfigError, "sink: every", of=lambda: stream.sink(print, every="0s"))
    refused(ConfigError, "max_rows", of=lambda: stream.sink(print, max_rows=0))
    refused(ConfigError, "options are for", of=lambda: stream.sink(print, options={}))


def test_with_checkpoints_a_source_has_to_rewind() -> None:
    pushed = StreamNode(Source("calls", PushSource(print), SCHEMA), 2)
    of = graph([pushed, sink()], StreamEdge("calls", "out"))
    refused(
        InvalidTopologyError,
        "source 'calls'",
        "layer.ingest(…).reader(name)",
        of=lambda: job_graph(of, max_parallelism=8),
    )


@pytest.mark.parametrize("kind", ["array<bigint>", "struct<x: bigint>"])
def test_state_by_a_key_that_python_cannot_hash(kind: str) -> None:
    """Records may be dealt out by such a key; state cannot be looked up by it."""
    env = GraphBuilder("keys", parallelism=2)
    by_key = env.source([], f"k {kind}, n bigint", uid="rows").key_by("k")
    by_key.map(lambda record: record).sink(print)
    by_key.reduce(lambda one, other: other, volatile_state=True, uid="latest").sink(print)
    with pytest.raises(
        UnhashableKeyError, match=r"'latest': key column 'k' is .*values that Python can hash"
    ):
        env.build()
