"""Latency markers: when sources send them, which way they go, and what sinks make of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.common.clock import Now
from ftlayer.config import TopologyOptions
from ftlayer.functions.steps import Map
from ftlayer.records.partitioning import Broadcast, Forward, Rebalance
from ftlayer.runtime.acker_mode.task.mode import AckerTaskMode
from ftlayer.runtime.handler import FTHandler, NonFTHandler
from ftlayer.runtime.protocol.messages import Batch, LatencyMarker, RecordIds
from ftlayer.runtime.task.actions import ElementCame, Send, TaskStart, TimeCame, WakeAt
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.contract import Settled
from ftlayer.runtime.task.emitter import EVERY_MS, Emitter, SinkLatencies, SourceMarkers
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import FunctionSink, IterableSource, Sink, Source

ROWS = pa.schema([("n", pa.int64())])
IN = Channel(0, 0, 0)


def graph() -> JobGraph:
    """A source to a map, a sink that is everywhere, and back round a loop."""
    vertices = (
        JobVertex("s", (Source("s", IterableSource(()), ROWS),), 1),
        JobVertex("map", (Map("map", lambda record: record, ROWS),), 3),
        JobVertex("all", (Sink("all", FunctionSink(print), ROWS),), 2),
    )
    edges = (
        JobEdge(0, "s", "map", 0, Rebalance(), ROWS),
        JobEdge(1, "s", "all", 0, Broadcast(), ROWS),
        JobEdge(2, "s", "s", 0, Forward(), ROWS, feedback=True),
    )
    return JobGraph("job", vertices, edges, tracked=False)


@pytest.fixture
def emitter() -> Emitter:
    return Emitter(graph(), "s", 0, NonFTHandler())


def test_a_marker_goes_by_one_channel_of_each_edge_in_turn_and_round_no_loop(emitter: Emitter) -> None:
    marker = LatencyMarker("s", 7)
    ways = [[send.channel for send in emitter.marker(marker)] for _ in range(6)]
    assert all([channel.edge for channel in way] == [0, 1] for way in ways)
    assert [way[0].receiver for way in ways] == [1, 2, 0, 1, 2, 0]
    assert [way[1].receiver for way in ways] == [1, 0, 1, 0, 1, 0]


@given(st.lists(st.tuples(st.integers(0, 1_500), st.integers(0, 2)), max_size=30))
def test_a_source_sends_one_a_second_at_most_and_none_without_rows(reads: list[tuple[int, int]]) -> None:
    markers = SourceMarkers(Emitter(graph(), "s", 0, NonFTHandler()), "s")
    moment, sent = 0, []
    for passed, rows in reads:
        moment += passed
        sends = markers.behind(rows, Now(moment, 1_000_000 + moment), root=rows)
        assert rows or not sends
        if sends:
            assert {send.element for send in sends} == {LatencyMarker("s", 1_000_000 + moment, rows)}
            sent.append(moment)
        elif rows:
            assert moment - sent[-1] < EVERY_MS
    assert all(later - earlier >= EVERY_MS for earlier, later in pairwise(sent))


@given(st.lists(st.integers(0, 5) | st.none(), max_size=40), st.randoms(use_true_random=False))
def test_a_marker_is_as_old_as_the_rows_before_it_when_they_are_settled(given: Any, draw: Any) -> None:
    """None is a marker, a number so many rows; at the end all is settled."""
    latencies = SinkLatencies()
    rows = settled = moment = markers = 0
    due: list[tuple[int, int]] = []
    expected: list[int] = []

    def look() -> None:
        while due and due[0][0] <= settled:
            expected.append(moment - due.pop(0)[1])
        latencies.look(settled, Now(moment, moment))

    for each in given:
        moment += draw.randrange(5)
        if each is None:
            markers += 1
            if rows == settled:
                expected.append(0)
            else:
                due.append((rows, moment))
            latencies.came(
                LatencyMarker("s", moment, moment), Now(moment, moment), given=rows, settled=settled
            )
        else:
            rows += each
        settled = draw.randrange(settled, rows + 1)
        assert latencies.is_due(settled) == bool(due and due[0][0] <= settled)
        look()
    settled = rows
    look()
    histogram = latencies.histograms.get("s")
    assert (0 if histogram is None else histogram.count) == markers == len(expected)
    assert histogram is None or histogram.total == pytest.approx(sum(expected) / 1_000)


class Gathering:
    """A sink that gathers rows until it is flushed."""

    def __init__(self) -> None:
        self.rows = 0

    def write(self, batch: pa.RecordBatch, mono_ms: int) -> Settled:
        self.rows += batch.num_rows
        return Settled(0)

    def flush(self, mono_ms: int, *, force: bool) -> Settled:
        rows, self.rows = self.rows, 0
        return Settled(rows)

    @property
    def due_ms(self) -> int | None:
        return 500 if self.rows else None

    def close(self) -> None:
        pass


def test_a_sink_that_gathers_is_done_when_it_has_written_and_the_write_is_counted() -> None:
    vertices = (
        JobVertex("s", (Source("s", IterableSource(()), ROWS),), 1),
        JobVertex("map", (Map("map", lambda n: n, ROWS), Sink("out", FunctionSink(print), ROWS)), 1),
    )
    edges = (JobEdge(0, "s", "map", 0, Rebalance(), ROWS),)
    mode = AckerTaskMode(
        lambda uid: FTHandler(uid, job="job", run="run"), TopologyOptions(), lambda *_: Gathering()
    )
    task: Any = build_task(JobGraph("job", vertices, edges, tracked=True), "map", 0, mode)
    task.handle(TaskStart(), Now(0, 1_000))
    roots = np.arange(1, 4, dtype=np.uint64)
    batch = Batch(pa.record_batch([[1, 2, 3]], schema=ROWS), RecordIds(roots, roots + np.uint64(9)))
    task.handle(ElementCame(IN, batch), Now(10, 1_010))
    assert task.handle(ElementCame(IN, LatencyMarker("s", 900, 3)), Now(20, 1_020)) == []
    assert task.latencies == {}
    woken = task.handle(TimeCame(), Now(500, 1_500))
    # The write has taken 40 ms, which the next call knows of; the task asks for it.
    assert task.latencies == {}
    assert WakeAt(0) in woken
    task.handle(TimeCame(), Now(540, 1_540))
    histogram = task.latencies["s"]
    assert (histogram.count, histogram.total) == (1, pytest.approx(0.64))
    assert [each.root for each in histogram.exemplars if each] == [3]
    later = task.handle(ElementCame(IN, LatencyMarker("s", 1_600)), Now(601, 1_601))
    assert not [each for each in later if isinstance(each, Send)]
    assert task.latencies["s"].count == 2
