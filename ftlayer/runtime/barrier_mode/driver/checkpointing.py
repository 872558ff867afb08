"""Checkpoints of a job, as its driver carries them out: storage and sinks in a thread of their own.

The rules are `ftlayer.checkpoint.coordinator`'s; here its instructions become messages, files and commits, and what
comes of them becomes its events. All public methods belong to the job's thread, save what says otherwise.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future

from ftlayer.checkpoint.barrier import SnapshotKind
from ftlayer.checkpoint.coordinator.events import (
    BacklogChanged,
    CheckpointEvent,
    CommitFailed,
    JobOver,
    JobStopping,
    PartDeclined,
    PartWritten,
    Published,
    PublishFailed,
    SinksCommitted,
    SubtaskFinished,
    TasksRestarting,
    TasksRestored,
    TasksRunning,
    TimePassed,
)
from ftlayer.checkpoint.coordinator.instructions import (
    Answer,
    CheckpointInstruction,
    CommitSinks,
    Discard,
    DiscardParts,
    FailJob,
    FinishTasks,
    JobEnd,
    NotifyAborted,
    NotifyCompleted,
    Publish,
    RestoreFrom,
    Trigger,
)
from ftlayer.checkpoint.coordinator.statistics import CheckpointCounts, CheckpointStats
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.checkpoint.storage.opening import new_savepoint
from ftlayer.checkpoint.storage.results import JobResult, put_result
from ftlayer.clock import Now
from ftlayer.errors import (
    CheckpointError,
    ConfigError,
    FTLayerError,
    StaleOwnerError,
    error_for_code,
)
from ftlayer.recovery import lasting
from ftlayer.runtime.barrier_mode.driver.committing import GivenUp
from ftlayer.runtime.barrier_mode.driver.publishing import JobCheckpointParts, Publisher
from ftlayer.runtime.barrier_mode.driver.requests import Requests
from ftlayer.runtime.barrier_mode.driver.restore_points import RestorePoints
from ftlayer.runtime.driver.driver_mode import JobContext
from ftlayer.runtime.driver.events import (
    Broken,
    EndTasksRequested,
    JobState,
    PrepareRestore,
    RegionDeployed,
    RestartRequested,
)
from ftlayer.runtime.protocol.messages import (
    CheckpointAborted,
    CheckpointCompleted,
    DataEnded,
    FromSlot,
    SubtaskAcked,
    SubtaskDeclined,
    ToSlot,
    TriggerCheckpoint,
)
from ftlayer.runtime.worker import Worker
from ftlayer.topology.operators import IterationHead, Source

CLOSE_WAIT_S = 30.0
"""How long the end of a job waits for what is being published, committed and removed."""

logger = logging.getLogger(__name__)


class JobCheckpoints:
    """See the module."""

    def __init__(self, parts: JobCheckpointParts, job: JobContext) -> None:
        self._parts = parts
        self._rules = parts.rules
        self._crew = job.crew
        self._happened, self._later, self._tell = job.happened, job.later, job.tell
        graph = parts.graph
        self._source_slots = sorted(
            {
                graph.slot_of(vertex.uid, subtask)
                for vertex in graph.vertices
                if isinstance(vertex.operators[0], Source)
                for subtask in range(vertex.parallelism)
            }
        )
        self._io = Worker("checkpoints", self._io_failed)
        self._cleaning = Worker("checkpoint-cleaning", self._io_failed)
        self._down: set[int] = set(range(graph.slots))
        self._given_up = GivenUp()
        self._publisher = Publisher(parts)
        self._restores = RestorePoints(
            parts,
            self._publisher,
            self._io,
            happened=job.happened,
            later=job.later,
            restored=self._restored,
        )
        self._requests = Requests()
        self._cancelled = False
        self._close_by_s: float | None = None
        self._is_settled = True
        self.result: JobResult | None = None
        """How the job has ended; None before, and where there is no directory to keep it in."""

    # ------------------------------------------------------------ what is known

    @property
    def counts(self) -> CheckpointCounts:
        """Totals."""
        return self._rules.counts

    def history(self) -> tuple[CheckpointStats, ...]:
        """Checkpoints under way, and the last 100 others; the latest first."""
        return self._rules.history(_now())

    # ------------------------------------------------------------ the job's events

    def tick(self) -> None:
        """Time has passed."""
        self._handle(TimePassed())

    def said(self, message: FromSlot) -> None:
        """An instance that counts has said something."""
        match message:
            case SubtaskAcked(checkpoint, snapshot):
                self._handle(PartWritten(checkpoint, snapshot))
            case SubtaskDeclined(checkpoint, uid, subtask, reason, counts, code):
                final = error_for_code(code)(reason) if code else None
                self._handle(PartDeclined(checkpoint, (uid, subtask), reason, counts, final))
            # Of an instance that is about to be reset it means nothing: the next one reads on from the checkpoint.
            case DataEnded(uid, subtask) if self._parts.graph.slot_of(uid, subtask) not in self._down:
                self._handle(SubtaskFinished((uid, subtask)))

    def prepare(self, asked: PrepareRestore) -> None:
        """Slots are lost, or begin: find out what they restore."""
        graph = self._parts.graph
        self._restores.ask(asked)
        self._down.update(asked.slots)
        sources = [
            (vertex.uid, subtask)
            for vertex in graph.vertices
            if isinstance(vertex.operators[0], Source | IterationHead)
            for subtask in range(vertex.parallelism)
            if graph.slot_of(vertex.uid, subtask) in asked.slots
        ]
        self._handle(TasksRestarting(asked.number, sources))

    def deployed(self, region: RegionDeployed) -> None:
        """The tasks of a region were told to start."""
        self._down.difference_update(region.slots)

    def running(self) -> None:
        """All tasks are restored and run."""
        self._sweep()
        self._handle(TasksRunning())

    def _sweep(self) -> None:
        """Remove what instances have left behind that are gone."""
        keep, alive = self._rules.completed, self._crew.instances

        def work() -> None:
            for path in self._parts.storage.sweep(keep, alive.__contains__):
                logger.info("%s was left behind by an instance that is gone", path)

        self._clean(work)

    def _clean(self, work: Callable[[], None]) -> None:
        """Have something removed, unless another driver has taken over: it may go on with just that."""

        def guarded() -> None:
            self._parts.check_owner()
            work()

        self._cleaning.do(guarded)

    def backlog(self, source: str, working_off: bool) -> None:
        """A reader source begins, or ceases, to work off a backlog."""
        self._handle(BacklogChanged((source, 0), working_off))

    def damaged(self, checkpoint: int, reason: str) -> None:
        """A slot could not read this checkpoint: it is not restored any more."""
        self._restores.damaged(checkpoint, reason)

    def cancel(self) -> None:
        """The job is being ended: nothing begins any more. Calling it again does no harm."""
        if not self._cancelled:
            self._cancelled = True
            self._handle(JobStopping())

    def close(
        self,
        state: JobState,
        take_events: Callable[[], None],
        close_by_s: float | None = None,
        *,
        interrupted: bool = False,
    ) -> None:
        """The job is over: remove what is not retained (``interrupted``: see `JobEnd`), and end the threads.

        ``take_events`` calls what `later` was given meanwhile. What takes longer than until ``close_by_s``, of the
        monotone clock, is left to itself (None: `CLOSE_WAIT_S` a step). `when_done` has to follow.
        """
        self._close_by_s = close_by_s
        self.cancel()
        # What is being published decides whether its sinks are committed, and that takes a turn more.
        for _ in range(3):
            self._settle(self._io, take_events)
        self._abort_given_up(range(self._parts.graph.slots))
        if state is JobState.ENDED:
            self._io.do(self._keep_result)
            self._settle(self._io, take_events)
            if self.result is None and self._parts.config.directory is not None:
                self._leave_all(take_events)
                return
        instructions = self._rules.handle(JobOver(_end_of(state, interrupted)), _now())
        self._carry_out_all(instructions)
        if state is not JobState.ENDED and any(isinstance(each, Discard) for each in instructions):
            # Behind the removal, which another driver's job is spared.
            self._clean(lambda: self._say_what_is_gone(state))
        self._close_storage(take_events)
        self._requests.refuse_all(f"the job is {state}")

    def _say_what_is_gone(self, state: JobState) -> None:
        config = self._parts.config
        if config.directory is not None:
            logger.warning(
                "%r has %s, and its last checkpoint is removed, as retention=Retention.%s says: its next start begins "
                "anew, and transactional sinks get again what they have got",
                self._parts.graph.name,
                "been cancelled" if state is JobState.CANCELLED else state,
                config.effective_retention.name,
            )

    def _close_storage(self, take_events: Callable[[], None]) -> None:
        keep = self._rules.completed
        self._clean(lambda: self._parts.storage.close(keep))
        for worker in (self._io, self._cleaning):
            self._settle(worker, take_events)
        self._cleaning.stop()

    def _keep_result(self) -> None:
        """Before the checkpoints are removed: without either the job would be run again from its beginning."""
        last = max(self._rules.completed, key=lambda each: each.checkpoint, default=None)
        result = JobResult(
            self._parts.graph.name,
            self._parts.run,
            _now().wall_ms,
            0 if last is None else last.checkpoint,
            last.location if last is not None and last.kind == SnapshotKind.SAVEPOINT else "",
        )
        self._parts.check_owner()
        put_result(self._parts.config, result)
        self.result = None if self._parts.config.directory is None else result

    def _leave_all(self, take_events: Callable[[], None]) -> None:
        """The result could not be kept: the last checkpoint says as well that there is nothing left to do."""
        logger.error(
            "the result of %r could not be kept, so its last checkpoints stay where they are: started again with "
            "restore_from='latest' it finds nothing left to do",
            self._parts.graph.name,
        )
        self._close_storage(take_events)
        self._requests.refuse_all(f"the job is {JobState.ENDED}")

    def when_done(self, done: Callable[[], None]) -> None:
        """Call ``done``: now, or by another thread where `close` has left something to itself, behind that."""
        if self._is_settled:
            done()
        else:
            self._io.do(done)
        self._io.stop()

    # ------------------------------------------------------------ users

    def savepoint_location(self, directory: str) -> str:
        """Return the URL of a new savepoint in ``directory`` ("": the configured one); any thread."""
        config = self._parts.config
        where = directory or config.savepoint_directory
        if not where:
            raise ConfigError(
                "savepoint: no directory is given, and CheckpointConfig has no savepoint_directory; give one of them"
            )
        return new_savepoint(where, self._parts.run)

    def request(self, ask: Callable[[int], CheckpointEvent], answer: Future[Checkpoint]) -> None:
        """Have a user's request carried out; ``answer`` gets what became of it.

        ``ask`` makes the event of it, by the number of the request.
        """
        number = self._requests.add(answer)
        if self._cancelled:
            self._requests.refuse_all("the job is ending")
        else:
            self._handle(ask(number))

    # ------------------------------------------------------------ carrying out

    def _handle(self, event: CheckpointEvent) -> None:
        self._carry_out_all(self._rules.handle(event, _now()))

    def _carry_out_all(self, instructions: list[CheckpointInstruction]) -> None:
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, instruction: CheckpointInstruction) -> None:
        match instruction:
            case Trigger(barrier):
                self._parts.readers.under_way(self._rules.in_progress)
                for slot in self._source_slots:
                    self._tell(slot, TriggerCheckpoint(barrier))
            case Publish(checkpoint, location):
                self._publish(checkpoint, location)
            case CommitSinks(checkpoint):
                self._commit(checkpoint)
            case NotifyCompleted(number):
                self._tell_all(CheckpointCompleted(number))
                # What those that were given up before had written was in this one.
                self._given_up.completed(number)
                for known in self._rules.completed:
                    if known.checkpoint == number:
                        self._parts.readers.completed(known)
            case NotifyAborted(checkpoint, reason):
                logger.info("checkpoint %d is given up: %s", checkpoint, reason)
                self._tell_all(
                    CheckpointAborted(checkpoint, files_stay=checkpoint in self._publisher.undecided)
                )
            case Discard(old):
                keep = self._rules.completed
                self._clean(lambda: self._parts.storage.discard(old, keep))
            case DiscardParts(number, parts, location):
                keep = self._rules.completed
                self._given_up.add(parts)
                self._clean(lambda: self._parts.storage.discard_parts(number, parts, keep, location))
            case FailJob(reason, final):
                self._happened(RestartRequested(reason) if final is None else Broken(final))
            case RestoreFrom(number, checkpoint):
                self._restores.restore(number, checkpoint)
            case Answer():
                self._requests.answer(instruction)
            case FinishTasks(drain):
                self._happened(EndTasksRequested(drain))

    def _tell_all(self, message: ToSlot) -> None:
        for slot in self._crew.slots:
            self._tell(slot.number, message)

    def _publish(self, checkpoint: Checkpoint, location: str) -> None:
        def work() -> None:
            try:
                published = self._publisher.publish(checkpoint, location)
            except StaleOwnerError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, the rules wait for an answer
                self._later_handle(PublishFailed(checkpoint.checkpoint, _said(error), lasting(error)))
            else:
                self._later_handle(Published(published))

        self._io.do(work)

    def _commit(self, checkpoint: Checkpoint) -> None:
        def work() -> None:
            try:
                self._publisher.commit(checkpoint)
            except StaleOwnerError:
                raise
            except Exception as error:  # noqa: BLE001 - as above
                self._later_handle(CommitFailed(checkpoint.checkpoint, _said(error), lasting(error)))
            else:
                self._later_handle(SinksCommitted(checkpoint.checkpoint))

        self._io.do(work)

    # ------------------------------------------------------------ restoring

    def _abort_given_up(self, slots: Collection[int]) -> None:
        """Abort what tasks in ``slots``, which are gone, wrote for checkpoints that are none.

        (Survivors of their region abort their own as well.)
        """
        slot_of = self._parts.graph.slot_of
        gone = self._given_up.take(lambda uid, subtask: slot_of(uid, subtask) in slots)
        if gone:
            self._io.do(lambda: self._parts.committer.abort(gone))

    def _restored(self, asked: PrepareRestore, checkpoint: Checkpoint | None) -> None:
        self._handle(TasksRestored(checkpoint))
        self._abort_given_up(asked.slots)

    # ------------------------------------------------------------ small ones

    def _later_handle(self, event: CheckpointEvent) -> None:
        """Take an event in the job's thread; any thread."""
        self._later(lambda: self._handle(event))

    def _io_failed(self, error: Exception) -> None:
        if isinstance(error, StaleOwnerError):
            self._happened(Broken(error))
        elif isinstance(error, CheckpointError):
            logger.warning("checkpoints: %s", error)
        else:
            logger.error("checkpoints failed in a way they never should", exc_info=error)

    def _settle(self, worker: Worker, take_events: Callable[[], None]) -> None:
        """Wait until a thread has done what it was given, and take what it says of it."""
        done = threading.Event()
        worker.do(done.set)
        left_s = CLOSE_WAIT_S
        if self._close_by_s is not None:
            left_s = min(left_s, max(0.0, self._close_by_s - time.monotonic()))
        if not done.wait(left_s):
            self._is_settled = False
            logger.warning(
                "what a sink commits, or the storage of checkpoints does, takes longer than %.1f s and is left to "
                "itself; a job that is restored commits again",
                left_s,
            )
        take_events()


def _end_of(state: JobState, interrupted: bool) -> JobEnd:
    if state is JobState.ENDED:
        return JobEnd.FINISHED
    if interrupted:
        # Though it may have failed: at Ctrl-C, PySpark cancels all Spark jobs before it interrupts the program.
        return JobEnd.INTERRUPTED
    return JobEnd.CANCELLED if state is JobState.CANCELLED else JobEnd.FAILED


def _said(error: Exception) -> str:
    """Return the reason to give; what should never have been raised is logged with where it comes from."""
    if isinstance(error, FTLayerError):
        return str(error)
    logger.error("checkpoints failed in a way they never should", exc_info=error)
    return f"{type(error).__name__}: {error}"


def _now() -> Now:
    return Now(time.monotonic_ns() // 1_000_000, time.time_ns() // 1_000_000)
