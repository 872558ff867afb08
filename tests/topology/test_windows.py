"""Windows as users write them: what becomes of the calls, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ftlayer.errors import ConfigError, InvalidTopologyError
from ftlayer.functions.steps import Process
from ftlayer.functions.windows import Fixed, Session
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.job_graph import display_name
from ftlayer.topology.job_graph_generator import as_co_process
from ftlayer.topology.operators import Join
from ftlayer.topology.streams.data_stream import DataStream
from ftlayer.topology.streams.keyed_stream import KeyedStream
from ftlayer.topology.streams.windowed_stream import session, sliding, tumbling

Orders = Callable[[GraphBuilder], DataStream]


@pytest.fixture
def keyed(off: GraphBuilder, orders: Orders) -> KeyedStream:
    return orders(off).assign_watermarks("ts").key_by("user")


def nothing(*given: Any) -> Any:
    return None


def test_kinds_of_windows() -> None:
    assert tumbling("10s") == Fixed(10_000, 10_000, 0)
    assert tumbling("24h", offset="-8h") == Fixed(86_400_000, 86_400_000, -28_800_000)
    assert sliding("1m", every="10s", offset=0.005) == Fixed(60_000, 10_000, 5)
    assert session(0.5) == Session(500)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: tumbling("soon"), "tumbling: size"),
        (lambda: tumbling(0), "tumbling: size"),
        (lambda: tumbling("1s", offset="x"), "tumbling: offset"),
        (lambda: sliding("-1s", every="1s"), "sliding: size"),
        (lambda: sliding("1s", every=0), "sliding: every"),
        (lambda: session(0), "session: gap"),
    ],
)
def test_spans_that_are_none(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_window_is_a_process_function_with_keys(off: GraphBuilder, keyed: KeyedStream) -> None:
    windowed = keyed.window(tumbling("10s")).allowed_lateness("5s").late_to("late")
    counts = windowed.aggregate(int, lambda n, record: n + 1, "n int", uid="counts", parallelism=3)
    counts.sink(print)
    counts.side_output("late").sink(print)
    graph = off.build()
    operator = graph.node("counts").operator
    assert isinstance(operator, Process)
    assert operator.keys == ("user",)
    assert operator.side == (("late", keyed.schema),)
    assert graph.node("counts").parallelism == 3
    assert counts.schema.names == ["n"]


def test_each_call_leaves_the_stream_as_it_was(keyed: KeyedStream) -> None:
    windowed = keyed.window(session("30s"))
    with_late = windowed.allowed_lateness("5s").late_to("late")
    assert windowed == keyed.window(session("30s")) != with_late
    assert with_late.reduce(nothing).side_output("late").schema == keyed.schema
    with pytest.raises(InvalidTopologyError, match="has no side output 'late'"):
        windowed.reduce(nothing).side_output("late")


def test_schemas(keyed: KeyedStream) -> None:
    windowed = keyed.window(tumbling("10s"))
    assert windowed.reduce(nothing).schema == keyed.schema
    assert windowed.reduce(nothing, "n int", result=nothing).schema.names == ["n"]
    assert windowed.process(nothing, "a int, b int").schema.names == ["a", "b"]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda k: k.window("10s"), "expected tumbling"),
        (lambda k: k.window(tumbling), "expected tumbling"),
        (lambda k: k.window(tumbling("1s")).allowed_lateness("-1s"), "allowed_lateness"),
        (lambda k: k.window(tumbling("1s")).late_to("so late"), "late_to"),
        (lambda k: k.window(tumbling("1s")).reduce(5), "reduce: function: expected a function, got an int"),
        (
            lambda k: k.window(tumbling("1s")).reduce(lambda one: one),
            "reduce: function: expected a function of 2 arguments",
        ),
        (
            lambda k: k.window(tumbling("1s")).process(lambda key, records: records, "n int"),
            "process: function: expected a function of 3 arguments",
        ),
        (lambda k: k.window(tumbling("1s")).reduce(nothing, "n int"), "no result"),
        (lambda k: k.window(tumbling("1s")).aggregate(nothing, None, "n int"), "aggregate: add"),
        (lambda k: k.window(tumbling("1s")).aggregate(int, nothing, "n int", result=3), "aggregate: result"),
        (lambda k: k.window(session("1s")).aggregate(int, nothing, "n int"), "give merge="),
        (lambda k: k.window(tumbling("1s")).process("f", "n int"), "process: function"),
    ],
)
def test_what_is_refused(keyed: KeyedStream, call: Callable[[KeyedStream], Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call(keyed)


def test_windows_need_event_time(off: GraphBuilder, orders: Orders) -> None:
    orders(off).key_by("user").window(tumbling("1s")).reduce(nothing).sink(print)
    with pytest.raises(InvalidTopologyError, match="'window-1' works on event time"):
        off.build()


def test_with_tracking_their_state_is_volatile(env: GraphBuilder, orders: Orders) -> None:
    keyed = orders(env).assign_watermarks("ts").key_by("user")
    keyed.window(session("1s")).reduce(nothing).sink(print)
    with pytest.raises(InvalidTopologyError, match="volatile_state"):
        env.build()


def test_what_windows_are_called(off: GraphBuilder, keyed: KeyedStream) -> None:
    keyed.window(tumbling("1s")).reduce(nothing).sink(print)
    keyed.window(sliding("1s", every=0.1)).reduce(nothing).sink(print)
    keyed.window(session("1s")).reduce(nothing).sink(print)
    names = {node.uid: node.name for node in off.build().nodes if node.uid.startswith("window")}
    assert names == {
        "window-1": "window(tumbling 1 second by user)",
        "window-2": "window(sliding 1 second every 100 milliseconds by user)",
        "window-3": "window(session 1 second by user)",
    }


def test_a_join_on_keyed_state_is_called_as_the_other_one(off: GraphBuilder, keyed: KeyedStream) -> None:
    keyed.join(keyed, lower=0, upper="1s", function=nothing, schema="n int").sink(print)
    operator = off.build().node("join-1").operator
    assert isinstance(operator, Join)
    rewritten = as_co_process(operator)
    assert (rewritten.uid, rewritten.keys, rewritten.schema) == ("join-1", operator.keys, operator.schema)
    assert display_name(rewritten) == display_name(operator) == "join(nothing by user = user, 0 to 1000 ms)"
