"""Barrier mode's tasks: sources that give their positions, and chains whose state and sink are in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import pyarrow as pa

from ftlayer.checkpoint.snapshots import SubtaskRestore
from ftlayer.errors import InvalidTopologyError
from ftlayer.functions.aggregates.keyed import KeyedAggregate
from ftlayer.functions.steps import Process, Reduce
from ftlayer.handler.handler import Handler, NonFTHandler
from ftlayer.partitioning.partitioners import Broadcast
from ftlayer.runtime.barrier_mode.task.chain_checkpoints import ChainCheckpoints
from ftlayer.runtime.barrier_mode.task.companion import BarrierCompanion
from ftlayer.runtime.barrier_mode.task.contract import Checkpointed, CommittingSinkBody
from ftlayer.runtime.barrier_mode.task.failing.making import entered_inside, failing_alone, keys_with_waiting
from ftlayer.runtime.barrier_mode.task.shared_backend import SharedBackend
from ftlayer.runtime.barrier_mode.task.source_task import CheckpointedSourceTask
from ftlayer.runtime.task.chain_plan import ChainPlan
from ftlayer.runtime.task.contract import ReplayTask, SinkBody, Task, TaskKey
from ftlayer.runtime.task.key_schemas import key_schemas
from ftlayer.runtime.task.outlet import ChannelOutlet, Outlet, SinkOutlet
from ftlayer.runtime.task.suspects import Suspects
from ftlayer.state.contract import CheckpointedBackend
from ftlayer.state.heap import HeapBackend
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.operators import CoProcess, Join, Operator, Sink, Source, WriterSink

OpenBackend = Callable[[str, int, Mapping[str, pa.Schema]], CheckpointedBackend]
"""``open_backend(chain, subtask, keys)`` opens, and restores, the state of one subtask of a chain.

``keys`` are the types of the key columns of each operator that has a key, by uid.
"""

OpenSink = Callable[[Sink, int, int, bool], SinkBody]
"""``open_sink(sink, subtask, parallelism, may_refuse)`` makes the sink of one subtask ready.

``may_refuse``: a writer's rows may become dead letters. It raises `ConfigError` if it cannot.
"""

STATEFUL = Reduce | KeyedAggregate | Process | CoProcess
"""Functions that may keep state."""

REMEDY = (
    " (with CheckpointConfig(failures=FailurePolicy(…)), or on_failure(FailurePolicy(…)) of this operator, a record "
    "that fails is tried again, and then a dead letter; all others go on)"
)
"""Behind the reason for which a record fails the job."""

NO_REMEDY = (
    " (its input is broadcast, so that no FailurePolicy holds for it: catch the error in the function)"
)
"""The same of an operator that has no policy whatever is said."""


class BarrierTaskMode:
    """`ftlayer.runtime.task.mode.TaskMode` of barrier mode.

    Attributes:
        checkpointed: what takes part in checkpoints of each task that was made.
    """

    def __init__(
        self,
        restored: Mapping[TaskKey, SubtaskRestore],
        open_backend: OpenBackend,
        open_sink: OpenSink,
        suspects: Callable[[str], Suspects],
        place: str = "",
    ) -> None:
        """Begin without tasks.

        Args:
            restored: what subtasks begin with. A source takes its positions from it; state is restored by
                ``open_backend``.
            open_backend: called for each chain with an operator that can keep state; raises `CheckpointError`.
            open_sink: makes a `CommittingSinkBody` for a `WriterSink`.
            suspects: makes those of a chain with this uid, for one subtask.
            place: which process this is, in words.
        """
        self._restored = restored
        self._open_backend = open_backend
        self._open_sink = open_sink
        self._suspects = suspects
        self._place = place
        self.checkpointed: dict[TaskKey, Checkpointed] = {}

    def check(self, operators: tuple[Operator, ...]) -> None:
        """Refuse a chain that barriers cannot go through."""
        first = operators[0]
        if isinstance(first, Join):
            raise InvalidTopologyError(
                f"join {first.uid!r}: its buffers are in no checkpoint; with checkpoints a join is a CoProcess with "
                "keyed state"
            )
        if isinstance(first, Source) and len(operators) > 1:
            raise InvalidTopologyError(
                f"source {first.uid!r} is chained with {operators[1].uid!r}; with checkpoints it is a chain of its own"
            )

    def handler(self, uid: str) -> Handler:
        return NonFTHandler()

    def source(self, graph: JobGraph, uid: str, subtask: int, handler: Handler) -> Task:
        restore = self._restored.get((uid, subtask))
        task = CheckpointedSourceTask(
            graph, uid, subtask, handler, {} if restore is None else restore.positions
        )
        self.checkpointed[uid, subtask] = task
        return task

    def replay(self, graph: JobGraph, uid: str, subtask: int, handler: Handler) -> ReplayTask:
        """Nothing is stored, so that nothing can be replayed."""
        raise InvalidTopologyError(
            f"{uid!r} lets records in again that were not acknowledged, and with checkpoints none is: "
            "leave fault tolerance by records or checkpointing out"
        )

    def chain(self, plan: ChainPlan) -> Task:
        broadcast = any(isinstance(edge.partitioner, Broadcast) for edge in plan.graph.edges_into(plan.uid))
        plan = replace(plan, handler=NonFTHandler(NO_REMEDY if broadcast else REMEDY))
        policy = plan.vertex.failures
        restored = self._restored.get((plan.uid, plan.subtask))
        backend = self._backend(plan)
        companion = BarrierCompanion(plan.uid, plan.subtask, backend, keeps_failed=policy is not None)
        body = None
        if plan.sink is not None:
            body = self._open_sink(plan.sink, plan.subtask, plan.vertex.parallelism, policy is not None)
        suspects = self._suspects(plan.uid)
        failing = None
        if policy is not None:
            assert backend is not None
            inside = entered_inside(plan, restored)
            failing = failing_alone(plan, policy, backend.backend, body, suspects, self._place, inside)
            outlet: Outlet = failing.outlet
        elif body is None:
            outlet = ChannelOutlet(plan.handler, plan.emitter())
        else:
            outlet = SinkOutlet(plan.handler, body)
        state = HeapBackend() if backend is None else backend.backend
        task = plan.task(state, outlet, companion, alone=None if failing is None else failing.alone)
        if restored is not None:
            task.restore_event_time(restored.event_times, restored.split_times)
        commits = plan.sink is not None and isinstance(plan.sink.connector, WriterSink)
        sink = cast(CommittingSinkBody, body) if commits else None
        letters = None if failing is None else failing.attempts.letters
        self.checkpointed[plan.uid, plan.subtask] = ChainCheckpoints(task, companion, sink, suspects, letters)
        return task

    def _backend(self, plan: ChainPlan) -> SharedBackend | None:
        """Open the state of a chain that can keep some: of its functions, or records that wait."""
        keys = key_schemas(plan.functions, plan.inputs)
        if plan.vertex.failures is not None:
            keys = keys_with_waiting(plan, keys)
        elif not any(isinstance(operator, STATEFUL) for operator in plan.functions):
            return None
        return SharedBackend(self._open_backend(plan.uid, plan.subtask, keys))
