"""A running topology: the coordinator's thread, and the handle that a user holds."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ftlayer.config import TopologyOptions
from ftlayer.errors import FTLayerError, JobError, VertexError
from ftlayer.layer.calls import StreamStatus, StreamStatusCall
from ftlayer.restart import RestartStrategy
from ftlayer.runtime.coordinator.control_server import ControlServer
from ftlayer.runtime.coordinator.core import CoordinatorCore
from ftlayer.runtime.coordinator.events import (
    AskVertexStatus,
    Broke,
    Broken,
    CancelRequested,
    CancelSlot,
    Condemn,
    Condemned,
    Decision,
    DrainRequested,
    Event,
    JobState,
    Over,
    RecallDone,
    RecallStreams,
    Said,
    SendTo,
    SlotDown,
    SlotUp,
    SparkJobEnded,
    StatusKnown,
    SubmitSlot,
    Tick,
)
from ftlayer.runtime.coordinator.isolation import ReplayInput
from ftlayer.runtime.coordinator.job_status import ChainStatus, JobStatus, SlotStatus
from ftlayer.runtime.coordinator.job_vertex import JobVertexCalls
from ftlayer.runtime.coordinator.meter import Meter
from ftlayer.runtime.coordinator.planners import Planners
from ftlayer.runtime.coordinator.slot_record import SlotRecord
from ftlayer.runtime.coordinator.submit import SlotSubmitter
from ftlayer.runtime.messages import AssignSplits, FromSlot, Heartbeat, SlotEnded, SplitDone
from ftlayer.stream.job_graph import JobGraph

# How long the coordinator waits for an event before it looks at the time.
TICK_S = 0.05
STATUS_DEADLINE_MS = 5_000

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobParts:
    """What a job is made of. Server, submitter and planners report to the `Job` that they were made for.

    ``restart`` is of this job alone. ``on_over`` is called once, by the coordinator's thread, when the job has come
    to its final state.
    """

    graph: JobGraph
    options: TopologyOptions
    restart: RestartStrategy
    server: ControlServer
    submitter: SlotSubmitter
    vertex: JobVertexCalls | None
    planners: Planners
    on_over: Callable[[], None]


class Job:
    """The handle of a running topology. Any thread may use it. Made by `StreamEnvironment.execute_async`."""

    def __init__(self, job: str) -> None:
        self.job = job
        self._events: queue.SimpleQueue[Event | AssignSplits] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards core and meter
        self._over = threading.Event()
        self._verdict: Over | None = None
        self._meter = Meter()

    # ------------------------------------------------------------ for the user

    @property
    def name(self) -> str:
        """The topology's name."""
        return self._parts.graph.name

    @property
    def state(self) -> JobState:
        """Where the job is."""
        return self._core.state

    def status(self) -> JobStatus:
        """Return what is known of the job now; asks the vertex, and does without its answer if there is none."""
        vertex = None if self._over.is_set() else self._vertex_status()
        now_ms = _now_ms()
        with self._lock:
            core = self._core
            rates = {} if self._over.is_set() else self._meter.rates(now_ms)
            totals = self._meter.totals
            return JobStatus(
                name=self.name,
                job=self.job,
                state=core.state,
                epoch=core.epoch,
                uptime_s=(self._ended_ms or now_ms) / 1_000 - self._started_ms / 1_000,
                slots=tuple(_slot_status(slot, now_ms) for slot in core.slots),
                chains=tuple(_chain_status(v.uid, totals, rates) for v in self._parts.graph.vertices),
                counters={name: value for name, value in totals.items() if "/" not in name},
                rates={name: rate for name, rate in rates.items() if "/" not in name},
                vertex=vertex,
                restarts=core.restarts,
                isolation=core.isolation,
                last_failure=core.last_failure,
            )

    def cancel(self, timeout: float | None = 30.0) -> bool:
        """End the job now; what is pending stays in the vertex for the next start of the same topology.

        Waits up to ``timeout`` seconds (None: for ever) and returns whether it is over.
        """
        self._events.put(CancelRequested("the job was cancelled"))
        return self._over.wait(timeout)

    def drain(self, timeout: float | None = None) -> bool:
        """End the sources, let everything that is pending come to its end, and end the job.

        Waits for that; returns whether everything was done. After ``timeout`` seconds (None: for ever) the job is
        cancelled instead, and what is pending stays in the vertex for its next start. Raises what the job failed
        with.
        """
        self._events.put(DrainRequested())
        if not self._over.wait(timeout):
            self.cancel(None)
        self._raise()
        return self.state is JobState.ENDED

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the job is over, up to ``timeout`` seconds; return whether it is. Raises what it failed with."""
        over = self._over.wait(timeout)
        self._raise()
        return over

    def over(self, timeout: float | None = None) -> bool:
        """Wait until the job is over, up to ``timeout`` seconds; return whether it is. Raises nothing."""
        return self._over.wait(timeout)

    def exception(self) -> FTLayerError | None:
        """Return what the job failed with; None while it runs, and if it ended or was cancelled."""
        return None if self._verdict is None else self._verdict.error

    def _raise(self) -> None:
        error = self.exception()
        if error is not None:
            raise error

    # ------------------------------------------------------------ for its parts

    def slot_said(self, slot: int, instance: str, message: FromSlot) -> None:
        """Take a message of a slot."""
        self._events.put(Said(slot, instance, message))

    def slot_lost(self, slot: int, instance: str, reason: str) -> None:
        """Take the end of a slot's control stream."""
        self._events.put(Broke(slot, instance, reason))

    def spark_job_ended(self, slot: int, attempt: int, error: str | None) -> None:
        """Take the end of a slot's Spark job."""
        self._events.put(SparkJobEnded(slot, attempt, error))

    def send_splits(self, splits: AssignSplits) -> None:
        """Send splits to the slot of their subtask, if it runs; else its planner is told that it is up later."""
        self._events.put(splits)

    def broken(self, error: FTLayerError) -> None:
        """End the job by a failure on the driver's side."""
        self._events.put(Broken(error))

    def start(self, parts: JobParts) -> None:
        """Begin to run."""
        self._parts = parts
        self._core = CoordinatorCore(
            slots=parts.graph.slots,
            tracked=parts.graph.tracked,
            run=self.job,
            options=parts.options,
            restart=parts.restart,
            replays=[ReplayInput(uid, parts.graph.slot_of(uid, 0)) for uid in parts.graph.replays],
            timeout_ms=min((options.timeout_ms for _, options in parts.graph.options), default=0),
        )
        self._started_ms, self._ended_ms = _now_ms(), 0
        threading.Thread(target=self._run, name=f"ftlayer-job-{self.name}", daemon=True).start()

    # ------------------------------------------------------------ the coordinator's thread

    def _run(self) -> None:
        try:
            self._do_all(self._core.start(self._started_ms))
            self._parts.planners.start()
            while self._verdict is None:
                self._step()
        except Exception as error:
            # A fault of ours: without this the job would stand still, and nobody would know.
            logger.exception("the coordinator of job %r has failed", self.name)
            self._verdict = Over(JobState.FAILED, JobError(f"the coordinator has failed: {error!r}"))
        finally:
            self._finish()

    def _step(self) -> None:
        try:
            event = self._events.get(timeout=TICK_S)
        except queue.Empty:
            event = Tick()
        if isinstance(event, AssignSplits):
            self._send_splits(event)
            return
        now_ms = _now_ms()
        if isinstance(event, SparkJobEnded) and event.error and self._parts.submitter.session_stopped():
            event = Broken(JobError("the Spark session was stopped while the job ran"))
        with self._lock:
            if isinstance(event, Said):
                self._note(event, now_ms)
            decisions = self._core.handle(event, now_ms)
        if isinstance(event, DrainRequested):
            self._parts.planners.drain()
        self._do_all(decisions)

    def _note(self, said: Said, now_ms: int) -> None:
        match said.message:
            case Heartbeat(counters=counters) | SlotEnded(counters=counters):
                self._meter.update(said.instance, counters, now_ms)
            case SplitDone() as done if self._core.slots[said.slot].is_instance(said.instance):
                self._parts.planners.split_done(done)

    def _send_splits(self, splits: AssignSplits) -> None:
        slot = self._core.slots[self._parts.graph.slot_of(splits.source, splits.subtask)]
        if slot.running and slot.hello is not None:
            self._parts.server.send(slot.hello.instance, splits)

    def _do_all(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            self._do(decision)

    def _do(self, decision: Decision) -> None:
        parts = self._parts
        match decision:
            case SendTo(_, instance, message):
                parts.server.send(instance, message)
            case SubmitSlot(slot, attempt):
                parts.submitter.submit(slot, attempt)
            case CancelSlot(slot, attempt):
                parts.submitter.cancel(slot, attempt)
            case RecallStreams(number):
                assert parts.vertex is not None
                parts.vertex.recall(lambda rows: self._events.put(RecallDone(number, rows)), self.broken)
            case Condemn(failure):
                assert parts.vertex is not None
                logger.warning("root %016x ends processes: %s", failure.root, failure.reason)
                parts.vertex.condemn(failure, lambda: self._events.put(Condemned(failure.root)), self.broken)
            case AskVertexStatus(number):
                assert parts.vertex is not None
                parts.vertex.status(lambda status: self._events.put(StatusKnown(number, status)), self.broken)
            case SlotUp(slot):
                parts.planners.slot_up(slot)
            case SlotDown(slot):
                parts.planners.slot_down(slot)
            case Over():
                self._verdict = decision

    def _finish(self) -> None:
        self._ended_ms = _now_ms()
        self._parts.planners.close()
        self._parts.server.close()
        if self._parts.vertex is not None:
            self._parts.vertex.close()
        self._parts.on_over()
        self._over.set()

    def _vertex_status(self) -> StreamStatus | None:
        vertex = self._parts.vertex
        if vertex is None:
            return None
        try:
            reply = vertex.client.call(StreamStatusCall(vertex.streams), deadline_ms=STATUS_DEADLINE_MS)
        except VertexError as error:
            logger.info("no status of the vertex: %s", error)
            return None
        assert isinstance(reply, StreamStatus)
        return reply


def _slot_status(slot: SlotRecord, now_ms: int) -> SlotStatus:
    hello, beat = slot.hello, slot.heartbeat
    state = (
        "ended"
        if slot.ended
        else "running"
        if slot.deployed
        else "ready"
        if hello is not None
        else "starting"
        if slot.submitted
        else "waiting"
    )
    return SlotStatus(
        slot.number,
        state,
        "" if hello is None else hello.host,
        0 if hello is None else hello.pid,
        "" if hello is None else hello.instance,
        None if beat is None else max(0, now_ms - slot.heard_ms),
        "" if beat is None else beat.busy,
        0 if beat is None else beat.busy_ms,
        slot.restarts,
        slot.failure,
    )


def _chain_status(uid: str, totals: dict[str, int], rates: dict[str, float]) -> ChainStatus:
    taken, sent = f"records_in/{uid}", f"records_out/{uid}"
    return ChainStatus(
        uid, totals.get(taken, 0), totals.get(sent, 0), rates.get(taken, 0.0), rates.get(sent, 0.0)
    )


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
