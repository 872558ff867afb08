"""Which rules of retries an operator of a graph has: its own, its sources', the topology's."""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, replace
from typing import Any, get_args

import pyarrow as pa
import pytest

from ftlayer.checkpoint.options import FailurePolicy
from ftlayer.common.rules.circuit import Limit
from ftlayer.common.rules.restart import FixedDelay
from ftlayer.errors import ConfigError, InvalidTopologyError, UnsupportedError
from ftlayer.functions.retry_rules import rules_of
from ftlayer.functions.steps import CoProcess, MapAsync
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.job_graph import JobGraph, JobVertex, rules_of_operator
from ftlayer.topology.job_graph_generator import (
    BarrierBuilder,
    FTLayerBuilder,
    NopFTLayerBuilder,
    OpFTLayerBuilder,
    job_graph,
)
from ftlayer.topology.operators import (
    AssignWatermarks,
    FunctionSink,
    IterableSource,
    Join,
    Operator,
    Replay,
    Sink,
    Source,
)
from ftlayer.topology.streams.data_stream import DataStream
from ftlayer.vertex.calls import StreamCircuit, StreamOptions


def one(value: Any) -> Any:
    return value


async def later(value: Any) -> Any:
    return value


NONE: dict[str, Any] = {}


def rules_in(env: GraphBuilder, **options: Any) -> dict[str, Any]:
    graph = job_graph(env.build(), **options)
    return {op.uid: rules_of_operator(op).levels for vertex in graph.vertices for op in vertex.operators}


def test_rules_come_from_the_operator_its_source_and_the_topology(env: GraphBuilder) -> None:
    source = env.source([], "n int", uid="source", dead_on=KeyError)
    source.map(one, uid="own", retry_on=OSError).map(one, uid="plain").sink(
        print, uid="out", dead_on=EOFError
    )
    found = rules_in(env, rules=rules_of(None, ValueError, "layer"))
    layer, of_source = rules_of(None, ValueError, "").levels, rules_of(None, KeyError, "").levels
    assert found["plain"] == found["source"] == found["replay:source"] == of_source + layer
    assert found["own"] == rules_of(OSError, None, "").levels + of_source + layer
    assert found["out"] == rules_of(None, EOFError, "").levels + of_source + layer


def every_operator(
    stream: DataStream, rated: Any = NONE, copied: Any = NONE, own: Any = NONE, **rules: Any
) -> list[Any]:
    """Return what adds each operator that can fail a record; ``rated`` is of those that are, ``copied`` of state."""
    from ftlayer.functions.process import CoProcessFunction, ProcessFunction
    from ftlayer.topology.streams.windowed_stream import tumbling

    class Plain(ProcessFunction):
        def process(self, record: Any, ctx: Any) -> Any:
            return [record]

    class Both(CoProcessFunction):
        process_left = process_right = Plain.process

    timed = stream.map(one, "n int, ts timestamp").assign_watermarks("ts").key_by("n")
    keyed = stream.key_by("n")
    state = {"volatile_state": True, **rules}
    return [
        lambda: stream.map(one, **rated, **rules),
        lambda: stream.flat_map(one, **rated, **rules),
        lambda: stream.filter(one, **rated, **rules),
        lambda: stream.map_batches(one, **own.get("map_batches", {}), **rules),
        lambda: stream.map_async(later, **own.get("map_async", {}), **rated, **rules),
        lambda: stream.process(Plain(), **rated, **rules),
        lambda: keyed.reduce(max, **copied, **state),
        lambda: keyed.aggregate(int, max, "n int", **copied, **state),
        lambda: keyed.process(Plain(), **copied, **rated, **state),
        lambda: keyed.connect(keyed).process(Both(), "n int", **copied, **state),
        lambda: timed.window(tumbling("1s")).reduce(max, **state),
        lambda: timed.window(tumbling("1s")).aggregate(int, max, "n int", **state),
        lambda: timed.window(tumbling("1s")).process(lambda key, window, records: records, "n int", **state),
        lambda: timed.join(timed, lower=0, upper=1, function=max, schema="n int", **state),
        lambda: stream.sink(print, **rules),
    ]


@pytest.mark.parametrize("number", range(15))
def test_every_operator_takes_rules_and_refuses_what_is_none(env: GraphBuilder, number: int) -> None:
    stream = env.source([], "n int")
    with pytest.raises(ConfigError, match="retry_on"):
        every_operator(stream, retry_on=3)[number]()
    every_operator(stream, dead_on=KeyError)[number]()
    last = env.draft.graph().nodes[-1].operator
    assert rules_of_operator(last) == rules_of(None, KeyError, "")


@pytest.mark.parametrize("number", range(15))
def test_every_operator_takes_a_limit_of_failures(env: GraphBuilder, number: int) -> None:
    stream = env.source([], "n int")
    with pytest.raises(ConfigError, match="max_failing"):
        every_operator(stream, max_failing="many")[number]()
    every_operator(stream, max_failing="5%")[number]()
    assert rules_of_operator(env.draft.graph().nodes[-1].operator).limit == Limit(share=0.05)


@pytest.mark.parametrize("number", range(15))
def test_no_method_of_a_stream_loses_an_option(env: GraphBuilder, number: int) -> None:
    asked = {"uid": "it", "parallelism": 3, "on_failure": FailurePolicy(max_attempts=7)}
    failing = {"retry_on": OSError, "dead_on": EOFError, "max_failing": "7%"}
    own = {"map_batches": {"kind": "pandas", "tagged": True}, "map_async": {"in_flight": 17, "timeout": "9s"}}
    every_operator(
        env.source([], "n int"), {"rate_limit": 3.5}, {"in_place": False}, own, **asked, **failing
    )[number]()
    node = env.draft.graph().nodes[-1]
    found = {field.name: getattr(node.operator, field.name) for field in dataclasses.fields(node.operator)}
    assert (node.uid, node.parallelism, node.on_failure) == tuple(asked.values())
    assert found["rules"] == rules_of(OSError, EOFError, "", "7%")
    wanted = {
        "volatile_state": 6 <= number <= 13,
        "kind": "pandas",
        "tagged": True,
        "in_flight": 17,
        "timeout_ms": 9_000,
    }
    wanted |= {"rate_limit": 3.5 if number in (0, 1, 2, 4, 5, 8) else None, "in_place": not 6 <= number <= 9}
    assert {name: found[name] for name in wanted if name in found} == {
        name: value for name, value in wanted.items() if name in found
    }


def test_no_option_of_a_source_is_lost(env: GraphBuilder) -> None:
    retry, restart = StreamOptions(max_attempts=7), FixedDelay(3, 5)
    env.source(
        [1, 2],
        "n bigint",
        uid="it",
        parallelism=1,
        retry=retry,
        restart=restart,
        replay="source",
        dead_on=KeyError,
    ).assign_watermarks("n", "7s", "3s", uid="times").sink(print)
    graph = job_graph(env.build())
    vertex, ((_, options),) = graph.vertex("it"), graph.options
    (source,), (times, *_) = vertex.operators, graph.vertex("times").operators
    assert isinstance(times, AssignWatermarks)
    assert (times.column, times.out_of_orderness_ms, times.idle_ms) == ("n", 7_000, 3_000)
    assert isinstance(source, Source)
    assert (vertex.parallelism, source.replay, source.restart) == (1, "source", restart)
    assert options == replace(retry, replay="source")
    assert source.rules == rules_of(None, KeyError, "")


def test_streams_have_the_breakers_of_what_they_feed(env: GraphBuilder) -> None:
    from ftlayer.functions.process import ProcessFunction

    class Late(ProcessFunction):
        def process(self, record: Any, ctx: Any) -> Any:
            ctx.set_processing_timer(0)
            return []

        def on_timer(self, time_ms: int, ctx: Any) -> Any:
            return [1]

    left = env.source([], "n int", uid="left", max_failing=7)
    right = env.source([], "n int", uid="right")
    env.source([], "n int", uid="aside").sink(print, uid="else")
    both = left.union(right).map(one, "n int", uid="enrich", max_failing="5%")
    timed = both.key_by("n").process(Late(), "n int", uid="timed", volatile_state=True)
    timed.sink(print, uid="out", max_failing="100/min")
    graph = job_graph(env.build(), limit=Limit(share=0.1))
    whole, enrich = StreamCircuit("", Limit(share=0.1)), StreamCircuit("enrich", Limit(share=0.05))
    out = StreamCircuit("out", Limit(count=100))
    paused = StreamCircuit("out", Limit(count=100), counts=False)
    found = {name.partition("/")[2]: set(options.circuits) for name, options in graph.options}
    assert found == {
        "left": {StreamCircuit("left", Limit(count=7)), enrich, paused},
        "right": {whole, enrich, paused},
        "aside": {whole},
        "timed": {whole, out},
    }


def test_with_checkpoints_a_limit_of_failures_is_refused(off: GraphBuilder) -> None:
    off.source([], "n int").map(one, uid="parse", max_failing=10).sink(print)
    with pytest.raises(UnsupportedError, match=r"'parse': max_failing is about single records"):
        job_graph(off.build(), max_parallelism=8)


def test_circuits_are_not_given_with_the_options_of_a_source(env: GraphBuilder) -> None:
    options = StreamOptions(circuits=(StreamCircuit("", Limit(count=1)),))
    with pytest.raises(ConfigError, match="use max_failing"):
        env.source([], "n int", retry=options)


def test_sources_that_differ_are_named_unless_the_operator_decides(env: GraphBuilder) -> None:
    left, right = env.source([], "n int", dead_on=KeyError), env.source([], "n int")
    both = left.union(right)
    both.map(one, retry_on=OSError).sink(print, retry_on=OSError)
    job_graph(env.build())
    both.map(one, uid="undecided", dead_on=OSError).sink(print, retry_on=OSError)
    with pytest.raises(
        InvalidTopologyError, match=r"'undecided' has records of 'source-1' and of 'source-2'"
    ):
        job_graph(env.build())


def test_with_checkpoints_rules_are_refused(off: GraphBuilder) -> None:
    off.source([], "n int").map(one, uid="parse", dead_on=KeyError).sink(print)
    with pytest.raises(UnsupportedError, match=r"'parse': retry_on and dead_on are about single records"):
        job_graph(off.build(), max_parallelism=8)


def test_pauses_of_a_source_that_could_never_come_are_refused(env: GraphBuilder) -> None:
    with pytest.raises(ConfigError, match=r"source: retry: backoff has 3 pauses"):
        env.source([], "n int", retry=StreamOptions(max_attempts=2, backoff_ms=(1, 2, 3)))


def filled(kind: type, uid: str) -> Any:
    """Return an operator that has another value than its default in each field that has one."""
    fields = dataclasses.fields(kind)
    values: dict[str, Any] = {
        field.name: USED[field.name]
        for field in fields
        if field.default is not MISSING or field.default_factory is not MISSING or field.name in USED
    }
    values |= {field.name: GIVEN[kind][field.name] for field in fields if field.name in GIVEN.get(kind, {})}
    values |= {field.name: field.name for field in fields if field.name not in values}
    return kind(**{**values, "uid": uid})


SCHEMA = pa.schema([("k", pa.string()), ("t", pa.int64())])
USED: dict[str, Any] = {
    "function": one,
    "schema": SCHEMA,
    "keys": ("k",),
    "rules": rules_of(OSError, KeyError, "", "5%"),
    "rate_limit": 7.5,
    "in_place": False,
    "volatile_state": True,
    "side": (("late", SCHEMA),),
    "create": int,
    "restart": FixedDelay(3, 5),
    "replay": "source",
    "tag": "",
    "in_flight": 3,
    "timeout_ms": 7,
    "max_wait_ms": 9,
    "column": "t",
    "lower_ms": -3,
    "upper_ms": 4,
    "out_of_orderness_ms": 1,
    "idle_ms": 5,
    "inputs": (SCHEMA, SCHEMA),
}
"""For each option of an operator a value that is not its default. A new option needs one here."""
TWO_KEYS: dict[str, Any] = {"keys": (("k",), ("k",))}
GIVEN: dict[type, dict[str, Any]] = {
    Source: {"connector": IterableSource((list,))},
    Sink: {"connector": FunctionSink(print)},
    MapAsync: {"function": later},
    Join: TWO_KEYS,
    CoProcess: TWO_KEYS,
}
KINDS = [kind for kind in get_args(Operator) if kind is not Replay]


@pytest.mark.parametrize(
    "builder",
    [NopFTLayerBuilder(), OpFTLayerBuilder(), BarrierBuilder(8)],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_builder_loses_an_option_of_an_operator(kind: type, builder: FTLayerBuilder) -> None:
    operator = filled(kind, "it")
    vertex = JobVertex("it", (operator,), 3, FailurePolicy())
    wired = builder.wire(JobGraph("job", (vertex,), (), tracked=False), {}).vertex("it")
    assert replace(wired, operators=()) == replace(vertex, operators=())
    (after,) = wired.operators
    for field in dataclasses.fields(kind):
        if kind is Join and after is not operator and field.name in ("function", "lower_ms", "upper_ms"):
            found = getattr(after.function, field.name)
        else:
            found = getattr(after, field.name)
        assert found == getattr(operator, field.name), field.name


def test_what_a_replay_is_told_is_its_streams(env: GraphBuilder) -> None:
    source = env.source([], "n int", uid="source", dead_on=KeyError, max_failing=3)
    source.sink(print)
    wired = job_graph(env.build())
    (replay,) = wired.vertex("replay:source").operators
    (origin,) = wired.vertex("source").operators
    assert (replay.schema, rules_of_operator(replay)) == (origin.schema, rules_of_operator(origin))


@pytest.mark.parametrize("option", [{"retry": StreamOptions(timeout_ms=5)}, {"replay": "source"}])
def test_what_barrier_mode_has_no_use_for_is_refused(env: GraphBuilder, option: dict[str, Any]) -> None:
    env.source([1], "n int", uid="source", **option).sink(print)
    with pytest.raises(UnsupportedError, match=f"'source': {next(iter(option))}"):
        job_graph(env.build(), max_parallelism=8)


def test_extra_keys_are_an_option_of_operators_that_return_records(env: GraphBuilder) -> None:
    source = env.source([], "n int", uid="source")
    for uid, options in [
        ("none", {}),
        ("fail", {"extra_keys": "fail"}),
        ("ignore", {"extra_keys": "ignore"}),
    ]:
        source.map(one, uid=uid, **options).sink(print)
    graph = job_graph(env.build())
    lax = {op.uid for vertex in graph.vertices for op in vertex.operators if rules_of_operator(op).lax}
    assert lax == {"ignore"}
    with pytest.raises(ConfigError, match="map: extra_keys: expected one of fail, ignore"):
        source.map(one, extra_keys="drop")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="filter: extra_keys"):
        source.filter(one, extra_keys="ignore")
