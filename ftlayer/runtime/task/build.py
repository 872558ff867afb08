"""From the graph to the tasks of one slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa

from ftlayer.config import TopologyOptions
from ftlayer.handler.handler import Handler
from ftlayer.layer.calls import StreamOptions
from ftlayer.partitioning.partitioners import Forward
from ftlayer.runtime.task.chain_task import ChainTask
from ftlayer.runtime.task.contract import InputTask, SinkBody, Task
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.runtime.task.gate import Gate
from ftlayer.runtime.task.join import JoinTask
from ftlayer.runtime.task.linked import LinkedSourceTask, LinkedTask
from ftlayer.runtime.task.outlet import ChannelOutlet, Outlet, SinkOutlet
from ftlayer.runtime.task.pipeline import Pipeline
from ftlayer.runtime.task.replay_task import ReplayTask
from ftlayer.runtime.task.source_task import SourceTask
from ftlayer.runtime.task.timer_roots import TimerRoots
from ftlayer.state.heap import HeapBackend
from ftlayer.stream.facts import has_timers
from ftlayer.stream.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.stream.operators import CoProcess, Join, Replay, Sink, Source

OpenSink = Callable[[Sink, int, int], SinkBody]
"""``open_sink(sink, subtask, parallelism)`` makes the sink of one subtask ready."""

MAX_REMEMBER_MS = 5 * 60_000
"""A join remembers acknowledged rows no longer for replays: they are as many as come in that time."""


def build_task(
    graph: JobGraph,
    uid: str,
    subtask: int,
    handler: Handler,
    *,
    options: TopologyOptions,
    open_sink: OpenSink,
) -> Task:
    """Make one subtask of the chain ``uid`` ready.

    The task is a `SourceTask` for a chain that begins with a `Source`, a `ReplayTask` for a `Replay`, else an
    `InputTask`.

    Args:
        graph: what runs.
        uid: uid of the chain.
        subtask: which of its subtasks, from 0.
        handler: this subtask's own, made for ``uid``.
        options: of the topology.
        open_sink: called at once for a chain that ends in a `Sink`.

    Raises:
        InvalidTopologyError: the operators cannot be run as a chain.
        ConfigError: the sink cannot be opened.
    """
    operators = graph.vertex(uid).operators
    first = operators[0]
    if isinstance(first, Replay):
        return ReplayTask(graph, uid, subtask, handler, options)
    if len(operators) > 1 and isinstance(first, Source | Join):
        cut, edge = _cut_behind_first(graph, uid)
        behind = _input_task(cut, edge.target, subtask, handler, open_sink)
        link = Channel(edge.number, subtask, subtask)
        if isinstance(first, Source):
            return LinkedSourceTask(SourceTask(cut, uid, subtask, handler), link, behind)
        return LinkedTask(_input_task(cut, uid, subtask, handler, open_sink), link, behind)
    if isinstance(first, Source):
        return SourceTask(graph, uid, subtask, handler)
    return _input_task(graph, uid, subtask, handler, open_sink)


def _input_task(graph: JobGraph, uid: str, subtask: int, handler: Handler, open_sink: OpenSink) -> InputTask:
    vertex = graph.vertex(uid)
    edges = graph.edges_into(uid)
    gate = Gate.of(graph, uid, subtask)
    emitter = Emitter(graph, uid, subtask, handler)
    first, last = vertex.operators[0], vertex.operators[-1]
    if isinstance(first, Join):
        return JoinTask(
            uid, subtask, first, edges, gate, handler, emitter, _hold_ms(graph), _remember_ms(graph)
        )
    sink = last if isinstance(last, Sink) else None
    functions = [op for op in vertex.operators if not isinstance(op, Source | Replay | Join | Sink)]
    pipeline = Pipeline(functions, _inputs(first, edges), HeapBackend())
    outlet: Outlet
    if sink is not None:
        outlet = SinkOutlet(handler, open_sink(sink, subtask, vertex.parallelism))
    else:
        timed = graph.tracked and has_timers(last)
        roots = TimerRoots(graph, uid, last.uid, subtask, handler, emitter) if timed else None
        outlet = ChannelOutlet(handler, emitter, roots)
    return ChainTask(uid, subtask, edges, gate, pipeline, handler, outlet)


def _inputs(first: object, edges: tuple[JobEdge, ...]) -> tuple[pa.Schema, ...]:
    return first.inputs if isinstance(first, CoProcess) else (edges[0].schema,)


def _hold_ms(graph: JobGraph) -> int:
    """Both sides of a pair that failed come again within the longest timeout of all."""
    return max((options.timeout_ms for _, options in graph.options), default=StreamOptions().timeout_ms)


def _remember_ms(graph: JobGraph) -> int:
    """A record that failed on its way comes within this time, though it gets lost once and fails all other times."""
    return max((min(_retry_span_ms(options), MAX_REMEMBER_MS) for _, options in graph.options), default=0)


def _retry_span_ms(options: StreamOptions) -> int:
    pauses = options.backoff_ms[: options.max_attempts - 1]
    more = max(options.max_attempts - 1 - len(pauses), 0)
    total = sum(pauses) + more * (options.backoff_ms[-1] if options.backoff_ms else 0)
    # The vertex notices a timeout after one and a half at the latest, with its usual number of buckets.
    return options.timeout_ms * 3 // 2 + int(total * (1 + options.jitter))


def _cut_behind_first(graph: JobGraph, uid: str) -> tuple[JobGraph, JobEdge]:
    """Cut a chain in two behind its first operator; return the graph with it, and the edge between the two.

    What a join emits, and what a source reads, are records of their own with ids of their own: a record of a join
    is not done when the rows of its pairs are, and the other way round.
    """
    vertex = graph.vertex(uid)
    first, second = vertex.operators[0], vertex.operators[1]
    halves = (
        JobVertex(uid, vertex.operators[:1], vertex.parallelism),
        JobVertex(second.uid, vertex.operators[1:], vertex.parallelism),
    )
    vertices = [half for other in graph.vertices for half in (halves if other is vertex else (other,))]
    edges = [replace(edge, source=second.uid) if edge.source == uid else edge for edge in graph.edges]
    link = JobEdge(len(edges), uid, second.uid, 0, Forward(), first.schema)
    return replace(graph, vertices=tuple(vertices), edges=(*edges, link)), link
