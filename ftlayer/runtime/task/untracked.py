"""Tasks with fault tolerance off: rows are sent as they are read, and a failure fails the slot."""

from __future__ import annotations

from ftlayer.common.clock import Now
from ftlayer.errors import InvalidTopologyError
from ftlayer.records.ids import NO_ROOTS, U64Array
from ftlayer.runtime.handler import Handler, NonFTHandler
from ftlayer.runtime.protocol.messages import EndOfStream
from ftlayer.runtime.task import actions
from ftlayer.runtime.task.chain_plan import ChainPlan, OpenSink
from ftlayer.runtime.task.contract import NoCompanion, ReplayTask, Task
from ftlayer.runtime.task.emitter import Emitter, SourceMarkers
from ftlayer.runtime.task.event_time import SplitMarks
from ftlayer.runtime.task.pipeline import ChannelOutlet, Outlet, SinkOutlet
from ftlayer.state.heap import HeapBackend
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.operators import Operator


class UntrackedTaskMode:
    def __init__(self, open_sink: OpenSink) -> None:
        self._open_sink = open_sink

    def check(self, operators: tuple[Operator, ...]) -> None:
        """Every chain can be run."""

    def handler(self, uid: str) -> Handler:
        return NonFTHandler()

    def source(self, graph: JobGraph, uid: str, subtask: int, handler: Handler) -> Task:
        return UntrackedSourceTask(graph, uid, subtask, handler)

    def replay(self, graph: JobGraph, uid: str, subtask: int, handler: Handler) -> ReplayTask:
        raise InvalidTopologyError(
            f"{uid!r} lets records in again that were not acknowledged, and with fault tolerance off none is: "
            "leave it out, or turn fault tolerance on"
        )

    def chain(self, plan: ChainPlan) -> Task:
        outlet: Outlet
        if plan.sink is None:
            outlet = ChannelOutlet(plan.handler, plan.emitter())
        else:
            outlet = SinkOutlet(
                plan.handler, self._open_sink(plan.sink, plan.subtask, plan.vertex.parallelism)
            )
        return plan.task(HeapBackend(), outlet, NoCompanion())


class UntrackedSourceTask:
    """A source as a task with fault tolerance off: it sends rows at once, and no watermarks."""

    def __init__(self, graph: JobGraph, uid: str, subtask: int, handler: Handler) -> None:
        self.uid = uid
        self.subtask = subtask
        self._emitter = Emitter(graph, uid, subtask, handler)
        self._markers = SourceMarkers(self._emitter, uid)
        self._splits = SplitMarks(self._emitter)

    def handle(self, event: actions.TaskEvent, now: Now) -> list[actions.Action]:
        match event:
            case actions.SourceRows():
                sends = self._emitter.roots(event.payload, None, split=event.in_time).sends
                return [
                    *self._splits.around(event, sends),
                    *self._markers.behind(event.payload.num_rows, now),
                ]
            case actions.SourceOver():
                return [*self._emitter.mark(EndOfStream()), actions.TaskEnded()]
            case actions.TaskStart() | actions.TimeCame():
                return []
            case _:
                raise actions.refused(self.uid, event)

    def held_roots(self) -> U64Array:
        return NO_ROOTS
