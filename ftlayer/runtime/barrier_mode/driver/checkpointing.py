"""Checkpoints of a job, as its driver carries them out.

The rules are `ftlayer.checkpoint.coordinator`'s; here its instructions become messages, files and commits, and what
comes of them becomes its events. All public methods belong to the job's thread, save what says otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future

from ftlayer.checkpoint.barrier import SnapshotKind
from ftlayer.checkpoint.coordinator.events import (
    BacklogChanged,
    CheckpointEvent,
    CheckpointTick,
    InputHeld,
    JobOver,
    JobStopping,
    PartDeclined,
    PartWritten,
    SubtaskFinished,
    TasksRestarting,
    TasksRestored,
    TasksRunning,
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
from ftlayer.checkpoint.storage.results import JobResult
from ftlayer.clock import system_now
from ftlayer.errors import (
    CheckpointError,
    ConfigError,
    error_for_code,
)
from ftlayer.runtime.barrier_mode.driver.checkpoint_io import CheckpointIo
from ftlayer.runtime.barrier_mode.driver.committing import GivenUp
from ftlayer.runtime.barrier_mode.driver.letters import JobLetters
from ftlayer.runtime.barrier_mode.driver.publishing import JobCheckpointParts
from ftlayer.runtime.barrier_mode.driver.restore_points import RestorePoints
from ftlayer.runtime.driver.driver_mode import JobContext
from ftlayer.runtime.driver.events import (
    Broken,
    CheckpointComplete,
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
from ftlayer.topology.operators import Source

logger = logging.getLogger(__name__)


class JobCheckpoints:
    """See the module.

    Attributes:
        stopped_with: the savepoint that the job is stopped with, once that is complete; None for none. For any thread.
    """

    def __init__(self, parts: JobCheckpointParts, job: JobContext) -> None:
        self.stopped_with: Checkpoint | None = None
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
        self._down: set[int] = set(range(graph.slots))
        self._given_up = GivenUp()
        self._io = CheckpointIo(parts, happened=job.happened, tell=self._later_handle)
        self._restores = RestorePoints(
            parts,
            self._io,
            happened=job.happened,
            later=job.later,
            restored=self._restored,
        )
        self._letters = JobLetters(parts.letters, job, parts.check_owner)
        self._requests = _Requests()
        self._cancelled = False
        self._ran = False

    # ------------------------------------------------------------ what is known

    @property
    def result(self) -> JobResult | None:
        """How the job has ended; None before, and where there is no directory to keep it in."""
        return self._io.result

    @property
    def counts(self) -> CheckpointCounts:
        return self._rules.counts

    @property
    def unsent_letters(self) -> int:
        """Dead letters that wait to be sent to the vertex, or to be written where there is none."""
        return self._letters.unsent

    def history(self) -> tuple[CheckpointStats, ...]:
        """Checkpoints under way, and the last 100 others; the latest first."""
        return self._rules.history(system_now())

    def retained(self) -> tuple[str, ...]:
        """Where the checkpoints lie that the job may go back to, the oldest first; none in the driver's memory."""
        return tuple(checkpoint.location for checkpoint in self._rules.completed if checkpoint.location)

    # ------------------------------------------------------------ the job's events

    def tick(self) -> None:
        """Time has passed."""
        self._handle(CheckpointTick())
        self._letters.tick()

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

    def held(self, chains: frozenset[str]) -> None:
        """These chains take nothing from their inputs now, and no others."""
        self._handle(InputHeld(chains))

    def prepare(self, asked: PrepareRestore) -> None:
        """Slots are lost, or begin: find out what they restore."""
        graph = self._parts.graph
        self._restores.ask(asked)
        self._down.update(asked.slots)
        self._letters.down(asked.slots)
        sources = [
            (vertex.uid, subtask)
            for vertex in graph.vertices
            if vertex.tells_its_end
            for subtask in range(vertex.parallelism)
            if graph.slot_of(vertex.uid, subtask) in asked.slots
        ]
        self._handle(TasksRestarting(asked.number, sources))

    def deployed(self, region: RegionDeployed) -> None:
        """The tasks of a region were told to start."""
        self._down.difference_update(region.slots)

    def running(self) -> None:
        """All tasks are restored and run."""
        if not self._ran:
            self._ran = True
            self._io.sweep_earlier_runs()
        self._io.sweep(self._rules.completed, self._crew.instances)
        self._letters.running()
        self._handle(TasksRunning())

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
            self._letters.ending()
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
        monotone clock, is left to itself (None: `CLOSE_WAIT_S` of `CheckpointIo` a step). `when_done` has to follow.
        """
        io = self._io
        io.close_by_s = close_by_s
        self.cancel()
        # What is being published decides whether its sinks are committed, and that takes a turn more.
        for _ in range(3):
            io.settle(take_events)
        self._abort_given_up(range(self._parts.graph.slots))
        # Before the result says that nothing is left to do, and before the checkpoints go that alone hold them.
        if not self._letters.write_all(take_events, close_by_s):
            self._say_what_keeps_checkpoints()
            self._end(state, take_events, close_by_s)
            return
        if state is JobState.ENDED:
            io.keep_result(self._rules.completed)
            io.settle(take_events)
        if state is JobState.ENDED and self.result is None and self._parts.config.directory is not None:
            logger.error(
                "the result of %r could not be kept, so its last checkpoints stay where they are: started again with "
                "restore_from='latest' it finds nothing left to do",
                self._parts.graph.name,
            )
        else:
            self._remove_unretained(state, interrupted=interrupted)
        self._end(state, take_events, close_by_s)

    def _end(self, state: JobState, take_events: Callable[[], None], close_by_s: float | None) -> None:
        """End the threads; what the rules know as complete stays."""
        self._letters.close(take_events, close_by_s)
        self._io.close_storage(self._rules.completed, take_events)
        self._requests.refuse_all(f"the job is {state}")

    def _say_what_keeps_checkpoints(self) -> None:
        logger.error(
            "dead letters of %r could not be written, so its last checkpoints stay where they are, whatever its "
            "retention says: started again with restore_from='latest' it writes them",
            self._parts.graph.name,
        )

    def _remove_unretained(self, state: JobState, *, interrupted: bool) -> None:
        instructions = self._rules.handle(JobOver(_end_of(state, interrupted)), system_now())
        self._carry_out_all(instructions)
        if state is not JobState.ENDED and any(isinstance(each, Discard) for each in instructions):
            # Behind the removal, which another driver's job is spared.
            self._io.clean(lambda: self._say_what_is_gone(state))

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

    def when_done(self, done: Callable[[], None]) -> None:
        """Call ``done``: now, or by another thread where `close` has left something to itself, behind that."""
        self._io.when_done(done)

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
        self._carry_out_all(self._rules.handle(event, system_now()))

    def _carry_out_all(self, instructions: list[CheckpointInstruction]) -> None:
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, instruction: CheckpointInstruction) -> None:
        match instruction:
            case Trigger(barrier):
                if barrier.final:
                    # What came back behind it would be in no checkpoint.
                    self._letters.ending()
                self._parts.readers.under_way(self._rules.in_progress)
                for slot in self._source_slots:
                    self._tell(slot, TriggerCheckpoint(barrier))
            case Publish(checkpoint, location):
                self._io.publish(self._letters.to_publish(checkpoint), location)
            case CommitSinks(checkpoint):
                self._io.commit(checkpoint)
            case NotifyCompleted(number):
                self._tell_all(CheckpointCompleted(number))
                # What those that were given up before had written was in this one.
                self._given_up.completed(number)
                for known in self._rules.completed:
                    if known.checkpoint == number:
                        self._parts.readers.completed(known)
                        self._letters.stands(known, self._rules.completed)
                        self._happened(CheckpointComplete(_condemned(known)))
            case NotifyAborted(checkpoint, reason):
                logger.info("checkpoint %d is given up: %s", checkpoint, reason)
                self._tell_all(
                    CheckpointAborted(checkpoint, files_stay=checkpoint in self._io.publisher.undecided)
                )
            case Discard(old):
                self._io.discard(old, self._rules.completed)
                self._letters.retained(self._rules.completed)
            case DiscardParts(number, parts, location):
                self._given_up.add(parts)
                self._io.discard_parts(number, parts, self._rules.completed, location)
            case FailJob(reason, final):
                self._happened(RestartRequested(reason) if final is None else Broken(final))
            case RestoreFrom(number, checkpoint):
                self._restores.restore(number, checkpoint)
            case Answer():
                self._requests.answer(instruction)
            case FinishTasks(drain):
                latest = self._rules.completed[-1]
                self.stopped_with = latest if latest.kind == SnapshotKind.SAVEPOINT else None
                self._happened(EndTasksRequested(drain))

    def _tell_all(self, message: ToSlot) -> None:
        for slot in self._crew.slots:
            self._tell(slot.number, message)

    # ------------------------------------------------------------ restoring

    def _abort_given_up(self, slots: Collection[int]) -> None:
        """Abort what tasks in ``slots``, which are gone, wrote for checkpoints that are none.

        (Survivors of their region abort their own as well.)
        """
        slot_of = self._parts.graph.slot_of
        gone = self._given_up.take(lambda uid, subtask: slot_of(uid, subtask) in slots)
        if gone:
            self._io.abort(gone)

    def _restored(self, asked: PrepareRestore, checkpoint: Checkpoint | None) -> None:
        self._handle(TasksRestored(checkpoint))
        if checkpoint is not None:
            self._letters.stands(checkpoint, self._rules.completed)
        self._abort_given_up(asked.slots)

    # ------------------------------------------------------------ small ones

    def _later_handle(self, event: CheckpointEvent) -> None:
        """Take an event in the job's thread; any thread."""
        self._later(lambda: self._handle(event))


class _Requests:
    """Users' requests for checkpoints and savepoints that are not answered yet, by number."""

    def __init__(self) -> None:
        self._waiting: dict[int, Future[Checkpoint]] = {}
        self._last = 0

    def add(self, answer: Future[Checkpoint]) -> int:
        self._last += 1
        self._waiting[self._last] = answer
        return self._last

    def answer(self, answer: Answer) -> None:
        """Say what became of one; nothing if that was said."""
        future = self._waiting.pop(answer.request, None)
        if future is None:
            return
        if answer.checkpoint is not None:
            future.set_result(answer.checkpoint)
        else:
            future.set_exception(answer.error or CheckpointError("there is no checkpoint"))

    def refuse_all(self, reason: str) -> None:
        """Say of all that there is no checkpoint."""
        for number in list(self._waiting):
            self.answer(Answer(number, error=CheckpointError(reason)))


def _condemned(checkpoint: Checkpoint) -> frozenset[tuple[str, bytes]]:
    return frozenset((part.uid, digest) for part in checkpoint.subtasks for digest in part.condemned)


def _end_of(state: JobState, interrupted: bool) -> JobEnd:
    if state is JobState.ENDED:
        return JobEnd.FINISHED
    if interrupted:
        # Though it may have failed: at Ctrl-C, PySpark cancels all Spark jobs before it interrupts the program.
        return JobEnd.INTERRUPTED
    return JobEnd.CANCELLED if state is JobState.CANCELLED else JobEnd.FAILED
