"""What a mode decides of the tasks of one instance of a slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ftlayer.runtime.handler import Handler
from ftlayer.runtime.task.chain_plan import ChainPlan
from ftlayer.runtime.task.contract import ReplayTask, SinkBody, Task
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.operators import Operator, Sink

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
