"""The coordinator's thread: everything that happens to a job comes in through one queue, and is carried out here."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from ftlayer.config import TopologyOptions
from ftlayer.errors import ConfigError, FTLayerError, JobError
from ftlayer.functions.pickling import missing_in
from ftlayer.restart import RestartStrategy
from ftlayer.runtime.acker_mode.driver.isolation import ReplayInput
from ftlayer.runtime.acker_mode.driver.job_mode import AckerJob
from ftlayer.runtime.acker_mode.driver.job_vertex import JobVertexCalls
from ftlayer.runtime.barrier_mode.driver.checkpointing import JobCheckpoints
from ftlayer.runtime.barrier_mode.driver.job_mode import BarrierJob
from ftlayer.runtime.barrier_mode.driver.publishing import CheckpointParts
from ftlayer.runtime.barrier_mode.driver.regions import regions_of
from ftlayer.runtime.driver.circuit_watch import CircuitWatch
from ftlayer.runtime.driver.control_server import ControlServer
from ftlayer.runtime.driver.crew import Crew
from ftlayer.runtime.driver.events import (
    AllRunning,
    AskSession,
    AskVertexStatus,
    Broke,
    Broken,
    CancelSlot,
    Condemn,
    Condemned,
    CountTasks,
    DrainRequested,
    Event,
    JobInstruction,
    JobState,
    Over,
    PrepareRestore,
    RecallDone,
    RecallStreams,
    RegionDeployed,
    Said,
    SendTo,
    SessionOver,
    SlotDown,
    SlotUp,
    SparkJobEnded,
    StatusKnown,
    SubmitSlot,
    TaskCounts,
    TasksCounted,
    Tick,
)
from ftlayer.runtime.driver.job_core import JobCore
from ftlayer.runtime.driver.meter import Meter
from ftlayer.runtime.driver.mode import JobMode
from ftlayer.runtime.driver.planners import Planners
from ftlayer.runtime.driver.submit import SlotSubmitter
from ftlayer.runtime.driver.untracked import UntrackedJob
from ftlayer.runtime.protocol.messages import (
    AssignSplits,
    FromSlot,
    Heartbeat,
    SlotEnded,
    SlotFailed,
    SourceFailed,
    SplitDone,
    ToSlot,
)
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.names import operators_needing
from ftlayer.vertex.calls import StreamStatus

# How long the coordinator waits for an event before it looks at the time.
TICK_S = 0.05

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Later:
    """Something to be done in the job's thread."""

    work: Callable[[], None]


@dataclass(frozen=True)
class JobParts:
    """What a job is made of. Server, submitter and planners report to the `JobThread` that they were made for.

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
    checkpoints: CheckpointParts | None = None


class JobThread:
    """A job as it runs. `ftlayer.runtime.driver.job.Job` is the part of it for users."""

    def __init__(self, job: str) -> None:
        self.job = job
        self._events: queue.SimpleQueue[Event | AssignSplits | Later] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards core and meter
        self._over = threading.Event()
        self._changed = threading.Condition()  # told whenever the job's state may be another one
        self._close_by_s: float | None = None
        self._interrupted = False
        self._verdict: Over | None = None
        self._meter = Meter()
        self._checkpoints: JobCheckpoints | None = None

    @property
    def name(self) -> str:
        """The topology's name."""
        return self._parts.graph.name

    # ------------------------------------------------------------ for its parts

    def slot_said(self, slot: int, instance: str, message: FromSlot) -> None:
        """Take a message of a slot."""
        self._events.put(Said(slot, instance, message))

    def slot_lost(self, slot: int, instance: str, reason: str) -> None:
        """Take the end of a slot's control stream."""
        self._events.put(Broke(slot, instance, reason))

    def spark_job_ended(self, slot: int, attempt: int, error: str | None) -> None:
        """Take the end of a slot's Spark job."""
        needed_by = "" if error is None else operators_needing(missing_in(error), self._parts.graph)
        self._events.put(SparkJobEnded(slot, attempt, error, needed_by))

    def session_over(self, error: FTLayerError) -> None:
        """Take that the Spark session has ended."""
        self._events.put(SessionOver(error))

    def tasks_counted(self, counts: TaskCounts | None) -> None:
        """Take what Spark says of task slots."""
        self._events.put(TasksCounted(counts))

    def send_splits(self, splits: AssignSplits) -> None:
        """Send splits to the slot of their subtask, if it runs; else its planner is told that it is up later."""
        self._events.put(splits)

    def source_backlog(self, source: str, working_off: bool) -> None:
        """Take from a source's planner whether it works off a backlog."""
        self._events.put(Later(lambda: self._with_checkpoints().backlog(source, working_off)))

    def broken(self, error: FTLayerError) -> None:
        """End the job by a failure on the driver's side."""
        self._events.put(Broken(error))

    def start(self, parts: JobParts) -> None:
        """Begin to run."""
        self._parts = parts
        crew = Crew(parts.graph.slots, parts.options.start_timeout_ms)
        self._core = JobCore(crew, parts.options, self._mode(parts, crew))
        if parts.checkpoints is not None:
            self._checkpoints = JobCheckpoints(
                parts.checkpoints,
                parts.planners,
                happened=self._events.put,
                later=lambda work: self._events.put(Later(work)),
                tell_all=self._tell_all,
                tell_slot=self._tell_slot,
                instances=lambda: frozenset(slot.hello.instance for slot in self._core.slots if slot.hello),
            )
        self._circuit_watch = CircuitWatch(
            parts.graph.name, has_any=any(options.circuits for _, options in parts.graph.options)
        )
        self._started_ms, self._ended_ms = now_ms(), 0
        threading.Thread(target=self._run, name=f"ftlayer-job-{self.name}", daemon=True).start()

    def _mode(self, parts: JobParts, crew: Crew) -> JobMode:
        graph = parts.graph
        if parts.checkpoints is not None:
            return BarrierJob(crew, regions=regions_of(graph), run=self.job, restart=parts.restart)
        if not graph.tracked:
            return UntrackedJob(crew, run=self.job, restart=parts.restart)
        return AckerJob(
            crew,
            run=self.job,
            restart=parts.restart,
            replays=[ReplayInput(uid, graph.slot_of(uid, 0)) for uid in graph.replays],
            timeout_ms=min((options.timeout_ms for _, options in graph.options), default=0),
        )

    # ------------------------------------------------------------ the coordinator's thread

    def _run(self) -> None:
        try:
            self._do_all(self._core.start(self._started_ms))
            self._parts.planners.start()
            while self._verdict is None:
                self._step()
        except Exception as error:
            # A fault of ours: without this the job would stand still unnoticed.
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
        if isinstance(event, Later):
            event.work()
            return
        moment_ms = now_ms()
        with self._lock:
            if isinstance(event, Said):
                self._note(event, moment_ms)
            before = self._core.state
            instructions = self._core.handle(event, moment_ms)
            is_other = self._core.state is not before
        if isinstance(event, StatusKnown):
            # A job that ends asks the vertex a last time: what it says of breakers is told too.
            self._log_circuits(event.status)
        self._watch_circuits(moment_ms)
        if isinstance(event, DrainRequested):
            self._parts.planners.drain()
        self._do_all(instructions)
        if self._checkpoints is not None:
            self._checkpoint(event, self._checkpoints)
        if is_other:
            # Behind all that the change brings about.
            self._tell_changed()

    def _watch_circuits(self, moment_ms: int) -> None:
        """Have the vertex asked; the answer is logged by this thread."""
        vertex = self._parts.vertex
        if vertex is not None and self._circuit_watch.is_due(moment_ms):
            vertex.status(
                lambda status: self._events.put(Later(lambda: self._log_circuits(status))), self.broken
            )

    def _log_circuits(self, status: StreamStatus) -> None:
        for line in self._circuit_watch.told(status.circuits):
            logger.warning("%s", line)

    def _tell_changed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _checkpoint(self, event: Event, checkpoints: JobCheckpoints) -> None:
        """Let an event have its effect on checkpoints, behind that on the job."""
        if self._end_is_near():
            checkpoints.cancel()
        elif isinstance(event, Said) and self._core.slots[event.slot].is_instance(event.instance):
            checkpoints.said(event.message)
        checkpoints.tick()

    def _end_is_near(self) -> bool:
        state = self._core.state
        return state.is_final or state is JobState.STOPPING

    def _note(self, said: Said, now_ms: int) -> None:
        match said.message:
            case Heartbeat(counters=counters) | SlotEnded(counters=counters) | SlotFailed(counters=counters):
                self._meter.update(said.instance, counters, now_ms)
        match said.message:
            case SlotFailed(reason=reason, damaged=damaged) if damaged and self._checkpoints is not None:
                self._checkpoints.damaged(damaged, reason)
            case SourceFailed(reason=reason, pause_ms=pause_ms):
                logger.warning("%s; it is started again in %d ms", reason, pause_ms)
            case SplitDone() as done if self._core.slots[said.slot].is_instance(said.instance):
                self._parts.planners.split_done(done)

    def _send_splits(self, splits: AssignSplits) -> None:
        slot = self._core.slots[self._parts.graph.slot_of(splits.source, splits.subtask)]
        if slot.running and slot.hello is not None:
            self._parts.server.send(slot.hello.instance, splits)

    def _do_all(self, instructions: list[JobInstruction]) -> None:
        for instruction in instructions:
            self._do(instruction)

    def _do(self, instruction: JobInstruction) -> None:
        parts = self._parts
        match instruction:
            case SendTo(_, instance, message):
                parts.server.send(instance, message)
            case SubmitSlot(slot, attempt):
                parts.submitter.submit(slot, attempt)
            case CancelSlot(slot, attempt):
                parts.submitter.cancel(slot, attempt)
            case AskSession():
                parts.submitter.ask_session()
            case CountTasks():
                parts.submitter.count_tasks(self.tasks_counted)
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
            case PrepareRestore() if self._checkpoints is not None:
                self._checkpoints.prepare(instruction)
            case RegionDeployed() if self._checkpoints is not None:
                self._checkpoints.deployed(instruction)
            case AllRunning() if self._checkpoints is not None:
                self._checkpoints.running()
            case Over():
                self._verdict = instruction

    def _tell_all(self, message: ToSlot) -> None:
        for slot in self._core.slots:
            self._tell_slot(slot.number, message)

    def _tell_slot(self, number: int, message: ToSlot) -> None:
        slot = self._core.slots[number]
        if slot.running and slot.hello is not None:
            self._parts.server.send(slot.hello.instance, message)

    def _take_later(self) -> None:
        """Do what was put off; other events come too late."""
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, Later):
                event.work()

    def _finish(self) -> None:
        self._ended_ms = now_ms()
        try:
            self._close()
        except Exception as error:
            # Callers that wait for the job have to hear of it.
            logger.exception("the end of job %r has failed", self.name)
            self._verdict = Over(
                JobState.FAILED, JobError(f"the coordinator has failed at the job's end: {error!r}")
            )
        finally:
            self._over.set()
            self._tell_changed()

    def _close(self) -> None:
        """Close all parts, whatever becomes of each."""
        parts = self._parts
        with ExitStack() as stack:
            stack.callback(self._hand_back)
            stack.callback(parts.submitter.close)
            if parts.vertex is not None:
                stack.callback(parts.vertex.close)
            stack.callback(parts.server.close)
            stack.callback(parts.planners.close)
            if self._checkpoints is not None and self._verdict is not None:
                self._checkpoints.close(
                    self._verdict.state, self._take_later, self._close_by_s, interrupted=self._interrupted
                )

    def _hand_back(self) -> None:
        """Say that the job's name and task slots are free, once nothing is done in its name any more."""
        if self._checkpoints is None:
            self._parts.on_over()
        else:
            self._checkpoints.when_done(self._parts.on_over)

    def _with_checkpoints(self) -> JobCheckpoints:
        if self._checkpoints is None:
            raise ConfigError(
                f"{self.name!r} runs without checkpoints; give StreamEnvironment checkpointing=CheckpointConfig(…)"
            )
        return self._checkpoints


def now_ms() -> int:
    """Return the monotone clock, in ms."""
    return time.monotonic_ns() // 1_000_000
