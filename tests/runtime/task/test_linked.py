"""Chains that are cut: a join with what is chained to it, and with tracking off a source with it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.common.clock import Now
from ftlayer.common.failures import FailException
from ftlayer.config import TopologyOptions
from ftlayer.errors import JobError
from ftlayer.functions.steps import Filter, Map
from ftlayer.records.failures import RowFailure
from ftlayer.records.partitioning import HashByKey, Rebalance
from ftlayer.records.traced import KeySelector
from ftlayer.runtime.acker_mode.task.mode import AckerTaskMode
from ftlayer.runtime.handler import FTHandler
from ftlayer.runtime.protocol.messages import Batch, EndOfStream, LatencyMarker, RecordIds, Watermark
from ftlayer.runtime.task.actions import (
    Acknowledge,
    ElementCame,
    FailRoots,
    Send,
    SourceOver,
    SourceRows,
    TaskEnded,
    TaskStart,
    TimeCame,
    WakeAt,
)
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.contract import Settled
from ftlayer.runtime.task.untracked import UntrackedTaskMode
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import AssignWatermarks, FunctionSink, IterableSource, Join, Sink, Source

IN = pa.schema([("key", pa.int64()), ("number", pa.int64())])
PAIR = pa.schema([("left", pa.int64()), ("right", pa.int64())])
NOW = Now(0, 0)
OPTIONS = TopologyOptions()
LEFT, RIGHT = Channel(0, 0, 0), Channel(1, 0, 0)


class SlowSink:
    """Settles when it is told to; a pair of equal numbers fails."""

    def __init__(self) -> None:
        self.held: list[tuple[int, int]] = []

    def write(self, batch, mono_ms):
        self.held.extend(zip(*(c.to_pylist() for c in batch.columns), strict=True))
        return Settled(0)

    def flush(self, mono_ms, *, force):
        rows, self.held = self.held, []
        failures = [RowFailure(i, "sink", "equal", "") for i, row in enumerate(rows) if row[0] == row[1]]
        return Settled(len(rows), tuple(failures))

    @property
    def due_ms(self):
        return 100 if self.held else None

    def close(self):
        assert not self.held


def join_graph(*tail) -> JobGraph:
    by_key = HashByKey(KeySelector(("key",)))

    def pair(left, right):
        return left[1], right[1]

    operator = Join("join", pair, PAIR, (("key",), ("key",)), (IN, IN), 0, 0)
    vertices = (
        JobVertex("left", (Source("left", IterableSource(()), IN),), 1),
        JobVertex("right", (Source("right", IterableSource(()), IN),), 1),
        JobVertex("join", (operator, *tail), 1),
    )
    edges = (JobEdge(0, "left", "join", 0, by_key, IN), JobEdge(1, "right", "join", 1, by_key, IN))
    return JobGraph("job", vertices, edges, tracked=True)


def batch_of(root: int, key: int, *numbers: int) -> Batch:
    payload = pa.RecordBatch.from_pylist([{"key": key, "number": n} for n in numbers], schema=IN)
    roots = np.arange(root, root + len(numbers), dtype=np.uint64)
    return Batch(payload, RecordIds(roots, roots + np.uint64(1000)), np.zeros(len(numbers), np.int64))


class Table:
    def __init__(self, *batches: Batch) -> None:
        self.values: dict[int, int] = {}
        for batch in batches:
            self.values |= dict(zip(batch.lineage.roots.tolist(), batch.lineage.ids.tolist(), strict=True))
        self.failed: set[int] = set()

    def take(self, actions) -> list:
        for action in actions:
            if isinstance(action, Acknowledge):
                for root, value in zip(action.roots.tolist(), action.values.tolist(), strict=True):
                    self.values[root] ^= value
            elif isinstance(action, FailRoots):
                self.failed |= {failure.root for failure in action.failures}
        return actions

    @property
    def done(self) -> set[int]:
        return {root for root, value in self.values.items() if value == 0} - self.failed


def test_a_joined_record_waits_for_the_rows_of_its_pairs_at_the_sink_and_for_its_eviction():
    def lucky(record):
        if record == (2, 7):
            raise FailException("unlucky")
        return record

    sink = SlowSink()
    graph = join_graph(
        Map("lucky", lucky, PAIR),
        Filter("few", lambda p: p[1] < 9, PAIR),
        Sink("sink", FunctionSink(print), PAIR),
    )
    handler = FTHandler("join", job="job", run="run")
    task = build_task(graph, "join", 0, AckerTaskMode(lambda _: handler, OPTIONS, lambda *_: sink))
    left, right, other = batch_of(1, 1, 1, 2), batch_of(11, 1, 3, 9), batch_of(21, 5, 5)
    table = Table(left, right, other)
    table.take(task.handle(TaskStart(), NOW))
    table.take(task.handle(ElementCame(LEFT, left), NOW))
    actions = table.take(task.handle(ElementCame(RIGHT, right), NOW))
    assert WakeAt(100) in actions
    assert sink.held == [(1, 3), (2, 3)]
    assert sorted(set(task.held_roots().tolist())) == [1, 2, 11, 12]
    # All are evicted, but the pairs with 3 are still unwritten.
    task_marks = table.take(task.handle(ElementCame(LEFT, Watermark(50)), NOW))
    assert not table.done
    assert task_marks == []
    table.take(task.handle(ElementCame(RIGHT, Watermark(50)), NOW))
    assert table.done == {12}
    table.take(task.handle(TimeCame(), Now(100, 0)))
    assert table.done == {1, 2, 11, 12}
    assert len(task.held_roots()) == 0


def test_a_pair_that_fails_behind_the_join_fails_both_roots():
    sink = SlowSink()
    handler = FTHandler("join", job="job", run="run")
    task = build_task(
        join_graph(Sink("sink", FunctionSink(print), PAIR)),
        "join",
        0,
        AckerTaskMode(lambda _: handler, OPTIONS, lambda *_: sink),
    )
    left, right = batch_of(1, 1, 1, 2), batch_of(11, 1, 2)
    table = Table(left, right)
    table.take(task.handle(TaskStart(), NOW))
    table.take(task.handle(ElementCame(LEFT, left), NOW))
    table.take(task.handle(ElementCame(RIGHT, right), NOW))
    table.take(task.handle(ElementCame(LEFT, EndOfStream()), NOW))
    actions = table.take(task.handle(ElementCame(RIGHT, EndOfStream()), NOW))
    assert actions[-1] == TaskEnded()
    assert actions.count(TaskEnded()) == 1
    assert table.failed == {2, 11}
    assert table.done == {1}


def test_ids_on_the_edges_of_a_cut_chain_come_out_even():
    by_key = HashByKey(KeySelector(("left",)))
    graph = join_graph(Map("swap", lambda p: (p[1], p[0]), PAIR))
    sinks = tuple(JobVertex(uid, (Sink(uid, FunctionSink(print), PAIR),), 2) for uid in ("a", "b"))
    edges = (
        *graph.edges,
        JobEdge(2, "join", "a", 0, by_key, PAIR),
        JobEdge(3, "join", "b", 0, Rebalance(), PAIR),
    )
    graph = JobGraph("job", (*graph.vertices, *sinks), edges, tracked=True)
    task = build_task(
        graph,
        "join",
        0,
        AckerTaskMode(lambda _: FTHandler("join", job="job", run="run"), OPTIONS, lambda *_: None),
    )
    left, right = batch_of(1, 1, 1, 2, 3), batch_of(11, 1, 4, 5)
    table = Table(left, right)
    table.take(task.handle(TaskStart(), NOW))
    actions = table.take(task.handle(ElementCame(LEFT, left), NOW))
    actions += table.take(task.handle(ElementCame(RIGHT, right), NOW))
    actions += table.take(task.handle(ElementCame(LEFT, EndOfStream()), NOW))
    actions += table.take(task.handle(ElementCame(RIGHT, EndOfStream()), NOW))
    assert not table.done
    rows: dict[int, list] = {2: [], 3: []}
    for action in actions:
        if isinstance(action, Send) and isinstance(action.element, Batch):
            batch = action.element
            rows[action.channel.edge].extend(
                zip(*(c.to_pylist() for c in batch.payload.columns), strict=True)
            )
            for root, identity in zip(batch.lineage.roots.tolist(), batch.lineage.ids.tolist(), strict=True):
                table.values[root] ^= identity
    assert table.done == {1, 2, 3, 11, 12}
    expected = [(r, left) for left in (1, 2, 3) for r in (4, 5)]
    assert sorted(rows[2]) == sorted(rows[3]) == sorted(expected)


@pytest.fixture
def untracked():
    at = AssignWatermarks("times", "number", 0, None, IN)
    double = Map("double", lambda row: (row[0], 10 // row[1]), IN)
    source = Source("source", IterableSource(()), IN)
    vertices = (
        JobVertex("source", (source, at, double), 2),
        JobVertex("sink", (Sink("sink", FunctionSink(print), IN),), 2),
    )
    edges = (JobEdge(0, "source", "sink", 0, Rebalance(), IN),)
    graph = JobGraph("job", vertices, edges, tracked=False)
    task = build_task(graph, "source", 1, UntrackedTaskMode(lambda *_: None))
    task.handle(TaskStart(), NOW)
    return task


def rows_of(*numbers: int) -> SourceRows:
    payload = pa.RecordBatch.from_pylist([{"key": 0, "number": n} for n in numbers], schema=IN)
    return SourceRows("p", 0, 0, payload, None)


def test_a_source_with_its_chain_in_one_task(untracked):
    actions = untracked.handle(rows_of(1, 5, 2), NOW)
    batches = [a.element for a in actions if isinstance(a.element, Batch)]
    assert sorted(n for batch in batches for n in batch.payload["number"].to_pylist()) == [2, 5, 10]
    assert {a.channel.sender for a in actions} == {1}
    marks = [a.element for a in actions if not isinstance(a.element, Batch)]
    assert marks == [Watermark(5), Watermark(5), LatencyMarker("source", 0)]
    *ends, last = untracked.handle(SourceOver(), NOW)
    assert [a.element for a in ends if isinstance(a.element, EndOfStream)] == [EndOfStream()] * 2
    assert last == TaskEnded()


def test_with_tracking_off_a_failure_goes_up(untracked):
    with pytest.raises(JobError, match="'double' failed: ZeroDivisionError"):
        untracked.handle(rows_of(0), NOW)


def test_a_thread_beside_sees_which_row_a_join_works_on_and_that_it_comes_forward():
    seen: list[tuple[str, int | None, int]] = []

    def look(name, record):
        seen.append((name, task.row, task.progress))
        if record == (1, 4):
            raise FailException("unlucky")
        return record

    graph = join_graph(
        Map("map", lambda pair: look("map", pair), PAIR), Sink("sink", FunctionSink(print), PAIR)
    )
    operator = Join(
        "join", lambda a, b: look("join", (a[1], b[1])), PAIR, (("key",), ("key",)), (IN, IN), 0, 0
    )
    vertices = [
        JobVertex(vertex.uid, (operator, *vertex.operators[1:]), 1) if vertex.uid == "join" else vertex
        for vertex in graph.vertices
    ]
    handler = FTHandler("join", job="job", run="run")
    task = build_task(
        JobGraph("job", tuple(vertices), graph.edges, tracked=True),
        "join",
        0,
        AckerTaskMode(lambda _: handler, OPTIONS, lambda *_: SlowSink()),
    )
    assert task.row is None
    task.handle(TaskStart(), NOW)
    task.handle(ElementCame(LEFT, batch_of(1, 1, 1, 2)), NOW)
    task.handle(ElementCame(RIGHT, batch_of(11, 1, 3, 4, 5)), NOW)
    # (1, 4) fails both its records, so that (2, 4) and (1, 5) are not tried.
    assert [row for name, row, _ in seen if name == "join"] == [0, 0, 1, 2]
    assert {row for name, row, _ in seen if name == "map"} == {None}
    for name in ("join", "map"):
        progress = [progress for at, _, progress in seen if at == name]
        assert progress == sorted(set(progress)), "it changes with each call"
    assert task.row is None
    for channel in (LEFT, RIGHT):
        task.handle(ElementCame(channel, Watermark(50)), NOW)
    task.handle(ElementCame(LEFT, batch_of(21, 1, 7)), NOW)
    assert task.late == 1
