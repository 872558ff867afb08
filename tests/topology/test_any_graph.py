"""Graphs at random, senseless ones too: each is translated, or refused by an error of ours."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ftlayer.config import FTStatus
from ftlayer.errors import FTLayerError
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.functions.steps import Filter, Map, Process, Reduce
from ftlayer.records.partitioning import Broadcast, Custom, Forward, HashByKey, Rebalance
from ftlayer.records.traced import KeySelector
from ftlayer.topology.explain import explain
from ftlayer.topology.job_graph import StreamEdge, StreamGraph, StreamNode, keys_of
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.topology.operators import (
    AssignWatermarks,
    CoProcess,
    FunctionSink,
    IterableSource,
    Join,
    Operator,
    Sink,
    Source,
)

CULPRIT = re.compile(r"'[^']*'|\d")
ONE = pa.schema([("n", pa.int32())])
TWO = pa.schema([("n", pa.int32()), ("m", pa.map_(pa.string(), pa.string()))])
KEYS = st.sampled_from([(), ("n",), ("n",), ("n",), ("m",), ("x",)])
SCHEMAS = st.sampled_from([ONE, ONE, ONE, TWO])


class Ticks(ProcessFunction):
    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        return None


def same(record: Any) -> Any:
    return record


def route(key: Any, channels: int) -> int:
    return 0


@st.composite
def operators(draw: st.DrawFn, uid: str) -> Operator:
    schema, other = draw(SCHEMAS), draw(SCHEMAS)
    keys = (draw(KEYS), draw(KEYS))
    side = draw(st.sampled_from([(), (("bad", ONE),)]))
    made: list[Operator] = [
        Source(uid, IterableSource((list,)), schema),
        Map(uid, same, schema),
        Filter(uid, bool, schema),
        Reduce(uid, max, schema, keys[0], volatile_state=True),
        Process(
            uid, draw(st.sampled_from([ProcessFunction, Ticks]))(), schema, keys[0], side, volatile_state=True
        ),
        CoProcess(uid, CoProcessFunction(), schema, keys, (schema, other), side, volatile_state=True),
        Join(uid, max, schema, keys, (schema, other), 0, 1, volatile_state=True),
        AssignWatermarks(uid, draw(st.sampled_from(["n", "x"])), 0, None, schema),
        Sink(uid, FunctionSink(print), schema),
    ]
    return draw(st.sampled_from(made[1:-1] if draw(st.integers(0, 5)) else made))


UIDS = st.sampled_from(["a", "b", "c", "d"])
PARTITIONERS = st.sampled_from(
    [
        None,
        None,
        Forward(),
        Rebalance(),
        Broadcast(),
        HashByKey(KeySelector(("n",))),
        HashByKey(KeySelector(("m",))),
        Custom(KeySelector(("m",)), route),
    ]
)
EDGES = st.builds(
    StreamEdge, UIDS, UIDS, st.sampled_from([0, 0, 1]), PARTITIONERS, st.sampled_from(["", "", "bad"])
)


@st.composite
def graphs(draw: st.DrawFn) -> StreamGraph:
    """Draw a line of operators as it should be, and then some of what should not."""
    uids = draw(st.lists(UIDS, max_size=4, unique=draw(st.integers(0, 9)) > 0))
    nodes = [StreamNode(draw(operators(uid)), draw(st.sampled_from([1, 1, 1, 2]))) for uid in uids]
    first = StreamNode(Source("in", IterableSource((list,)), ONE), 1)
    last = StreamNode(Sink("out", FunctionSink(print), ONE), 1)
    edges = []
    for before, after in pairwise((first, *nodes, last)):
        for which, keys in enumerate(keys_of(after.operator)):
            by_key = HashByKey(KeySelector(keys)) if keys else None
            edges.append(StreamEdge(before.uid, after.uid, which, by_key))
    for edge in draw(st.lists(EDGES, max_size=2)):
        edges.insert(draw(st.integers(0, len(edges))), edge)
    if draw(st.integers(0, 5)) == 0:
        edges.pop(draw(st.integers(0, len(edges) - 1)))
    return StreamGraph("any", (first, *nodes, last), tuple(edges))


@settings(max_examples=300)
@given(graphs(), st.sampled_from(FTStatus))
def test_a_graph_is_translated_or_refused(graph: StreamGraph, status: FTStatus) -> None:
    try:
        made = job_graph(graph, status)
    except FTLayerError as error:
        event(f"{type(error).__name__}: {CULPRIT.sub('', str(error))[:45]}")
        return
    event("translated")
    assert explain(made)


def test_a_long_line_of_operators() -> None:
    nodes = [StreamNode(Map(f"m{number}", same, ONE), 1) for number in range(2_000)]
    ends = (
        StreamNode(Source("in", IterableSource((list,)), ONE), 1),
        StreamNode(Sink("out", FunctionSink(print), ONE), 1),
    )
    line = (ends[0], *nodes, ends[1])
    edges = tuple(StreamEdge(before.uid, after.uid) for before, after in pairwise(line))
    graph = job_graph(StreamGraph("long", line, edges))
    assert [len(vertex.operators) for vertex in graph.vertices] == [1, 2_001, 1]


@pytest.mark.parametrize("circle", [1, 3])
def test_a_circle_beside_a_long_line(circle: int) -> None:
    uids = [f"m{number}" for number in range(circle)]
    nodes = tuple(StreamNode(Map(uid, same, ONE), 1) for uid in uids)
    edges = tuple(StreamEdge(uid, uids[(place + 1) % circle]) for place, uid in enumerate(uids))
    source = StreamNode(Source("in", IterableSource((list,)), ONE), 1)
    graph = StreamGraph("circle", (source, *nodes), edges)
    assert sorted(graph.circle()) == sorted(uids)
    assert len(graph.in_order) == 1
