"""A running topology: the coordinator's thread, and the handle that a user holds."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from ftlayer.checkpoint.coordinator.coordinator import CheckpointCoordinator
from ftlayer.checkpoint.coordinator.decisions import Decision as CheckpointDecision
from ftlayer.checkpoint.coordinator.statistics import CheckpointStats
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.config import TopologyOptions
from ftlayer.errors import CheckpointError, ConfigError, FTLayerError, JobError, VertexError
from ftlayer.layer.calls import Now, StreamStatus, StreamStatusCall
from ftlayer.restart import RestartStrategy
from ftlayer.runtime.coordinator.barrier_core import BarrierJobCore
from ftlayer.runtime.coordinator.checkpointing import CheckpointParts, JobCheckpoints
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
    PrepareRestore,
    RecallDone,
    RecallStreams,
    RegionDeployed,
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
from ftlayer.runtime.coordinator.regions import regions_of
from ftlayer.runtime.coordinator.slot_record import SlotRecord
from ftlayer.runtime.coordinator.submit import SlotSubmitter
from ftlayer.runtime.messages import (
    AssignSplits,
    FromSlot,
    Heartbeat,
    SlotEnded,
    SlotFailed,
    SplitDone,
    ToSlot,
)
from ftlayer.stream.job_graph import JobGraph

# How long the coordinator waits for an event before it looks at the time.
TICK_S = 0.05
STATUS_DEADLINE_MS = 5_000

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Later:
    """Something to be done in the job's thread."""

    work: Callable[[], None]


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
    checkpoints: CheckpointParts | None = None


class Job:
    """The handle of a running topology. Any thread may use it. Made by `StreamEnvironment.execute_async`."""

    def __init__(self, job: str) -> None:
        self.job = job
        self._events: queue.SimpleQueue[Event | AssignSplits | _Later] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards core and meter
        self._over = threading.Event()
        self._verdict: Over | None = None
        self._meter = Meter()
        self._checkpoints: JobCheckpoints | None = None

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
                checkpoints=None if self._checkpoints is None else self._checkpoints.counts,
            )

    def checkpoints(self) -> tuple[CheckpointStats, ...]:
        """Return the checkpoints and savepoints under way, and the last 100 others, the latest first."""
        return self._in_thread(lambda checkpoints: checkpoints.history())

    def checkpoint(self, timeout: float | None = None) -> Checkpoint:
        """Take a checkpoint now, and wait for it; raises `CheckpointError` if it fails."""
        return self._requested(lambda rules, number, now: rules.checkpoint_now(number, now), timeout)

    def savepoint(self, directory: str = "", timeout: float | None = None) -> str:
        """Take a savepoint and wait for it; return where it lies.

        It is complete and self-contained, may be moved, and belongs to the caller: the job neither deletes it nor
        goes back to it. What sinks have written for it is committed with the next checkpoint, or by a job that is
        restored from it.

        Args:
            directory: what its own new directory is made in; by default ``savepoint_directory``.
            timeout: seconds, None for ever.

        Raises `CheckpointError` if it fails.
        """
        location = self._with_checkpoints().savepoint_location(directory)
        taken = self._requested(lambda rules, number, now: rules.savepoint(number, now, location), timeout)
        return taken.location

    def stop_with_savepoint(self, directory: str = "", timeout: float | None = None) -> str:
        """Take a savepoint, commit it, and end the job; return where it lies. See `savepoint`.

        Sources emit nothing behind the savepoint. If it fails the job goes on from its last checkpoint.
        """
        location = self._with_checkpoints().savepoint_location(directory)
        taken = self._requested(
            lambda rules, number, now: rules.stop_with_savepoint(number, now, location), timeout
        )
        self._over.wait()
        return taken.location

    def _requested(
        self,
        ask: Callable[[CheckpointCoordinator, int, Now], list[CheckpointDecision]],
        timeout: float | None,
    ) -> Checkpoint:
        answer: Future[Checkpoint] = Future()
        checkpoints = self._with_checkpoints()
        self._events.put(_Later(lambda: checkpoints.request(ask, answer)))
        if self._over.is_set() and not answer.done():
            raise CheckpointError(f"the job is {self.state}")
        return answer.result(timeout)

    def _in_thread(self, work: Callable[[JobCheckpoints], _T]) -> _T:
        """Have something done in the job's thread (in this one if the job is over), and return what it returned."""
        checkpoints = self._with_checkpoints()
        answer: Future[_T] = Future()
        self._events.put(_Later(lambda: answer.set_result(work(checkpoints))))
        while not self._over.is_set():
            try:
                return answer.result(TICK_S)
            except TimeoutError:
                continue
        return work(checkpoints)

    def _with_checkpoints(self) -> JobCheckpoints:
        if self._checkpoints is None:
            raise ConfigError(
                f"{self.name!r} runs without checkpoints; give StreamEnvironment checkpointing=CheckpointConfig(…)"
            )
        return self._checkpoints

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

    def source_backlog(self, source: str, working_off: bool) -> None:
        """Take from a source's planner whether it works off a backlog."""
        self._events.put(_Later(lambda: self._with_checkpoints().backlog(source, working_off)))

    def broken(self, error: FTLayerError) -> None:
        """End the job by a failure on the driver's side."""
        self._events.put(Broken(error))

    def start(self, parts: JobParts) -> None:
        """Begin to run."""
        self._parts = parts
        self._core: CoordinatorCore | BarrierJobCore
        if parts.checkpoints is None:
            self._core = self._acker_core(parts)
        else:
            self._core = BarrierJobCore(
                regions=regions_of(parts.graph), run=self.job, options=parts.options, restart=parts.restart
            )
            self._checkpoints = JobCheckpoints(
                parts.checkpoints,
                parts.planners,
                happened=self._events.put,
                later=lambda work: self._events.put(_Later(work)),
                tell_all=self._tell_all,
                tell_slot=self._tell_slot,
                instances=lambda: frozenset(slot.hello.instance for slot in self._core.slots if slot.hello),
            )
        self._started_ms, self._ended_ms = _now_ms(), 0
        threading.Thread(target=self._run, name=f"ftlayer-job-{self.name}", daemon=True).start()

    def _acker_core(self, parts: JobParts) -> CoordinatorCore:
        return CoordinatorCore(
            slots=parts.graph.slots,
            tracked=parts.graph.tracked,
            run=self.job,
            options=parts.options,
            restart=parts.restart,
            replays=[ReplayInput(uid, parts.graph.slot_of(uid, 0)) for uid in parts.graph.replays],
            timeout_ms=min((options.timeout_ms for _, options in parts.graph.options), default=0),
        )

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
        if isinstance(event, _Later):
            event.work()
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
        if self._checkpoints is not None:
            self._checkpoint(event, self._checkpoints)

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
            case Heartbeat(counters=counters) | SlotEnded(counters=counters):
                self._meter.update(said.instance, counters, now_ms)
            case SlotFailed(damaged=damaged) if damaged and self._checkpoints is not None:
                self._checkpoints.damaged(damaged)
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
            case PrepareRestore() if self._checkpoints is not None:
                self._checkpoints.prepare(decision)
            case RegionDeployed() if self._checkpoints is not None:
                self._checkpoints.deployed(decision)
            case Over():
                self._verdict = decision

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
            if isinstance(event, _Later):
                event.work()

    def _finish(self) -> None:
        self._ended_ms = _now_ms()
        try:
            self._close()
        except Exception as error:
            # Whoever waits for the job has to hear of it, and not to wait for ever.
            logger.exception("the end of job %r has failed", self.name)
            self._verdict = Over(
                JobState.FAILED, JobError(f"the coordinator has failed at the job's end: {error!r}")
            )
        finally:
            self._over.set()

    def _close(self) -> None:
        """Close all parts, whatever becomes of each."""
        parts = self._parts
        with ExitStack() as stack:
            stack.callback(parts.on_over)
            if parts.vertex is not None:
                stack.callback(parts.vertex.close)
            stack.callback(parts.server.close)
            stack.callback(parts.planners.close)
            if self._checkpoints is not None and self._verdict is not None:
                self._checkpoints.close(self._verdict.state, self._take_later)

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
        uid,
        totals.get(taken, 0),
        totals.get(sent, 0),
        rates.get(taken, 0.0),
        rates.get(sent, 0.0),
        totals.get(f"late/{uid}", 0),
    )


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
