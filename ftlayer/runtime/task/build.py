"""From the graph to the tasks of one slot."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ftlayer.handler.handler import Handler
from ftlayer.partitioning.partitioners import Forward
from ftlayer.runtime.task.chain_plan import ChainPlan
from ftlayer.runtime.task.contract import Task
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.runtime.task.gate import StatusWatermarkValve
from ftlayer.runtime.task.join import JoinTask
from ftlayer.runtime.task.linked import LinkedTask
from ftlayer.runtime.task.mode import TaskMode
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import Join, Replay, Source
from ftlayer.vertex.calls import StreamOptions

MAX_REMEMBER_MS = 5 * 60_000
"""A join remembers acknowledged rows no longer for replays: they are as many as come in that time."""


def build_task(graph: JobGraph, uid: str, subtask: int, mode: TaskMode) -> Task:
    """Make one subtask of the chain ``uid`` ready.

    The task is a `ReplayTask` for a chain of a `Replay`.

    Args:
        graph: what runs.
        uid: uid of the chain.
        subtask: which of its subtasks, from 0.
        mode: makes what is of the mode. A chain that ends in a `Sink` has its sink opened at once, and in barrier
            mode one that keeps state its backend.

    Raises:
        InvalidTopologyError: the operators cannot be run as a chain, or not in this mode.
        ConfigError: the sink cannot be opened.
        CheckpointError: state cannot be restored.
    """
    operators = graph.vertex(uid).operators
    mode.check(operators)
    handler = mode.handler(uid)
    first = operators[0]
    if isinstance(first, Replay):
        return mode.replay(graph, uid, subtask, handler)
    if isinstance(first, Source | Join) and len(operators) > 1:
        cut, edge = _cut_behind_first(graph, uid)
        behind = _input_task(cut, edge.target, subtask, handler, mode)
        link = Channel(edge.number, subtask, subtask)
        ahead = mode.source if isinstance(first, Source) else partial(_input_task, mode=mode)
        return LinkedTask(ahead(cut, uid, subtask, handler), link, behind)
    if isinstance(first, Source):
        return mode.source(graph, uid, subtask, handler)
    return _input_task(graph, uid, subtask, handler, mode)


def _input_task(graph: JobGraph, uid: str, subtask: int, handler: Handler, mode: TaskMode) -> Task:
    first = graph.vertex(uid).operators[0]
    if not isinstance(first, Join):
        return mode.chain(ChainPlan(graph, uid, subtask, handler))
    edges = graph.edges_into(uid)
    gate = StatusWatermarkValve.of(graph, uid, subtask)
    emitter = Emitter(graph, uid, subtask, handler)
    return JoinTask(uid, subtask, first, edges, gate, handler, emitter, _hold_ms(graph), _remember_ms(graph))


def _hold_ms(graph: JobGraph) -> int:
    """Both sides of a pair that failed come again within the longest timeout of all."""
    return max((options.timeout_ms for _, options in graph.options), default=StreamOptions().timeout_ms)


def _remember_ms(graph: JobGraph) -> int:
    """A record that failed on its way comes within this time, though it gets lost once and fails all other times."""
    return max((min(_retry_span_ms(options), MAX_REMEMBER_MS) for _, options in graph.options), default=0)


def _retry_span_ms(options: StreamOptions) -> int:
    if options.max_attempts is None:
        return MAX_REMEMBER_MS
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
