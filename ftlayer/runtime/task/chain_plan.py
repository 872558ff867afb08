"""A chain of functions that one subtask is to run, before there is a task for it, and what a mode makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from ftlayer.functions.chains.firing import ChainOperator, Interrupted, never
from ftlayer.functions.keyed import Backend
from ftlayer.functions.undo import UndoLog
from ftlayer.runtime.handler import Handler
from ftlayer.runtime.task.chain_task import ChainRows, ChainTask, WholeBatches
from ftlayer.runtime.task.contract import ChainCompanion, ReplayTask, SinkBody, Task
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.runtime.task.event_time import StatusWatermarkValve, TimedInputs
from ftlayer.runtime.task.iteration import HeadTask, LoopGate
from ftlayer.runtime.task.pipeline import OperatorChain, Outlet
from ftlayer.topology.job_graph import JobGraph, JobVertex
from ftlayer.topology.operators import (
    AssignWatermarks,
    CoProcess,
    IterationHead,
    IterationTail,
    Join,
    Operator,
    Replay,
    Sink,
    Source,
)

NoFunction = Source | Replay | Join | IterationHead | IterationTail | Sink
"""Operators that are no part of a chain's pipeline: they are what the task itself does, or nothing at all."""


@dataclass(frozen=True)
class RowsAlone:
    """What a chain needs whose records fail alone.

    Attributes:
        log: takes back what they change.
        make: makes what runs them.
    """

    log: UndoLog
    make: Callable[[OperatorChain], ChainRows]


@dataclass(frozen=True)
class ChainPlan:
    """A chain, and which of its subtasks. ``handler`` is that subtask's own."""

    graph: JobGraph
    uid: str
    subtask: int
    handler: Handler

    @property
    def vertex(self) -> JobVertex:
        return self.graph.vertex(self.uid)

    @property
    def functions(self) -> list[ChainOperator | AssignWatermarks]:
        return [op for op in self.vertex.operators if not isinstance(op, NoFunction)]

    @property
    def inputs(self) -> tuple[pa.Schema, ...]:
        first: Operator = self.vertex.operators[0]
        return first.inputs if isinstance(first, CoProcess) else (self.graph.edges_into(self.uid)[0].schema,)

    @property
    def timed(self) -> TimedInputs:
        heads = {edge.number: self.graph.vertex(edge.source).operators[0] for edge in self.graph.edges}
        edges = [
            edge
            for edge in self.graph.edges_into(self.uid)
            if not edge.feedback and not isinstance(heads[edge.number], Replay)
        ]
        mine = [each for edge in edges for each in self.graph.channels(edge) if each.receiver == self.subtask]
        sources = {edge.number: edge.source for edge in edges if isinstance(heads[edge.number], Source)}
        return TimedInputs(
            {channel: sources[channel.edge] for channel in mine if channel.edge in sources},
            frozenset(channel for channel in mine if channel.edge not in sources),
        )

    @property
    def sink(self) -> Sink | None:
        last = self.vertex.operators[-1]
        return last if isinstance(last, Sink) else None

    def emitter(self) -> Emitter:
        """Make what sends on its channels; one is enough for a task."""
        return Emitter(self.graph, self.uid, self.subtask, self.handler)

    def task(
        self,
        backend: Backend,
        outlet: Outlet,
        companion: ChainCompanion,
        *,
        alone: RowsAlone | None = None,
        interrupted: Interrupted = never,
    ) -> ChainTask:
        """Make the task. ``backend`` keeps the state of its functions; all of the arguments are its own.

        ``alone``: its records fail alone; None: a record that fails is settled by the chain's handler.
        ``interrupted``: a watermark is to wait, and the timers that it makes due.
        """
        log = None if alone is None else alone.log
        pipeline = OperatorChain(self.functions, self.inputs, backend, log, self.timed, interrupted)
        rows: ChainRows = (
            WholeBatches(pipeline, self.handler, outlet) if alone is None else alone.make(pipeline)
        )
        edges = self.graph.edges_into(self.uid)
        head = self.vertex.operators[0]
        if not isinstance(head, IterationHead):
            gate = StatusWatermarkValve.of(self.graph, self.uid, self.subtask)
            return ChainTask(self.uid, self.subtask, edges, gate, pipeline, rows, outlet, companion)
        loop, wait_ms = LoopGate.of(self.graph, self.uid, self.subtask), head.max_wait_ms
        return HeadTask(self.uid, self.subtask, edges, loop, pipeline, rows, outlet, companion, wait_ms)


OpenSink = Callable[[Sink, int, int], SinkBody]
"""``open_sink(sink, subtask, parallelism)`` makes the sink of one subtask ready; `ConfigError` if it cannot."""


class TaskMode(Protocol):
    """The tasks of a mode: `ftlayer.runtime.task.build` says which there are, and a mode what they are like."""

    def check(self, operators: tuple[Operator, ...]) -> None:
        """Raise `InvalidTopologyError` for a chain that cannot be run in this mode."""

    def handler(self, uid: str) -> Handler:
        """Make the handler of one subtask of a chain."""

    def source(self, graph: JobGraph, uid: str, subtask: int, handler: Handler) -> Task:
        """Make a subtask of the chain of a `Source`, which has no other operator."""

    def replay(self, graph: JobGraph, uid: str, subtask: int, handler: Handler) -> ReplayTask:
        """Make a subtask of the chain of a `Replay`; `InvalidTopologyError` where nothing is replayed."""

    def chain(self, plan: ChainPlan) -> Task:
        """Make a subtask of a chain of functions, and open its sink and its state."""
