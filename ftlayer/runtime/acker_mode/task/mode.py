"""Acker mode's tasks: sources that persist, replays, and chains that acknowledge records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ftlayer.config import TopologyOptions
from ftlayer.handler.handler import Handler
from ftlayer.runtime.acker_mode.task.companion import AckerCompanion
from ftlayer.runtime.acker_mode.task.range_source import RangeSourceTask
from ftlayer.runtime.acker_mode.task.replay_task import StreamReplayTask
from ftlayer.runtime.acker_mode.task.sink_outlet import AckingSinkOutlet
from ftlayer.runtime.acker_mode.task.source_task import PersistingSourceTask
from ftlayer.runtime.acker_mode.task.timer_roots import TimerRoots, TimerRootsOutlet
from ftlayer.runtime.task.chain_plan import ChainPlan
from ftlayer.runtime.task.contract import ReplayTask, Task
from ftlayer.runtime.task.mode import OpenSink
from ftlayer.runtime.task.outlet import ChannelOutlet, Outlet
from ftlayer.state.heap import HeapBackend
from ftlayer.topology.facts import has_timers, reads_again
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.operators import Operator


@dataclass(frozen=True)
class Holding:
    """How sources hold partitions whose rows the vertex does not store.

    ``holder`` is a name that no earlier instance of the slot has had; ``known(uid, subtask)`` are the partitions of a
    subtask that were read before.
    """

    holder: str
    known: Callable[[str, int], Sequence[str]]


class AckerTaskMode:
    def __init__(
        self,
        make_handler: Callable[[str], Handler],
        options: TopologyOptions,
        open_sink: OpenSink,
        holding: Holding | None = None,
    ) -> None:
        """``make_handler(uid)`` makes one that tracks records, as `TaskMode.handler` does.

        ``holding`` may be left out where no source has ``replay="source"``.
        """
        self._holding = holding
        self._make_handler = make_handler
        self._options = options
        self._open_sink = open_sink

    def check(self, operators: tuple[Operator, ...]) -> None:
        """Every chain can be run."""

    def handler(self, uid: str) -> Handler:
        return self._make_handler(uid)

    def source(self, graph: JobGraph, uid: str, subtask: int, handler: Handler) -> Task:
        if not reads_again(graph.vertex(uid).operators[0]):
            return PersistingSourceTask(graph, uid, subtask, handler)
        assert self._holding is not None, "who holds its rows has no name"
        known = self._holding.known(uid, subtask)
        return RangeSourceTask(graph, uid, subtask, handler, self._holding.holder, known)

    def replay(self, graph: JobGraph, uid: str, subtask: int, handler: Handler) -> ReplayTask:
        return StreamReplayTask(graph, uid, subtask, handler, self._options)

    def chain(self, plan: ChainPlan) -> Task:
        """See `TaskMode.chain`. State is in memory, and gone with the slot."""
        return plan.task(HeapBackend(), self._outlet(plan), AckerCompanion(plan.handler.xor))

    def _outlet(self, plan: ChainPlan) -> Outlet:
        sink, handler, last = plan.sink, plan.handler, plan.vertex.operators[-1]
        if sink is not None:
            return AckingSinkOutlet(handler, self._open_sink(sink, plan.subtask, plan.vertex.parallelism))
        emitter = plan.emitter()
        channels = ChannelOutlet(handler, emitter)
        if not has_timers(last):
            return channels
        return TimerRootsOutlet(
            channels, TimerRoots(plan.graph, plan.uid, last.uid, plan.subtask, handler, emitter)
        )
