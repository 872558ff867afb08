"""Tasks with fault tolerance off."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ftlayer.common.clock import Now
from ftlayer.errors import InvalidTopologyError, ProtocolError
from ftlayer.records.partitioning import Broadcast
from ftlayer.runtime.protocol.messages import Batch, EndOfStream, LatencyMarker
from ftlayer.runtime.task.actions import (
    RowsPersisted,
    Send,
    SourceOver,
    SourceRows,
    TaskEnded,
    TaskStart,
    TimeCame,
)
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.chain_plan import TaskMode
from ftlayer.runtime.task.untracked import UntrackedSourceTask, UntrackedTaskMode
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import FunctionSink, IterableSource, Operator, Replay, Sink, Source

NOW = Now(0, 0)
SCHEMA = pa.schema([("n", pa.int64())])


def graph_of(first: Operator) -> JobGraph:
    vertices = (
        JobVertex("first", (first,), 1),
        JobVertex("sink", (Sink("sink", FunctionSink(print), SCHEMA),), 2),
    )
    edges = (JobEdge(0, "first", "sink", 0, Broadcast(), SCHEMA),)
    return JobGraph("job", vertices, edges, tracked=False)


@pytest.fixture
def mode() -> TaskMode:
    def no_sink(sink: Sink, subtask: int, parallelism: int) -> None:
        raise AssertionError(f"{sink.uid!r} is opened")

    return UntrackedTaskMode(no_sink)  # type: ignore[arg-type]


def test_rows_are_sent_as_they_are_read_and_nobody_is_told(mode: TaskMode) -> None:
    source = build_task(graph_of(Source("first", IterableSource(()), SCHEMA)), "first", 0, mode)
    assert isinstance(source, UntrackedSourceTask)
    assert source.handle(TaskStart(), NOW) == source.handle(TimeCame(), NOW) == []
    rows = pa.record_batch([[1, 2]], schema=SCHEMA)
    sends = source.handle(SourceRows("p", 0, 0, rows, None), NOW)
    batches = [Send(Channel(0, 0, receiver), Batch(rows)) for receiver in (0, 1)]
    assert sends == [*batches, Send(Channel(0, 0, 1), LatencyMarker("first", 0))]
    assert len(source.held_roots()) == 0
    ends = [Send(Channel(0, 0, receiver), EndOfStream()) for receiver in (0, 1)]
    assert source.handle(SourceOver(), NOW) == [*ends, TaskEnded()]
    with pytest.raises(ProtocolError, match=r"'first' was given RowsPersisted"):
        source.handle(RowsPersisted(1), NOW)


def test_there_is_nothing_to_replay(mode: TaskMode) -> None:
    graph = graph_of(Replay("first", "job/s", "s", SCHEMA))
    with pytest.raises(InvalidTopologyError, match="'first' lets records in again"):
        build_task(graph, "first", 0, mode)
