"""Checkpoints of a job, as its driver carries them out: storage and sinks in a thread of their own.

The rules are `ftlayer.checkpoint.coordinator`'s; here its decisions become messages, files and commits, and what
comes of them becomes its events. All public methods belong to the job's thread, save what says otherwise.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

from ftlayer.checkpoint.coordinator.coordinator import CheckpointCoordinator
from ftlayer.checkpoint.coordinator.decisions import (
    Answer,
    CommitSinks,
    Decision,
    Discard,
    DiscardParts,
    EndTasks,
    FailJob,
    JobEnd,
    NotifyAborted,
    NotifyCompleted,
    Publish,
    RestoreFrom,
    Trigger,
)
from ftlayer.checkpoint.coordinator.statistics import CheckpointCounts, CheckpointStats
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint, Restore, SubtaskSnapshot
from ftlayer.checkpoint.storage.contract import DriverStorage
from ftlayer.checkpoint.storage.opening import new_savepoint, pieces_directory
from ftlayer.errors import (
    CheckpointDamagedError,
    CheckpointError,
    ConfigError,
    FTLayerError,
    IncompatibleCheckpointError,
)
from ftlayer.layer.calls import Now
from ftlayer.runtime.coordinator.committing import Committer
from ftlayer.runtime.coordinator.events import (
    EndTasksRequested,
    Event,
    JobState,
    PrepareRestore,
    RegionDeployed,
    RestartRequested,
    RestoreFailed,
    RestoreReady,
)
from ftlayer.runtime.coordinator.planners import Planners
from ftlayer.runtime.coordinator.restoring import restores
from ftlayer.runtime.messages import (
    CheckpointAborted,
    CheckpointCompleted,
    DataEnded,
    FromSlot,
    SubtaskAcked,
    SubtaskDeclined,
    ToSlot,
    TriggerCheckpoint,
)
from ftlayer.runtime.slot.worker import Worker
from ftlayer.stream.job_graph import JobGraph
from ftlayer.stream.operators import IterationHead, Source

CLOSE_WAIT_S = 30.0
"""How long the end of a job waits for what is being published, committed and removed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointParts:
    """What a job's checkpoints are made of.

    ``run`` names the execution. ``rules`` are made with what the job may be restored from at its start.
    """

    graph: JobGraph
    config: CheckpointConfig
    run: str
    rules: CheckpointCoordinator
    storage: DriverStorage
    committer: Committer


class JobCheckpoints:
    """See the module."""

    def __init__(
        self,
        parts: CheckpointParts,
        planners: Planners,
        *,
        happened: Callable[[Event], None],
        later: Callable[[Callable[[], None]], None],
        tell_all: Callable[[ToSlot], None],
        tell_slot: Callable[[int, ToSlot], None],
        instances: Callable[[], frozenset[str]],
    ) -> None:
        """Args:
        parts: see there.
        planners: of the job's reader sources, whose ranges belong to a checkpoint too.
        happened: takes an event for the rules of the job; any thread.
        later: has a function called in the job's thread; any thread.
        tell_all: sends to all slots that run their tasks.
        tell_slot: sends to one of them.
        instances: the names of those that are connected.
        """
        self._parts = parts
        self._rules = parts.rules
        self._planners = planners
        self._happened, self._later = happened, later
        self._tell_all, self._tell_slot = tell_all, tell_slot
        self._instances = instances
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
        self._asked: dict[int, PrepareRestore] = {}
        self._down: set[int] = set(range(graph.slots))
        self._damaged: set[int] = set()
        self._given_up: list[SubtaskSnapshot] = []
        self._undecided: frozenset[int] = frozenset()
        self._requests: dict[int, Future[Checkpoint]] = {}
        self._cancelled = False

    # ------------------------------------------------------------ what is known

    @property
    def counts(self) -> CheckpointCounts:
        """Totals."""
        return self._rules.counts

    def history(self) -> tuple[CheckpointStats, ...]:
        """What is under way, and the last 100 that are not; the latest first."""
        return self._rules.history(_now())

    # ------------------------------------------------------------ the job's events

    def tick(self) -> None:
        """Time has passed."""
        self._do(self._rules.tick(_now()))

    def said(self, message: FromSlot) -> None:
        """An instance that counts has said something."""
        match message:
            case SubtaskAcked(checkpoint, snapshot):
                self._do(self._rules.acked(checkpoint, snapshot, _now()))
            case SubtaskDeclined(checkpoint, uid, subtask, reason, synchronous, counts):
                self._do(
                    self._rules.declined(
                        checkpoint, (uid, subtask), reason, _now(), synchronous=synchronous, counts=counts
                    )
                )
            # Of an instance that is about to be reset it means nothing: the next one reads on from the checkpoint.
            case DataEnded(uid, subtask) if self._parts.graph.slot_of(uid, subtask) not in self._down:
                self._do(self._rules.data_ended((uid, subtask), _now()))

    def prepare(self, asked: PrepareRestore) -> None:
        """Slots are lost, or begin: find out what they restore."""
        graph = self._parts.graph
        self._asked[asked.number] = asked
        self._down.update(asked.slots)
        sources = [
            (vertex.uid, subtask)
            for vertex in graph.vertices
            if isinstance(vertex.operators[0], Source | IterationHead)
            for subtask in range(vertex.parallelism)
            if graph.slot_of(vertex.uid, subtask) in asked.slots
        ]
        self._do(self._rules.restarting(asked.number, _now(), sources))

    def deployed(self, region: RegionDeployed) -> None:
        """A region runs."""
        self._down.difference_update(region.slots)
        if not self._down:
            self._sweep()
            self._do(self._rules.running(_now()))

    def _sweep(self) -> None:
        """Remove what instances have left behind that are gone."""
        keep, alive = self._rules.completed, self._instances()

        def work() -> None:
            for path in self._parts.storage.sweep(keep, alive.__contains__):
                logger.info("%s was left behind by an instance that is gone", path)

        self._cleaning.do(work)

    def backlog(self, source: str, working_off: bool) -> None:
        """A reader source begins, or ceases, to work off a backlog."""
        self._do(self._rules.backlog((source, 0), working_off, _now()))

    def damaged(self, checkpoint: int) -> None:
        """A slot could not read this checkpoint: it is not restored any more."""
        self._damaged.add(checkpoint)

    def cancel(self) -> None:
        """The job is being ended: nothing begins any more. Calling it again does no harm."""
        if not self._cancelled:
            self._cancelled = True
            self._do(self._rules.cancel(_now()))

    def close(self, state: JobState, take_events: Callable[[], None]) -> None:
        """The job is over: remove what is not retained, and end the threads.

        ``take_events`` calls what `later` was given meanwhile.
        """
        self.cancel()
        # What is being published decides whether its sinks are committed, and that takes a turn more.
        for _ in range(3):
            self._settle(self._io, take_events)
        self._abort_given_up(range(self._parts.graph.slots))
        ends = {JobState.ENDED: JobEnd.FINISHED, JobState.CANCELLED: JobEnd.CANCELLED}
        self._do(self._rules.over(ends.get(state, JobEnd.FAILED), _now()))
        keep = self._rules.completed
        self._cleaning.do(lambda: self._parts.storage.close(keep))
        for worker in (self._io, self._cleaning):
            self._settle(worker, take_events)
            worker.stop()
        for request in list(self._requests):
            self._answer(Answer(request, error=CheckpointError(f"the job is {state}")))

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

    def request(
        self, ask: Callable[[CheckpointCoordinator, int, Now], list[Decision]], answer: Future[Checkpoint]
    ) -> None:
        """Have a user's request carried out; ``answer`` gets what became of it."""
        number = len(self._requests) + max(self._requests, default=0) + 1
        self._requests[number] = answer
        if self._cancelled:
            self._answer(Answer(number, error=CheckpointError("the job is ending")))
        else:
            self._do(ask(self._rules, number, _now()))

    # ------------------------------------------------------------ carrying out

    def _do(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            self._do_one(decision)

    def _do_one(self, decision: Decision) -> None:
        match decision:
            case Trigger(barrier):
                self._planners.under_way(self._rules.in_progress)
                for slot in self._source_slots:
                    self._tell_slot(slot, TriggerCheckpoint(barrier))
            case Publish(checkpoint, location):
                self._publish(checkpoint, location)
            case CommitSinks(checkpoint, _):
                self._commit(checkpoint)
            case NotifyCompleted(number):
                self._tell_all(CheckpointCompleted(number))
                # What those that were given up before had written was in this one.
                self._given_up = [part for part in self._given_up if _holds_later(part, number)]
                for known in self._rules.completed:
                    if known.checkpoint == number:
                        self._planners.completed(known)
            case NotifyAborted(checkpoint, reason):
                logger.info("checkpoint %d is given up: %s", checkpoint, reason)
                self._tell_all(CheckpointAborted(checkpoint, files_stay=checkpoint in self._undecided))
            case Discard(old):
                keep = self._rules.completed
                self._cleaning.do(lambda: self._parts.storage.discard(old, keep))
            case DiscardParts(number, parts, location):
                keep = self._rules.completed
                # While the job goes on, the next checkpoint holds them.
                self._given_up += [part for part in parts if part.committables]
                self._cleaning.do(lambda: self._parts.storage.discard_parts(number, parts, keep, location))
            case FailJob(reason):
                self._happened(RestartRequested(reason))
            case RestoreFrom(number, checkpoint):
                self._restore(number, checkpoint)
            case Answer():
                self._answer(decision)
            case EndTasks(drain):
                self._happened(EndTasksRequested(drain))

    def _publish(self, checkpoint: Checkpoint, location: str) -> None:
        def work() -> None:
            try:
                sources = self._planners.capture(checkpoint.subtasks)
                # Here, behind the commit of the one before: no message is to be committed under two ids.
                subtasks = self._parts.committer.uncommitted(checkpoint.checkpoint, checkpoint.subtasks)
                whole = replace(checkpoint, sources=sources, subtasks=subtasks)
                published = self._parts.storage.publish(whole, location)
            except CheckpointError as error:
                reason = str(error)
                # Before anybody hears of it.
                self._decide([checkpoint.checkpoint])
                self._event(lambda now: self._rules.publish_failed(checkpoint.checkpoint, reason, now))
            else:
                self._event(lambda now: self._rules.published(published, now))

        self._io.do(work)

    def _decide(self, failed: Iterable[int]) -> None:
        """Find out which of the checkpoints that could not be published may be there; in the I/O thread.

        The order that is safe whenever the driver dies: first the metadata is gone for good, then messages of the
        checkpoint may be aborted (`ResetTasks`, `Committer.abort`), then its files are removed. If it dies before the
        first, a later job may find the checkpoint, and commits what nobody has aborted. While the metadata cannot be
        removed nothing else of this happens: messages and files stay, as that later job would need them.
        """
        undecided = self._parts.storage.undecided()
        for number, error in undecided.items():
            logger.error(
                "checkpoint %d could not be published, and may be there all the same, as its metadata cannot be "
                "removed; its files are left, and what sinks have written for it is not aborted: %s",
                number,
                error,
            )
        for number in {*failed, *self._undecided} - undecided.keys():
            self._parts.committer.never_published(number)
        self._undecided = frozenset(undecided)

    def _commit(self, checkpoint: Checkpoint) -> None:
        def work() -> None:
            try:
                self._parts.committer.commit(checkpoint.checkpoint, checkpoint.subtasks)
            except FTLayerError as error:
                reason = str(error)
                self._event(lambda now: self._rules.commit_failed(checkpoint.checkpoint, reason, now))
            else:
                self._event(lambda now: self._rules.committed(checkpoint.checkpoint, now))

        self._io.do(work)

    # ------------------------------------------------------------ restoring

    def _restore(self, number: int, checkpoint: Checkpoint | None) -> None:
        """Bring sinks and readers to where a checkpoint has them, and say what each slot begins with."""
        asked = self._asked.pop(number)
        readable = [known for known in self._rules.completed if known.checkpoint not in self._damaged]
        if checkpoint is not None and checkpoint.checkpoint in self._damaged:
            if not readable:
                error = CheckpointDamagedError(
                    f"checkpoint {checkpoint.checkpoint} cannot be read, and there is no other one; retained=2 or "
                    "more keeps an older one, and restore_from takes any checkpoint or savepoint by its path"
                )
                self._happened(RestoreFailed(number, error, lasting=True))
                return
            logger.error(
                "checkpoint %d is damaged: the job goes back to checkpoint %d; what sinks have committed since "
                "will be committed again",
                checkpoint.checkpoint,
                readable[-1].checkpoint,
            )
            checkpoint = readable[-1]
        chosen = checkpoint

        def work() -> None:
            try:
                self._decide(())
                made = self._prepared(chosen)
            except FTLayerError as error:
                lasting = isinstance(error, IncompatibleCheckpointError)
                self._happened(RestoreFailed(number, error, lasting))
                return
            self._later(lambda: self._restored(asked, chosen, made))

        self._io.do(work)

    def _prepared(self, checkpoint: Checkpoint | None) -> Mapping[int, Restore]:
        """Commit again what a checkpoint holds of sinks and is not known to be; in the I/O thread."""
        if checkpoint is None:
            return {}
        self._parts.committer.commit(checkpoint.checkpoint, checkpoint.subtasks)
        placed = replace(checkpoint, location=pieces_directory(checkpoint))
        found = restores(placed, self._parts.graph, allow_unclaimed=self._parts.config.allow_unclaimed_state)
        for dropped in found.dropped:
            logger.warning("checkpoint %d: %s", checkpoint.checkpoint, dropped)
        return found.by_slot

    def _abort_given_up(self, slots: Collection[int]) -> None:
        """Abort what tasks in ``slots``, which are gone, wrote for checkpoints that are none.

        (Survivors of their region abort their own as well.) Those of other regions go on, with what they wrote.
        """
        graph = self._parts.graph
        gone: list[SubtaskSnapshot] = []
        left: list[SubtaskSnapshot] = []
        for part in self._given_up:
            (gone if graph.slot_of(part.uid, part.subtask) in slots else left).append(part)
        self._given_up = left
        if gone:
            self._io.do(lambda: self._parts.committer.abort(gone))

    def _restored(
        self, asked: PrepareRestore, checkpoint: Checkpoint | None, made: Mapping[int, Restore]
    ) -> None:
        try:
            self._planners.restore(checkpoint, asked.slots)
        except FTLayerError as error:
            self._happened(RestoreFailed(asked.number, error, lasting=True))
            return
        self._do(self._rules.restored(checkpoint, _now()))
        mine = {slot: made[slot] for slot in asked.slots if slot in made}
        number = 0 if checkpoint is None else checkpoint.checkpoint
        self._abort_given_up(asked.slots)
        undecided = max(self._undecided, default=0)
        self._happened(RestoreReady(asked.number, number, mine, undecided))

    # ------------------------------------------------------------ small ones

    def _event(self, event: Callable[[Now], list[Decision]]) -> None:
        self._later(lambda: self._do(event(_now())))

    def _answer(self, answer: Answer) -> None:
        future = self._requests.pop(answer.request, None)
        if future is None:
            return
        if answer.checkpoint is not None:
            future.set_result(answer.checkpoint)
        else:
            future.set_exception(answer.error or CheckpointError("there is no checkpoint"))

    def _io_failed(self, error: Exception) -> None:
        if isinstance(error, CheckpointError):
            logger.warning("checkpoints: %s", error)
        else:
            logger.error("checkpoints failed in a way they never should", exc_info=error)

    def _settle(self, worker: Worker, take_events: Callable[[], None]) -> None:
        """Wait until a thread has done what it was given, and take what it says of it."""
        done = threading.Event()
        worker.do(done.set)
        if not done.wait(CLOSE_WAIT_S):
            logger.warning("the storage of checkpoints did not answer within %.0f s", CLOSE_WAIT_S)
        take_events()


def _holds_later(part: SubtaskSnapshot, checkpoint: int) -> bool:
    return any(committable.checkpoint > checkpoint for committable in part.committables)


def _now() -> Now:
    return Now(time.monotonic_ns() // 1_000_000, time.time_ns() // 1_000_000)
