"""From the graph to the tasks of one slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import pyarrow as pa

from ftlayer.checkpoint.snapshots import SubtaskRestore
from ftlayer.config import TopologyOptions
from ftlayer.errors import InvalidTopologyError
from ftlayer.functions.steps import Process, Reduce
from ftlayer.handler.handler import Handler
from ftlayer.partitioning.partitioners import Forward
from ftlayer.runtime.acker_mode.task.companion import AckerCompanion
from ftlayer.runtime.acker_mode.task.replay_task import ReplayTask
from ftlayer.runtime.acker_mode.task.source_task import SourceTask
from ftlayer.runtime.acker_mode.task.timer_roots import TimerRoots
from ftlayer.runtime.barrier_mode.task.checkpointed_chain import CheckpointedChainTask
from ftlayer.runtime.barrier_mode.task.checkpointed_source import CheckpointedSourceTask
from ftlayer.runtime.barrier_mode.task.shared_backend import SharedBackend
from ftlayer.runtime.task.chain_task import ChainTask
from ftlayer.runtime.task.companion import ChainCompanion, NoCompanion
from ftlayer.runtime.task.contract import CommittingSinkBody, InputTask, SinkBody, Task
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.runtime.task.gate import StatusWatermarkValve
from ftlayer.runtime.task.iteration import CheckpointedHeadTask, HeadTask, LoopGate
from ftlayer.runtime.task.join import JoinTask
from ftlayer.runtime.task.key_schemas import key_schemas
from ftlayer.runtime.task.linked import LinkedSourceTask, LinkedTask
from ftlayer.runtime.task.outlet import ChannelOutlet, Outlet, SinkOutlet
from ftlayer.runtime.task.pipeline import OperatorChain
from ftlayer.state.contract import CheckpointedBackend
from ftlayer.state.heap import HeapBackend
from ftlayer.topology.facts import has_timers
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import (
    CoProcess,
    IterationHead,
    IterationTail,
    Join,
    Operator,
    Replay,
    Sink,
    Source,
    WriterSink,
)
from ftlayer.vertex.calls import StreamOptions

OpenSink = Callable[[Sink, int, int], SinkBody]
"""``open_sink(sink, subtask, parallelism)`` makes the sink of one subtask ready.

In a graph with checkpoints that of a `WriterSink` is a `CommittingSinkBody`.
"""

OpenBackend = Callable[[str, int, Mapping[str, pa.Schema]], CheckpointedBackend]
"""``open_backend(chain, subtask, keys)`` opens, and restores, the state of one subtask of a chain.

``keys`` are the types of the key columns of each operator that has a key, by uid.
"""

NoFunction = Source | Replay | Join | IterationHead | IterationTail | Sink
"""Operators that are no part of a chain's pipeline: they are what the task itself does, or nothing at all."""

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
    restore: SubtaskRestore | None = None,
    open_backend: OpenBackend | None = None,
) -> Task:
    """Make one subtask of the chain ``uid`` ready.

    The task is a `SourceTask` for a chain that begins with a `Source`, a `ReplayTask` for a `Replay`, else an
    `InputTask`. In a graph with checkpoints it is a `CheckpointedSource`, or an `InputTask` that is a
    `CheckpointedTask` as well.

    Args:
        graph: what runs.
        uid: uid of the chain.
        subtask: which of its subtasks, from 0.
        handler: this subtask's own, made for ``uid``.
        options: of the topology.
        open_sink: called at once for a chain that ends in a `Sink`.
        restore: with checkpoints: what the subtask begins with. A source takes its positions from it; state is
            restored by ``open_backend``.
        open_backend: with checkpoints: called at once for a chain with an operator that can keep state.

    Raises:
        InvalidTopologyError: the operators cannot be run as a chain, or not with checkpoints.
        ConfigError: the sink cannot be opened.
        CheckpointError: what ``open_backend`` raises.
    """
    operators = graph.vertex(uid).operators
    first = operators[0]
    if graph.checkpointed:
        return _checkpointed_task(graph, uid, subtask, handler, open_sink, restore, open_backend)
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
    gate = StatusWatermarkValve.of(graph, uid, subtask)
    emitter = Emitter(graph, uid, subtask, handler)
    first, last = vertex.operators[0], vertex.operators[-1]
    if isinstance(first, Join):
        return JoinTask(
            uid, subtask, first, edges, gate, handler, emitter, _hold_ms(graph), _remember_ms(graph)
        )
    sink = last if isinstance(last, Sink) else None
    functions = [op for op in vertex.operators if not isinstance(op, NoFunction)]
    pipeline = OperatorChain(functions, _inputs(first, edges), HeapBackend())
    outlet: Outlet
    if sink is not None:
        outlet = SinkOutlet(handler, open_sink(sink, subtask, vertex.parallelism))
    else:
        timed = graph.tracked and has_timers(last)
        roots = TimerRoots(graph, uid, last.uid, subtask, handler, emitter) if timed else None
        outlet = ChannelOutlet(handler, emitter, roots)
    companion: ChainCompanion = AckerCompanion(handler.xor) if handler.tracking else NoCompanion()
    if isinstance(first, IterationHead):
        loop = LoopGate.of(graph, uid, subtask)
        head = HeadTask(uid, subtask, edges, loop, pipeline, handler, outlet, companion)
        head.attach(graph, loop)
        return head
    return ChainTask(uid, subtask, edges, gate, pipeline, handler, outlet, companion)


def _checkpointed_task(
    graph: JobGraph,
    uid: str,
    subtask: int,
    handler: Handler,
    open_sink: OpenSink,
    restore: SubtaskRestore | None,
    open_backend: OpenBackend | None,
) -> Task:
    vertex = graph.vertex(uid)
    operators = vertex.operators
    _check_checkpointable(operators)
    first, last = operators[0], operators[-1]
    if isinstance(first, Source):
        positions = {} if restore is None else restore.positions
        return CheckpointedSourceTask(graph, uid, subtask, handler, positions)
    edges = graph.edges_into(uid)
    inputs = _inputs(first, edges)
    functions = [op for op in operators if not isinstance(op, NoFunction)]
    keys = key_schemas(functions, inputs)
    backend = None
    if any(isinstance(op, Process | CoProcess | Reduce) for op in functions):
        if open_backend is None:
            raise ValueError(f"chain {uid!r} keeps state, and there is no open_backend")
        backend = SharedBackend(open_backend(uid, subtask, keys))
    pipeline = OperatorChain(functions, inputs, HeapBackend() if backend is None else backend.backend)
    outlet: Outlet = ChannelOutlet(handler, Emitter(graph, uid, subtask, handler), None)
    committing: CommittingSinkBody | None = None
    if isinstance(last, Sink):
        body = open_sink(last, subtask, vertex.parallelism)
        outlet = SinkOutlet(handler, body)
        if isinstance(last.connector, WriterSink):
            committing = cast(CommittingSinkBody, body)
    if isinstance(first, IterationHead):
        loop = LoopGate.of(graph, uid, subtask)
        head = CheckpointedHeadTask(uid, subtask, edges, loop, pipeline, handler, outlet, backend, committing)
        head.attach(graph, loop)
        return head
    gate = StatusWatermarkValve.of(graph, uid, subtask)
    return CheckpointedChainTask(uid, subtask, edges, gate, pipeline, handler, outlet, backend, committing)


def _check_checkpointable(operators: tuple[Operator, ...]) -> None:
    """Raise `InvalidTopologyError` for a chain that barriers cannot go through."""
    first = operators[0]
    if isinstance(first, Replay):
        raise InvalidTopologyError(
            f"{first.uid!r} lets records in again that were not acknowledged, and with checkpoints none is: "
            "leave fault tolerance by records or checkpointing out"
        )
    if isinstance(first, Join):
        raise InvalidTopologyError(
            f"join {first.uid!r}: its buffers are in no checkpoint; with checkpoints a join is a CoProcess with keyed "
            "state"
        )
    if isinstance(first, Source) and len(operators) > 1:
        raise InvalidTopologyError(
            f"source {first.uid!r} is chained with {operators[1].uid!r}; with checkpoints it is a chain of its own"
        )


def _inputs(first: object, edges: tuple[JobEdge, ...]) -> tuple[pa.Schema, ...]:
    return first.inputs if isinstance(first, CoProcess) else (edges[0].schema,)


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
