"""The coordinator's thread: everything that happens to a job comes in through one queue, and is carried out here."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

from ftlayer.checkpoint.storage.loading import JobResult
from ftlayer.common.clock import mono_ms
from ftlayer.common.printable import LetterWarnings, letters_text
from ftlayer.common.rules.histogram import LATENCY_BOUNDS, Exemplar
from ftlayer.common.rules.restart import RestartStrategy
from ftlayer.config import TopologyOptions
from ftlayer.errors import ConfigError, FTLayerError, JobError
from ftlayer.functions.failures import raise_signalled
from ftlayer.functions.pickling import missing_in
from ftlayer.runtime.driver.control_server import ControlServer
from ftlayer.runtime.driver.planners import Planners
from ftlayer.runtime.driver.rules import events as job_events
from ftlayer.runtime.driver.rules.events import Crew
from ftlayer.runtime.driver.rules.job_core import JobCore
from ftlayer.runtime.driver.rules.job_rules import CheckpointCalls, DriverMode, JobContext, OpenMode
from ftlayer.runtime.driver.rules.job_status import (
    JobStatus,
    Meter,
    away_of,
    chain_status,
    circuits_of,
    lags_of,
    slot_status,
    transports_of,
)
from ftlayer.runtime.driver.session import SlotSubmitter
from ftlayer.runtime.protocol import messages
from ftlayer.topology.job_graph import JobGraph, operators_needing
from ftlayer.vertex.calls import CheckpointDetails, HistogramDetails, Incident, StreamStatus

logger = logging.getLogger(__name__)
_LEVELS = {"loss": logging.WARNING, "restart": logging.WARNING, "restore": logging.ERROR}


class JobReport:
    """One job's, from its start on. Methods are of the job's thread, save what says otherwise."""

    def __init__(
        self,
        run: str,
        graph: JobGraph,
        core: JobCore[Any],
        mode: DriverMode[Any],
        lock: threading.Lock,
        planners: Planners,
    ) -> None:
        """Ask the vertex for what there was before the job.

        ``run`` names the execution. ``lock`` is held where ``core`` gets events, and for `update`.
        """
        self._run, self._graph = run, graph
        self._core, self._mode = core, mode
        self._lock = lock
        self._planners = planners
        self._asking = threading.Lock()
        self._meter = Meter()
        self._exemplars: dict[str, Exemplar] = {}
        self._is_over = False
        self._last_status: StreamStatus | None = None
        self._letters = LetterWarnings()
        self._before = mode.vertex_status()
        if self._before is not None:
            self._meter.update_vertex(self._before, mono_ms())
        self.started_ms, self._ended_ms = mono_ms(), 0
        self._to_wall_ms = time.time_ns() // 1_000_000 - self.started_ms

    def update(self, instance: str, counters: dict[str, int], now_ms: int) -> None:
        self._meter.update(instance, counters, now_ms)

    def update_exemplars(self, exemplars: Mapping[str, Exemplar]) -> None:
        """Take an instance's exemplars; of those of one bucket the latest is kept."""
        for name, exemplar in exemplars.items():
            known = self._exemplars.get(name)
            if known is None or known.at_ms <= exemplar.at_ms:
                self._exemplars[name] = exemplar

    def ending(self) -> None:
        self._ended_ms = mono_ms()

    def over(self) -> None:
        self._is_over = True

    def status(self) -> JobStatus:
        """Return what is known of the job now, with the vertex's answer if there is one; any thread."""
        # One at a time: an older answer behind a newer one would look like a vertex that counts from 0 again.
        with self._asking:
            vertex = self._vertex_status()
            moment_ms = mono_ms()
            if vertex is not None:
                with self._lock:
                    self._meter.update_vertex(vertex, moment_ms)
        with self._lock:
            core = self._core
            rates = {} if self._is_over else self._meter.rates(moment_ms)
            totals = self._meter.totals
            savepoint = self._mode.stopped_with
            beats = [
                slot.heartbeat for slot in core.slots if slot.heartbeat is not None and not self._is_over
            ]
            status = JobStatus(
                name=self._graph.name,
                job=self._run,
                state=core.state,
                epoch=core.epoch,
                uptime_s=(self._ended_ms or moment_ms) / 1_000 - self.started_ms / 1_000,
                slots=tuple(slot_status(slot, moment_ms) for slot in core.slots),
                chains=tuple(
                    chain_status(v.uid, totals, rates, core.slots, savepoint) for v in self._graph.vertices
                ),
                counters={name: value for name, value in totals.items() if "/" not in name},
                rates={name: rate for name, rate in rates.items() if "/" not in name},
                histograms=dict(self._histograms(totals)),
                vertex=vertex,
                before=self._before,
                restarts=core.restarts,
                isolation=core.isolation,
                last_failure=core.last_failure,
                checkpoints=self._mode.checkpoint_counts,
                subtasks=tuple(each for beat in beats for each in beat.subtasks),
                edges=tuple(each for beat in beats for each in beat.edges),
                incidents=core.incidents.at(self._to_wall_ms),
                transports=transports_of(core.slots),
                savepoint="" if savepoint is None else savepoint.location,
                lags={} if self._is_over else {**self._planners.lags(), **lags_of(core.slots)},
                away={} if self._is_over else away_of(self._planners.away(), core.slots),
                breakers={} if self._is_over else circuits_of(core.slots),
            )
            said = "" if self._is_over else self._letters.take(status.new_letters, moment_ms)
        if said:
            logger.warning("topology %r: %s", status.name, said)
        return status

    def _histograms(self, totals: Mapping[str, int]) -> Iterator[tuple[str, HistogramDetails]]:
        for name in (messages.PERSIST, messages.END_TO_END):
            found = messages.histograms_of(name, totals, LATENCY_BOUNDS, self._exemplars)
            for part, histogram in found.items():
                yield f"{name}|{part}", HistogramDetails.of(histogram)

    def _vertex_status(self) -> StreamStatus | None:
        if not self._is_over:
            return self._mode.vertex_status()
        if self._last_status is None:
            self._last_status = self._mode.vertex_status()
        return self._last_status


class Stacks:
    """Of one job. An answer that comes too late is dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[str]] = {}

    def ask(self) -> tuple[messages.AskStack, Future[str]]:
        answer: Future[str] = Future()
        with self._lock:
            number = next(self._numbers)
            self._asked[number] = answer
        return messages.AskStack(number), answer

    def forget(self, asked: messages.AskStack) -> None:
        with self._lock:
            self._asked.pop(asked.number, None)

    def taken(self, answer: messages.StackTaken) -> None:
        with self._lock:
            asked = self._asked.pop(answer.number, None)
        if asked is not None:
            asked.set_result(answer.text)


# How long the coordinator waits for an event before it looks at the time.
TICK_S = 0.05
# A process that runs Python answers within milliseconds.
STACK_S = 5.0


@dataclass(frozen=True)
class Later:
    work: Callable[[], None]


JobEvent: TypeAlias = job_events.Event | messages.AssignSplits | Later


@dataclass(frozen=True)
class JobParts:
    """What a job is made of. Server, submitter and planners report to the `JobThread` that they were made for.

    ``restart`` is of this job alone. ``mode`` makes the half of its mode in the driver. ``on_over`` is called once, by
    the coordinator's thread, when the job has come to its final state.
    """

    graph: JobGraph
    options: TopologyOptions
    restart: RestartStrategy
    server: ControlServer
    submitter: SlotSubmitter
    planners: Planners
    mode: OpenMode
    on_over: Callable[[], None]


class JobThread:
    """A job as it runs. `ftlayer.runtime.driver.job.Job` is its handle, for users."""

    def __init__(self, job: str, events: queue.SimpleQueue[JobEvent] | None = None) -> None:
        """``job`` names the execution. ``events`` takes all that happens; None: a queue of its own."""
        self.job = job
        self.interrupted = False
        """Whether the last checkpoints stay, whatever ``retention`` says."""
        self._events: queue.SimpleQueue[JobEvent] = queue.SimpleQueue() if events is None else events
        self._lock = threading.Lock()  # guards core and meter
        self._stacks = Stacks()
        self._over = threading.Event()
        self._changed = threading.Condition()  # told whenever the job's state may be another one
        self._close_by_s: float | None = None
        self._verdict: job_events.Over | None = None

    # What its handle asks: any thread.
    @property
    def name(self) -> str:
        return self._parts.graph.name

    @property
    def state(self) -> job_events.JobState:
        return self._core.state

    @property
    def error(self) -> FTLayerError | None:
        """What the job failed with; None while it runs, and if it ended or was cancelled."""
        return None if self._verdict is None else self._verdict.error

    @property
    def ends_by(self) -> FTLayerError | None:
        """The same, and before the job is over what it is about to fail with."""
        return self.error or self._core.error

    @property
    def result(self) -> JobResult | None:
        return self._mode.result

    @property
    def checkpoints(self) -> CheckpointCalls:
        """The calls for its checkpoints; raises `ConfigError` where there are none."""
        return self._mode.checkpoints

    def status(self) -> JobStatus:
        return self._report.status()

    def history(self) -> tuple[CheckpointDetails, ...]:
        return self.checkpoints.history()

    def stack(self, number: int, timeout_s: float = STACK_S) -> str:
        """Ask the process of a slot what its threads do; says where it gives no answer.

        Raises `ConfigError` for a slot that the job does not have, or that no process runs.
        """
        with self._lock:
            hello = self._core.slots[number].hello if 0 <= number < len(self._core.slots) else None
        if hello is None:
            raise ConfigError(f"slot: no process runs slot {number} of {self.name!r} now")
        asked, answer = self._stacks.ask()
        self._parts.server.send(hello.instance, asked)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            return (
                f"slot {number} (process {hello.pid} on {hello.host}) has not answered within {timeout_s:g} s: code "
                "that is not Python holds the interpreter, or the process stands still"
            )
        finally:
            self._stacks.forget(asked)

    def later(self, work: Callable[[], None]) -> None:
        self._events.put(Later(work))

    def drain(self) -> None:
        self._events.put(job_events.DrainRequested())

    def cancel(self, close_by_s: float | None) -> None:
        """A commit has until ``close_by_s`` of the monotone clock (None: as it takes)."""
        if close_by_s is not None:
            self._close_by_s = close_by_s
        self._events.put(job_events.CancelRequested("the job was cancelled"))

    def interrupt(self) -> None:
        self.interrupted = True

    def wait_until_over(self, timeout: float | None) -> bool:
        return self._over.wait(timeout)

    def wait_until_up(self, timeout: float | None) -> bool:
        """Wait until all tasks run, or the job is over; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._over.is_set() or self.state.is_up, timeout)

    # What its parts say: any thread.
    def slot_said(self, slot: int, instance: str, message: messages.FromSlot) -> None:
        if isinstance(message, messages.StackTaken):
            self._stacks.taken(message)
            return
        self._events.put(job_events.Said(slot, instance, message))

    def slot_lost(self, slot: int, instance: str, reason: str) -> None:
        self._events.put(job_events.Broke(slot, instance, reason))

    def spark_job_ended(self, slot: int, attempt: int, error: str | None) -> None:
        needed_by = "" if error is None else operators_needing(missing_in(error), self._parts.graph)
        self._events.put(job_events.SparkJobEnded(slot, attempt, error, needed_by))

    def session_over(self, error: FTLayerError) -> None:
        self._events.put(job_events.SessionOver(error))

    def tasks_counted(self, counts: job_events.TaskCounts | None) -> None:
        self._events.put(job_events.TasksCounted(counts))

    def send_splits(self, splits: messages.AssignSplits) -> None:
        """Send splits to the slot of their subtask, if it runs; else its planner is told that it is up later."""
        self._events.put(splits)

    def source_backlog(self, source: str, working_off: bool) -> None:
        self.later(lambda: self.checkpoints.backlog(source, working_off))

    def broken(self, error: FTLayerError) -> None:
        self._events.put(job_events.Broken(error))

    def start(self, parts: JobParts) -> None:
        self._parts = parts
        crew = Crew(parts.graph.slots, parts.options.start_timeout_ms)
        self._mode: DriverMode[Any] = parts.mode(
            JobContext(
                self.job, parts.graph, parts.restart, crew, self._events.put, self.later, self._tell_slot
            )
        )
        self._core: JobCore[Any] = JobCore(crew, parts.options, self._mode.rules)
        self._report = JobReport(self.job, parts.graph, self._core, self._mode, self._lock, parts.planners)
        threading.Thread(target=self._run, name=f"ftlayer-job-{self.name}", daemon=True).start()

    # The coordinator's thread.
    def _run(self) -> None:
        try:
            self.begin()
            while self._verdict is None:
                self.step()
        except BaseException as error:
            raise_signalled(error)
            # A fault of ours: without this the job would stand still unnoticed.
            logger.exception("the coordinator of job %r has failed", self.name)
            self._verdict = job_events.Over(
                job_events.JobState.FAILED, JobError(f"the coordinator has failed: {error!r}")
            )
        finally:
            self.finish()

    @property
    def verdict(self) -> job_events.Over | None:
        return self._verdict

    @property
    def core(self) -> JobCore[Any]:
        return self._core

    def begin(self) -> None:
        self._do_all(self._core.start(self._report.started_ms))
        self._parts.planners.start()

    def step(self) -> None:
        try:
            event = self._events.get(timeout=TICK_S)
        except queue.Empty:
            event = job_events.Tick()
        if isinstance(event, messages.AssignSplits):
            self._send_splits(event)
        elif isinstance(event, Later):
            event.work()
        else:
            self._take(event)

    def _take(self, event: job_events.Event) -> None:
        moment_ms = mono_ms()
        with self._lock:
            if isinstance(event, job_events.Said):
                self._note(event, moment_ms)
            before = self._core.state
            instructions = self._core.handle(event, moment_ms)
            news, self._core.incidents.news = self._core.incidents.news, []
            is_other = self._core.state is not before
        for incident in news:
            self._log(incident, event)
        if isinstance(event, job_events.DrainRequested):
            self._parts.planners.drain()
        self._do_all(instructions)
        self._mode.after(event, self._core.state, moment_ms)
        if is_other:
            # Behind all that the change brings about.
            self._tell_changed()

    def _log(self, incident: Incident, event: job_events.Event) -> None:
        if (
            isinstance(event, job_events.Said)
            and isinstance(event.message, messages.SourceFailed)
            and incident.kind == "loss"
        ):
            return  # `_note` has said it, with the pause.
        level = _LEVELS.get(
            incident.kind, logging.ERROR if self.state is job_events.JobState.FAILED else logging.INFO
        )
        logger.log(level, "topology %r: %s", self.name, incident.text.partition("\n")[0])

    def _tell_changed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _note(self, said: job_events.Said, now_ms: int) -> None:
        match said.message:
            case (
                messages.Heartbeat(counters=counters)
                | messages.SlotEnded(counters=counters)
                | messages.SlotFailed(counters=counters)
            ):
                self._report.update(said.instance, counters, now_ms)
        if isinstance(said.message, messages.Heartbeat):
            self._report.update_exemplars(said.message.exemplars)
        self._mode.before(said)
        match said.message:
            case messages.SourceFailed(reason=reason, pause_ms=pause_ms):
                logger.warning("%s; it is started again in %d ms", reason, pause_ms)
            case messages.SplitDone() as done if self._core.slots[said.slot].is_instance(said.instance):
                self._parts.planners.split_done(done)

    def _send_splits(self, splits: messages.AssignSplits) -> None:
        slot = self._core.slots[self._parts.graph.slot_of(splits.source, splits.subtask)]
        if slot.running and slot.hello is not None:
            self._parts.server.send(slot.hello.instance, splits)

    def _do_all(self, instructions: list[job_events.JobInstruction | Any]) -> None:
        for instruction in instructions:
            if isinstance(instruction, job_events.JobInstruction):
                self._do(instruction)
            else:
                self._mode.carry_out(instruction)

    def _do(self, instruction: job_events.JobInstruction) -> None:
        parts = self._parts
        match instruction:
            case job_events.SendTo(_, instance, message):
                parts.server.send(instance, message)
            case job_events.SubmitSlot(slot, attempt):
                parts.submitter.submit(slot, attempt)
            case job_events.CancelSlot(slot, attempt):
                parts.submitter.cancel(slot, attempt)
            case job_events.AskSession():
                parts.submitter.ask_session()
            case job_events.CountTasks():
                parts.submitter.count_tasks(self.tasks_counted)
            case job_events.SlotUp(slot):
                parts.planners.slot_up(slot)
            case job_events.SlotDown(slot):
                parts.planners.slot_down(slot)
            case job_events.Over():
                self._verdict = instruction
            case _:
                assert_never(instruction)

    def _tell_slot(self, number: int, message: messages.ToSlot) -> None:
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

    def finish(self) -> None:
        self._report.ending()
        try:
            self._close()
            self._report.over()
            status = self._report.status()
            dead, line = status.dead, status.line().removeprefix(f"{status.name}: ")
            level = logging.WARNING if status.new_letters else logging.INFO
            logger.log(level, "topology %r: %s · %s", status.name, line, letters_text(dead))
        except BaseException as error:
            raise_signalled(error)
            # Callers that wait for the job have to hear of it.
            logger.exception("the end of job %r has failed", self.name)
            self._verdict = job_events.Over(
                job_events.JobState.FAILED,
                JobError(f"the coordinator has failed at the job's end: {error!r}"),
            )
        finally:
            self._report.over()
            self._over.set()
            self._tell_changed()

    def _close(self) -> None:
        parts = self._parts
        with ExitStack() as stack:
            stack.callback(self._hand_back)
            stack.callback(parts.submitter.close)
            stack.callback(self._mode.close)
            stack.callback(parts.server.close)
            stack.callback(parts.planners.close)
            if self._verdict is not None:
                self._mode.end(
                    self._verdict.state, self._take_later, self._close_by_s, interrupted=self.interrupted
                )

    def _hand_back(self) -> None:
        # Its name and task slots are free once nothing is done in its name any more.
        self._mode.when_done(self._parts.on_over)
