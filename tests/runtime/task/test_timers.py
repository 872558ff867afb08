"""Timers in tasks: what they put out are new roots, and watermarks wait for them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.common.clock import Now
from ftlayer.config import TopologyOptions
from ftlayer.errors import ProtocolError, TimerFailedError
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.functions.steps import CoProcess, Map, Process
from ftlayer.records.partitioning import HashByKey, Rebalance
from ftlayer.records.traced import KeySelector
from ftlayer.runtime.acker_mode.task.mode import AckerTaskMode
from ftlayer.runtime.handler import FTHandler
from ftlayer.runtime.protocol.messages import MAX_TIME_MS, Batch, EndOfStream, Idle, RecordIds, Watermark
from ftlayer.runtime.task.actions import (
    Acknowledge,
    ElementCame,
    FailRoots,
    PersistRoots,
    RowsPersisted,
    Send,
    TaskEnded,
    TaskStart,
    TimeCame,
    WakeAt,
)
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.contract import Settled
from ftlayer.runtime.task.untracked import UntrackedTaskMode
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import FunctionSink, IterableSource, Replay, Sink, Source

ROW = pa.schema([("key", pa.int64()), ("value", pa.int64())])
LATE = pa.schema([("late", pa.int64())])
LEFT, RIGHT, REPLAYS = Channel(0, 0, 0), Channel(1, 0, 0), Channel(4, 0, 0)
OPTIONS = TopologyOptions()


class Remember(ProcessFunction):
    """Passes records on, and after ``value`` ms of event (or processing) time their keys once more."""

    def __init__(self, *, processing: bool = False) -> None:
        self.processing = processing
        self.closed = False

    def process(self, record, ctx):
        if record[1] == 13:
            raise ValueError("unlucky")
        if self.processing:
            ctx.timers.processing(ctx.now_ms + record[1])
        else:
            ctx.timers.event(record[1])
        yield record

    def on_timer(self, time_ms, ctx):
        if time_ms == 666:
            raise ValueError("evil")
        if time_ms % 2:
            ctx.output("late", time_ms)
        yield ctx.key, -time_ms

    def close(self):
        self.closed = True


class Match(CoProcessFunction):
    """Counts the left records of a key; a right record gets the count."""

    def process_left(self, record, ctx):
        count = ctx.value("count", 0)
        count.set(count.get() + 1)

    def process_right(self, record, ctx):
        if record[1] == 13:
            raise ValueError("unlucky")
        yield record[0], ctx.value("count", 0).get()


def graph_of(function, *, tracked: bool = True, with_late: bool = True, tail: tuple = ()) -> JobGraph:
    by_key = HashByKey(KeySelector(("key",)))
    process = Process("process", function, ROW, ("key",), (("late", LATE),))
    vertices = [
        JobVertex("left", (Source("left", IterableSource(()), ROW),), 1),
        JobVertex("right", (Source("right", IterableSource(()), ROW),), 1),
        JobVertex("process", (process, *tail), 1),
        JobVertex("sink", (Sink("sink", FunctionSink(print), ROW),), 2),
        JobVertex("late", (Sink("late", FunctionSink(print), LATE),), 1),
        JobVertex("replay", (Replay("replay", "job/left", "left", ROW),), 1),
    ]
    edges = [
        JobEdge(0, "left", "process", 0, by_key, ROW),
        JobEdge(1, "right", "process", 0, by_key, ROW),
        JobEdge(2, "process", "sink", 0, by_key, ROW, routing=0),
        JobEdge(
            3, "process", "late" if with_late else "sink", 0, Rebalance(), LATE, "late" if with_late else ""
        ),
        JobEdge(4, "replay", "process", 0, by_key, ROW),
    ]
    if not with_late:
        del edges[3]
        edges[3] = JobEdge(3, "replay", "process", 0, by_key, ROW)
    return JobGraph("job", tuple(vertices), tuple(edges), tracked=tracked)


def build(graph: JobGraph, uid: str = "process", **arguments):
    open_sink = arguments.get("open_sink", lambda *_: None)
    if not graph.tracked:
        return build_task(graph, uid, 0, UntrackedTaskMode(open_sink))
    tracked = partial(FTHandler, job="job", run="run")
    return build_task(graph, uid, 0, AckerTaskMode(tracked, OPTIONS, open_sink))


def batch_of(*rows: tuple[int, int], first_root: int = 1, tracked: bool = True, time: int = 0) -> Batch:
    payload = pa.RecordBatch.from_pylist([{"key": key, "value": value} for key, value in rows], schema=ROW)
    roots = np.arange(first_root, first_root + len(rows), dtype=np.uint64)
    times = np.full(len(rows), time, np.int64)
    return Batch(payload, RecordIds(roots, roots + np.uint64(1000)) if tracked else None, times)


def elements(actions, edge: int = 2) -> list:
    """Rows of the batches of an edge, and the marks of its first channel, in their order."""
    found: list = []
    for action in actions:
        if isinstance(action, Send) and action.channel.edge == edge:
            if isinstance(action.element, Batch):
                found.extend(zip(*(c.to_pylist() for c in action.element.payload.columns), strict=True))
            elif action.channel.receiver == 0:
                found.append(action.element)
    return found


def of_kind(actions, kind) -> list:
    return [action for action in actions if isinstance(action, kind)]


NOW = Now(0, 0)


def test_what_timers_put_out_is_persisted_and_the_watermark_waits_for_it():
    task = build(graph_of(Remember()))
    task.handle(TaskStart(), NOW)
    actions = task.handle(ElementCame(LEFT, batch_of((1, 10), (2, 11), (3, 50))), NOW)
    assert sorted(elements(actions)) == [(1, 10), (2, 11), (3, 50)]
    assert task.handle(ElementCame(LEFT, Watermark(20)), NOW) == []
    persists = of_kind(task.handle(ElementCame(RIGHT, Watermark(15)), NOW), PersistRoots)
    assert [persist.call.stream for persist in persists] == ["job/process", "job/process:late"]
    main, late = persists
    assert main.call.payload.to_pylist() == [{"key": 1, "value": -10}, {"key": 2, "value": -11}]
    assert main.call.position is None
    assert main.call.key_hashes is not None
    assert late.call.payload.to_pylist() == [{"late": 11}]
    assert sorted(task.held_roots().tolist()) == sorted(
        [*main.call.roots.ids().tolist(), *late.call.roots.ids().tolist()]
    )

    # A later watermark waits as well, and takes the place of the earlier one.
    assert task.handle(ElementCame(RIGHT, Watermark(18)), NOW) == []
    first = task.handle(RowsPersisted(late.ticket), NOW)
    assert elements(first, edge=3) == [(11,)]
    assert elements(first) == []
    second = task.handle(RowsPersisted(main.ticket), NOW)
    assert sorted(elements(second)[:2]) == [(1, -10), (2, -11)]
    assert elements(second)[2:] == [Watermark(18)]
    (batch, *_) = [action.element for action in of_kind(second, Send)]
    assert batch.times.tolist() in ([10], [11], [10, 11])
    assert len(task.held_roots()) == 0


def test_the_ids_that_are_sent_are_those_that_were_registered():
    task = build(graph_of(Remember()))
    task.handle(TaskStart(), NOW)
    task.handle(ElementCame(LEFT, batch_of((1, 10), (2, 12), (3, 14))), NOW)
    task.handle(ElementCame(LEFT, EndOfStream()), NOW)
    (persist,) = of_kind(task.handle(ElementCame(RIGHT, EndOfStream()), NOW), PersistRoots)
    roots = persist.call.roots.ids().tolist()
    assert len(roots) == 3
    assert persist.call.values is None
    values = dict(zip(roots, roots, strict=True))
    for action in of_kind(task.handle(RowsPersisted(persist.ticket), NOW), Send):
        if isinstance(action.element, Batch):
            lineage = action.element.lineage
            assert lineage.origins is None
            for root, identity in zip(lineage.roots.tolist(), lineage.ids.tolist(), strict=True):
                values[root] ^= identity
    assert set(values.values()) == {0}


def test_roots_are_never_given_twice():
    task = build(graph_of(Remember(), with_late=False))
    task.handle(TaskStart(), NOW)
    seen: list[int] = []
    for time in range(10, 60, 10):
        task.handle(ElementCame(LEFT, batch_of((1, time), (2, time + 1), first_root=time)), NOW)
        task.handle(ElementCame(LEFT, Watermark(time + 5)), NOW)
        for persist in of_kind(task.handle(ElementCame(RIGHT, Watermark(time + 5)), NOW), PersistRoots):
            assert persist.call.stream == "job/process"  # the side output has no reader
            seen.extend(persist.call.roots.ids().tolist())
    assert len(seen) == len(set(seen)) == 10


def test_the_end_waits_for_the_vertex_and_for_replays():
    function = Remember()
    task = build(graph_of(function))
    task.handle(TaskStart(), NOW)
    task.handle(ElementCame(LEFT, batch_of((1, 10))), NOW)
    task.handle(ElementCame(LEFT, EndOfStream()), NOW)
    (persist,) = of_kind(task.handle(ElementCame(RIGHT, EndOfStream()), NOW), PersistRoots)
    assert elements(task.handle(RowsPersisted(persist.ticket), NOW)) == [(1, -10), Watermark(MAX_TIME_MS)]
    # A replay comes after the last watermark: its timer is due at once.
    actions = task.handle(ElementCame(REPLAYS, batch_of((2, 20), first_root=9)), NOW)
    assert elements(actions) == [(2, 20)]
    (persist,) = of_kind(actions, PersistRoots)
    actions = task.handle(ElementCame(REPLAYS, EndOfStream()), NOW)
    assert not of_kind(actions, TaskEnded)
    assert elements(actions) == []
    assert function.closed
    actions = task.handle(RowsPersisted(persist.ticket), NOW)
    assert elements(actions) == [(2, -20), EndOfStream()]
    assert isinstance(actions[-1], TaskEnded)
    assert task.handle(ElementCame(LEFT, Watermark(3)), NOW) == []


def test_timers_of_processing_time():
    task = build(graph_of(Remember(processing=True)))
    task.handle(TaskStart(), Now(1_000, 50_000))
    actions = task.handle(ElementCame(LEFT, batch_of((1, 10), (2, 30))), Now(1_000, 50_000))
    assert of_kind(actions, WakeAt) == [WakeAt(1_010)]
    (persist, *_) = of_kind(task.handle(TimeCame(), Now(1_010, 50_010)), PersistRoots)
    assert persist.call.payload.to_pylist() == [{"key": 1, "value": -50_010}]
    assert of_kind(task.handle(TimeCame(), Now(1_015, 50_015)), WakeAt) == [WakeAt(1_030)]
    (send, *_) = of_kind(task.handle(RowsPersisted(persist.ticket), Now(1_020, 50_020)), Send)
    assert send.element.times is None


def test_with_tracking_off_timers_go_through_the_rest_of_the_chain_at_once():
    double = Map("double", lambda record: (record[0], 2 * record[1]), ROW)
    task = build(graph_of(Remember(), tracked=False, with_late=False, tail=(double,)))
    task.handle(TaskStart(), NOW)
    task.handle(ElementCame(LEFT, batch_of((1, 10), (2, 40), tracked=False)), NOW)
    task.handle(ElementCame(LEFT, Watermark(20)), NOW)
    actions = task.handle(ElementCame(RIGHT, Watermark(20)), NOW)
    assert elements(actions) == [(1, -20), Watermark(20)]
    (send, *_) = of_kind(actions, Send)
    assert send.element.times.tolist() == [10]


def test_a_failing_timer_ends_the_slot_and_a_failing_record_just_itself():
    task = build(graph_of(Remember()))
    task.handle(TaskStart(), NOW)
    actions = task.handle(ElementCame(LEFT, batch_of((1, 13), (2, 666))), NOW)
    assert [f.root for action in of_kind(actions, FailRoots) for f in action.failures] == [1]
    assert not of_kind(actions, Acknowledge), "the other one's only copy has its id"
    with pytest.raises(TimerFailedError, match="evil"):
        (
            task.handle(ElementCame(LEFT, EndOfStream()), NOW),
            task.handle(ElementCame(RIGHT, EndOfStream()), NOW),
        )


def test_a_ticket_that_is_not_out_is_refused():
    with pytest.raises(ProtocolError, match="ticket 5"):
        build(graph_of(Remember())).handle(RowsPersisted(5), NOW)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("record"), st.integers(0, 60)),
            st.tuples(st.just("watermark"), st.integers(0, 60)),
            st.tuples(st.just("idle"), st.just(0)),
            st.tuples(st.just("accept"), st.integers(0, 5)),
        ),
        max_size=30,
    )
)
def test_no_watermark_overtakes_what_it_made_timers_put_out(script):
    """Downstream, no timer's record is older than a watermark that came before it."""
    task = build(graph_of(Remember(), with_late=False))
    task.handle(TaskStart(), NOW)
    task.handle(ElementCame(RIGHT, EndOfStream()), NOW)
    out: list[PersistRoots] = []
    sent: list = []
    expected: list[int] = []
    time = 0
    for number, (what, value) in enumerate(script):
        if what == "record":
            # Timers behind the watermark fire at once, and are late by their nature: leave them out.
            value = max(value, time + 1)
            if value == 13:
                continue  # fails
            actions = task.handle(ElementCame(LEFT, batch_of((number, value), first_root=number + 1)), NOW)
            expected.append(-value)
        elif what == "watermark":
            time = max(time, value)
            actions = task.handle(ElementCame(LEFT, Watermark(value)), NOW)
        elif what == "idle":
            actions = task.handle(ElementCame(LEFT, Idle()), NOW)
        elif out:
            actions = task.handle(RowsPersisted(out.pop(value % len(out)).ticket), NOW)
        else:
            continue
        out.extend(of_kind(actions, PersistRoots))
        sent.extend(elements(actions))
    actions = [
        *task.handle(ElementCame(LEFT, EndOfStream()), NOW),
        *task.handle(ElementCame(Channel(3, 0, 0), EndOfStream()), NOW),
    ]
    out.extend(of_kind(actions, PersistRoots))
    sent.extend(elements(actions))
    while out:
        assert not of_kind(actions, TaskEnded)
        actions = task.handle(RowsPersisted(out.pop().ticket), NOW)
        sent.extend(elements(actions))
    assert isinstance(actions[-1], TaskEnded)
    assert sent[-1] == EndOfStream()
    reached = -1
    for element in sent:
        if isinstance(element, Watermark):
            assert element.time_ms >= reached
            reached = element.time_ms
        elif isinstance(element, tuple) and element[1] < 0:
            assert -element[1] >= reached
    assert sorted(element[1] for element in sent if isinstance(element, tuple) and element[1] < 0) == sorted(
        expected
    )


def test_two_inputs_share_the_state_of_a_key():
    keys = (("key",), ("key",))
    operator = CoProcess("process", Match(), ROW, keys, (ROW, ROW))
    by_key = HashByKey(KeySelector(("key",)))
    vertices = (
        JobVertex("left", (Source("left", IterableSource(()), ROW),), 1),
        JobVertex("right", (Source("right", IterableSource(()), ROW),), 1),
        JobVertex("process", (operator,), 1),
        JobVertex("sink", (Sink("sink", FunctionSink(print), ROW),), 1),
    )
    edges = (
        JobEdge(0, "left", "process", 0, by_key, ROW),
        JobEdge(1, "right", "process", 1, by_key, ROW),
        JobEdge(2, "process", "sink", 0, Rebalance(), ROW),
    )
    task = build(JobGraph("job", vertices, edges, tracked=True))
    task.handle(TaskStart(), NOW)
    (acknowledge,) = task.handle(ElementCame(LEFT, batch_of((1, 0), (1, 0), (2, 0))), NOW)
    assert sorted(acknowledge.values.tolist()) == [1001, 1002, 1003]
    actions = task.handle(ElementCame(RIGHT, batch_of((1, 5), (2, 5), (1, 13), first_root=11)), NOW)
    assert elements(actions) == [(1, 2), (2, 1)]
    (send,) = of_kind(actions, Send)
    assert not of_kind(actions, Acknowledge)
    children = dict(zip(send.element.lineage.roots.tolist(), send.element.lineage.ids.tolist(), strict=True))
    assert children == {11: 1011, 12: 1012}
    assert [f.root for action in of_kind(actions, FailRoots) for f in action.failures] == [13]


class ListSink:
    due_ms = None

    def __init__(self) -> None:
        self.rows: list = []

    def write(self, batch, mono_ms):
        self.rows.extend(zip(*(c.to_pylist() for c in batch.columns), strict=True))
        return Settled(batch.num_rows)

    def flush(self, mono_ms, *, force):
        return Settled(0)

    def close(self):
        self.rows.append("closed")


def test_a_sink_behind_timers_with_tracking_off():
    graph = graph_of(
        Remember(), tracked=False, with_late=False, tail=(Sink("end", FunctionSink(print), ROW),)
    )
    graph = JobGraph(
        "job",
        tuple(vertex for vertex in graph.vertices if vertex.uid not in ("sink", "late", "replay")),
        graph.edges[:2],
        tracked=False,
    )
    sink = ListSink()
    task = build(graph, open_sink=lambda *_: sink)
    task.handle(TaskStart(), NOW)
    task.handle(ElementCame(LEFT, batch_of((1, 10), tracked=False)), NOW)
    task.handle(ElementCame(LEFT, EndOfStream()), NOW)
    assert task.handle(ElementCame(RIGHT, EndOfStream()), NOW) == [TaskEnded()]
    assert sink.rows == [(1, 10), (1, -10), "closed"]
