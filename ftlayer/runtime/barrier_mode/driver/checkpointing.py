"""Checkpoints of a job, as its driver carries them out.

The rules are `ftlayer.checkpoint.coordinator`'s; here its instructions become messages, files and commits, and what
comes of them becomes its events. All public methods belong to the job's thread, save what says otherwise.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import assert_never

from ftlayer.checkpoint.barrier import SnapshotKind
from ftlayer.checkpoint.coordinator import events
from ftlayer.checkpoint.coordinator.coordinator import CheckpointCoordinator
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint, Restore, SubtaskSnapshot
from ftlayer.checkpoint.storage.keys import Ownership
from ftlayer.checkpoint.storage.layout import new_savepoint, pieces_directory
from ftlayer.checkpoint.storage.loading import JobResult, put_result, sweep_earlier_runs
from ftlayer.checkpoint.storage.opening import DriverStorage
from ftlayer.common.clock import system_now
from ftlayer.common.printable import described, shown_url
from ftlayer.common.rules.restart import lasting
from ftlayer.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointStorageError,
    ConfigError,
    FTLayerError,
    JobError,
    JobStartError,
    StaleOwnerError,
    error_for_code,
)
from ftlayer.functions.failures import raise_signalled
from ftlayer.runtime.barrier_mode.driver.committing import Committer, GivenUp, resealed
from ftlayer.runtime.barrier_mode.driver.letters import JobLetters, LetterPlaces
from ftlayer.runtime.barrier_mode.driver.restoring import goes_back, restores
from ftlayer.runtime.barrier_mode.driver.rules.job_rules import BarrierJob, LoopWatch, regions_of
from ftlayer.runtime.barrier_mode.driver.rules.reader_checkpoints import ReaderCheckpoints
from ftlayer.runtime.driver.rules import events as job_events
from ftlayer.runtime.driver.rules.job_rules import DriverMode, JobContext
from ftlayer.runtime.driver.rules.job_status import PAUSED, WAITING, chains_with
from ftlayer.runtime.protocol import messages
from ftlayer.runtime.worker import Worker
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.operators import Source
from ftlayer.vertex.calls import CheckpointDetails, CheckpointTotals

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobCheckpointParts:
    """What a job's checkpoints are made of.

    ``run`` names the execution. ``rules`` are made with what the job may be restored from at its start. ``keys`` seal
    what the storage has, and what driver and slots have: the first is often beside the checkpoints. ``ownership``
    is this driver's claim to the directory, None for driver memory. ``gone_back`` is what to say where the latest
    checkpoint cannot be read, and an older one is restored at the start.
    """

    graph: JobGraph
    config: CheckpointConfig
    run: str
    rules: CheckpointCoordinator
    storage: DriverStorage
    keys: tuple[bytes, bytes] = field(repr=False)
    committer: Committer
    readers: ReaderCheckpoints
    letters: LetterPlaces
    ownership: Ownership | None = None
    gone_back: str = ""

    def check_owner(self) -> None:
        """Raise `StaleOwnerError` if another driver has taken the job over."""
        if self.ownership is not None:
            self.ownership.check()

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Raise as `check_owner`, also where what is done within fails as another driver takes over meanwhile.

        That one removes what nothing refers to yet, and commits what this one was about to.
        """
        self.check_owner()
        try:
            yield
        except BaseException as error:
            raise_signalled(error)
            with contextlib.suppress(CheckpointStorageError):
                self.check_owner()
            raise


class Publisher:
    """Publishes checkpoints, commits their sinks, and prepares their restore.

    ``undecided``: those that could not be published, and may be there all the same. Read by other threads.
    """

    def __init__(self, parts: JobCheckpointParts) -> None:
        self._parts = parts
        self.undecided: frozenset[int] = frozenset()

    def publish(self, checkpoint: Checkpoint, location: str) -> Checkpoint:
        """Write the metadata; returns what was written.

        Errors as `DriverStorage.publish`, and `StaleOwnerError`: then it is not there, or the driver that took
        over may have found it.
        """
        try:
            with self._parts.owned():
                sources = self._parts.readers.capture(checkpoint.subtasks)
                # Here, behind the commit of the one before: no message is to be committed under two ids.
                subtasks = self._parts.committer.uncommitted(checkpoint.checkpoint, checkpoint.subtasks)
                mine = replace(checkpoint, sources=sources, subtasks=subtasks)
                kept, own = self._parts.keys
                published = resealed(
                    self._parts.storage.publish(resealed(mine, own, kept), location), kept, own
                )
        except BaseException:
            # Before anybody hears of it.
            self._decide([checkpoint.checkpoint])
            raise
        # A driver that has looked for checkpoints before this one was there goes on without it, and commits others.
        self._parts.check_owner()
        return published

    def commit(self, checkpoint: Checkpoint) -> None:
        """Commit what a checkpoint holds; errors as `Committer.commit`, and `StaleOwnerError`."""
        with self._parts.owned():
            self._parts.committer.commit(checkpoint.checkpoint, checkpoint.subtasks)

    def prepare(self, checkpoint: Checkpoint | None) -> Mapping[int, Restore]:
        """Return what each slot begins with, once everything that a checkpoint holds of sinks is committed.

        Errors as `Committer.commit` and `restores`.
        """
        self._decide(())
        if checkpoint is None:
            return {}
        self.commit(checkpoint)
        placed = replace(checkpoint, location=pieces_directory(checkpoint))
        found = restores(placed, self._parts.graph, allow_unclaimed=self._parts.config.allow_unclaimed_state)
        for dropped in found.dropped:
            logger.warning("checkpoint %d: %s", checkpoint.checkpoint, dropped)
        return found.by_slot

    def _decide(self, failed: Iterable[int]) -> None:
        """Find out which of the checkpoints that could not be published may be there.

        The order that is safe whenever the driver dies: first the metadata is gone for good, then messages of the
        checkpoint may be aborted (`ResetTasks`, `Committer.abort`), then its files are removed. If it dies before the
        first, a later job may find the checkpoint, and commits what was not aborted. While the metadata cannot be
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
        for number in {*failed, *self.undecided} - undecided.keys():
            self._parts.committer.never_published(number)
        self.undecided = frozenset(undecided)


CLOSE_WAIT_S = 30.0
"""How long the end of a job waits for what is being published, committed and removed."""


class CheckpointIo:
    """What may block, in threads of its own: storage and sinks in one, removals in another.

    All methods belong to the job's thread, and return at once, save `settle`. What comes of them is told as events.

    Attributes:
        publisher: does the work of the first thread.
        close_by_s: what takes longer than until then, of the monotone clock, is left to itself (None: `CLOSE_WAIT_S` a
            step).
        result: how the job has ended; None before `keep_result`, and where there is no directory to keep it in.
    """

    def __init__(
        self,
        parts: JobCheckpointParts,
        *,
        happened: Callable[[job_events.Event], None],
        tell: Callable[[events.CheckpointEvent], None],
    ) -> None:
        """``happened`` takes an event for the rules of the job, ``tell`` one of checkpoints; both from any thread."""
        self._parts = parts
        self._happened, self._tell = happened, tell
        self._io = Worker("checkpoints", self._failed)
        self._cleaning = Worker("checkpoint-cleaning", self._failed)
        self._is_settled = True
        self.publisher = Publisher(parts)
        self.close_by_s: float | None = None
        self.result: JobResult | None = None

    def do(self, work: Callable[[], None]) -> None:
        self._io.do(work)

    def publish(self, checkpoint: Checkpoint, location: str) -> None:
        self._tell_of(
            lambda: events.Published(self.publisher.publish(checkpoint, location)),
            partial(events.PublishFailed, checkpoint.checkpoint),
        )

    def commit(self, checkpoint: Checkpoint) -> None:
        def work() -> events.CheckpointEvent:
            self.publisher.commit(checkpoint)
            return events.SinksCommitted(checkpoint.checkpoint)

        self._tell_of(work, partial(events.CommitFailed, checkpoint.checkpoint))

    def _tell_of(
        self,
        work: Callable[[], events.CheckpointEvent],
        failed: Callable[[str, FTLayerError | None], events.CheckpointEvent],
    ) -> None:
        def run() -> None:
            try:
                event = work()
            except StaleOwnerError:
                raise
            except BaseException as error:  # noqa: BLE001 - whatever it is, the rules wait for an answer
                raise_signalled(error)
                event = failed(_said(error), lasting(error))
            self._tell(event)

        self._io.do(run)

    def abort(self, gone: Sequence[SubtaskSnapshot]) -> None:
        self._io.do(lambda: self._parts.committer.abort(gone))

    def keep_result(self, completed: Sequence[Checkpoint]) -> None:
        """Keep how the job has ended, beside its checkpoints; ``completed`` are those that there are.

        Before they are removed: without either the job would be run again from its beginning.
        """
        last = max(completed, key=lambda each: each.checkpoint, default=None)

        def work() -> None:
            result = JobResult(
                self._parts.graph.name,
                self._parts.run,
                system_now().wall_ms,
                0 if last is None else last.checkpoint,
                last.location if last is not None and last.kind == SnapshotKind.SAVEPOINT else "",
            )
            self._parts.check_owner()
            put_result(self._parts.config, result)
            self.result = None if self._parts.config.directory is None else result

        self._io.do(work)

    def clean(self, work: Callable[[], None]) -> None:
        """Have something removed, unless another driver has taken over: it may go on with just that."""

        def guarded() -> None:
            self._parts.check_owner()
            work()

        self._cleaning.do(guarded)

    def sweep(self, keep: Sequence[Checkpoint], alive: Collection[str]) -> None:
        """Remove what instances have left behind that are not ``alive``."""

        def work() -> None:
            for path in self._parts.storage.sweep(keep, alive.__contains__):
                logger.info("%s was left behind by an instance that is gone", path)

        self.clean(work)

    def sweep_earlier_runs(self) -> None:
        config, graph, run = self._parts.config, self._parts.graph, self._parts.run

        def work() -> None:
            if config.directory is not None:
                for path in sweep_earlier_runs(config.directory, graph.name, run, config.key):
                    logger.info("%s was left behind by a driver that is gone", path)

        self.clean(work)

    def discard(self, old: Checkpoint, keep: Sequence[Checkpoint]) -> None:
        self.clean(lambda: self._parts.storage.discard(old, keep))

    def discard_parts(
        self, number: int, parts: Sequence[SubtaskSnapshot], keep: Sequence[Checkpoint], location: str
    ) -> None:
        self.clean(lambda: self._parts.storage.discard_parts(number, parts, keep, location))

    def settle(self, take_events: Callable[[], None]) -> None:
        self._settle(self._io, take_events)

    def close_storage(self, keep: Sequence[Checkpoint], take_events: Callable[[], None]) -> None:
        self.clean(lambda: self._parts.storage.close(keep))
        for worker in (self._io, self._cleaning):
            self._settle(worker, take_events)
        self._cleaning.stop()

    def when_done(self, done: Callable[[], None]) -> None:
        """Call ``done``: now, or by another thread where something was left to itself, behind that."""
        if self._is_settled:
            done()
        else:
            self._io.do(done)
        self._io.stop()

    def _settle(self, worker: Worker, take_events: Callable[[], None]) -> None:
        done = threading.Event()
        worker.do(done.set)
        left_s = CLOSE_WAIT_S
        if self.close_by_s is not None:
            left_s = min(left_s, max(0.0, self.close_by_s - time.monotonic()))
        if not done.wait(left_s):
            self._is_settled = False
            logger.warning(
                "what a sink commits, or the storage of checkpoints does, takes longer than %.1f s and is left to "
                "itself; a job that is restored commits again",
                left_s,
            )
        take_events()

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, StaleOwnerError):
            self._happened(job_events.Broken(error))
        elif isinstance(error, CheckpointError):
            logger.warning("checkpoints: %s", error)
        else:
            logger.error("checkpoints failed in a way they never should", exc_info=error)


def _said(error: BaseException) -> str:
    """Return the reason to give; what should never have been raised is logged with where it comes from."""
    if isinstance(error, FTLayerError):
        return str(error)
    logger.error("checkpoints failed in a way they never should", exc_info=error)
    return described(error)


class RestorePoints:
    """Answers `PrepareRestore` by `RestoreReady` or `RestoreFailed`. All methods belong to the job's thread."""

    def __init__(
        self,
        parts: JobCheckpointParts,
        io: CheckpointIo,
        *,
        happened: Callable[[job_events.Event], None],
        later: Callable[[Callable[[], None]], None],
        restored: Callable[[job_events.PrepareRestore, Checkpoint | None], None],
    ) -> None:
        """``restored`` is told of the checkpoint that stands, before the answer is given."""
        self._rules = parts.rules
        self._readers = parts.readers
        self._publisher = io.publisher
        self._io = io
        self._happened, self._later = happened, later
        self._tell_restored = restored
        self._asked: dict[int, job_events.PrepareRestore] = {}
        self._damaged: dict[int, str] = {}
        self._gone_back = parts.gone_back

    def ask(self, asked: job_events.PrepareRestore) -> None:
        """This is asked for; `restore` has to follow, once it is known what there is."""
        self._asked[asked.number] = asked

    def damaged(self, checkpoint: int, reason: str) -> None:
        self._damaged[checkpoint] = reason

    def restore(self, number: int, checkpoint: Checkpoint | None) -> None:
        asked = self._asked.pop(number)
        try:
            chosen = self._readable(checkpoint)
        except CheckpointDamagedError as error:
            self._happened(job_events.RestoreFailed(number, error, lasting=True))
            return

        def work() -> None:
            try:
                made = self._publisher.prepare(chosen)
            except FTLayerError as error:
                final = lasting(error)
                self._happened(job_events.RestoreFailed(number, final or error, lasting=final is not None))
                return
            except BaseException as error:
                raise_signalled(error)
                logger.error("a restore failed in a way it never should", exc_info=error)
                self._happened(job_events.RestoreFailed(number, JobError(described(error)), lasting=True))
                return
            self._later(lambda: self._restored(asked, chosen, made))

        self._io.do(work)

    def _readable(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """Return the checkpoint, or, if it is damaged, the latest one that is not known to be."""
        if checkpoint is None or checkpoint.checkpoint not in self._damaged:
            return checkpoint
        readable = [known for known in self._rules.completed if known.checkpoint not in self._damaged]
        if not readable:
            reasons = "; ".join(f"{number}: {reason}" for number, reason in sorted(self._damaged.items()))
            raise CheckpointDamagedError(
                f"there is no checkpoint that can be read: {reasons}; retained=2 or more keeps older ones, "
                "and restore_from takes any checkpoint or savepoint by its path"
            )
        reason = self._damaged[checkpoint.checkpoint]
        self._gone_back = goes_back(
            f"checkpoint {checkpoint.checkpoint} is damaged ({reason})", checkpoint, readable[-1]
        )
        return readable[-1]

    def _restored(
        self, asked: job_events.PrepareRestore, checkpoint: Checkpoint | None, made: Mapping[int, Restore]
    ) -> None:
        try:
            self._readers.restore(checkpoint, asked.slots)
        except FTLayerError as error:
            self._happened(job_events.RestoreFailed(asked.number, error, lasting=True))
            return
        self._tell_restored(asked, checkpoint)
        mine = {slot: made[slot] for slot in asked.slots if slot in made}
        number = 0 if checkpoint is None else checkpoint.checkpoint
        undecided = max(self._publisher.undecided, default=0)
        gone_back, self._gone_back = self._gone_back, ""
        self._happened(job_events.RestoreReady(asked.number, number, mine, undecided, gone_back))


class BarrierDriver(DriverMode[job_events.BarrierInstruction]):
    """See the module."""

    stopped_with: Checkpoint | None = None

    def __init__(self, parts: JobCheckpointParts, job: JobContext) -> None:
        super().__init__(job)
        self.rules = BarrierJob(job.crew, regions=regions_of(job.graph), run=job.run, restart=job.restart)
        self._loops = LoopWatch(job.graph)
        self._parts = parts
        self._coordinator, self._crew = parts.rules, job.crew
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
            parts, self._io, happened=job.happened, later=job.later, restored=self._restored
        )
        self._letters = JobLetters(parts.letters, job, parts.check_owner)
        self._requests = _Requests()
        self._cancelled = False
        self._ran = False

    @property
    def result(self) -> JobResult | None:
        return self._io.result

    @property
    def checkpoints(self) -> BarrierDriver:
        return self

    @property
    def checkpoint_counts(self) -> CheckpointTotals:
        return self._coordinator.counts

    @property
    def unsent_letters(self) -> int:
        return self._letters.unsent

    def history(self) -> tuple[CheckpointDetails, ...]:
        return self._coordinator.history(system_now())

    def before(self, said: job_events.Said) -> None:
        match said.message:
            case messages.SlotFailed(reason=reason, damaged=damaged) if damaged:
                self._restores.damaged(damaged, reason)

    def carry_out(self, instruction: job_events.BarrierInstruction) -> None:
        match instruction:
            case job_events.PrepareRestore():
                self._prepare(instruction)
            case job_events.RegionDeployed(slots):
                self._loops.began(slots)
                self._down.difference_update(slots)
            case job_events.AllRunning():
                self._running()
            case _:
                assert_never(instruction)

    def after(self, event: job_events.Event, state: job_events.JobState, now_ms: int) -> None:
        if state.is_final or state is job_events.JobState.STOPPING:
            self._cancel()
        elif isinstance(event, job_events.Said) and self._crew.slots[event.slot].is_instance(event.instance):
            self._said(event.message)
        self._handle(events.CheckpointTick())
        self._letters.tick()

    def _said(self, message: messages.FromSlot) -> None:
        match message:
            case messages.Heartbeat():
                slots = self._crew.slots
                self._handle(events.InputHeld(chains_with(PAUSED, slots)))
                for slot, waits in self._loops.waits_in(chains_with(WAITING, slots)):
                    self._tell(slot, waits)
            case messages.SubtaskAcked(checkpoint, snapshot):
                self._handle(events.PartWritten(checkpoint, snapshot))
            case messages.SubtaskDeclined(checkpoint, uid, subtask, reason, counts, code, lasting):
                final = error_for_code(code)(reason) if code else None
                if final is None and lasting and not self._coordinator.completed:  # nothing has succeeded yet
                    final = JobStartError(f"{uid!r}, subtask {subtask}, cannot do its part: {reason}")
                self._handle(events.PartDeclined(checkpoint, (uid, subtask), reason, counts, final))
            # Of an instance that is about to be reset it means nothing: the next one reads on from the checkpoint.
            case messages.DataEnded(uid, subtask) if (
                self._parts.graph.slot_of(uid, subtask) not in self._down
            ):
                self._handle(events.SubtaskFinished((uid, subtask)))

    def _prepare(self, asked: job_events.PrepareRestore) -> None:
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
        self._handle(events.TasksRestarting(asked.number, sources))

    def _running(self) -> None:
        if not self._ran:
            self._ran = True
            self._io.sweep_earlier_runs()
        self._io.sweep(self._coordinator.completed, self._crew.instances)
        self._letters.running()
        self._handle(events.TasksRunning())

    def backlog(self, source: str, working_off: bool) -> None:
        self._handle(events.BacklogChanged((source, 0), working_off))

    def _cancel(self) -> None:
        """The job is being ended: nothing begins any more. Calling it again does no harm."""
        if not self._cancelled:
            self._cancelled = True
            self._letters.ending()
            self._handle(events.JobStopping())

    def end(
        self,
        state: job_events.JobState,
        take_events: Callable[[], None],
        close_by_s: float | None,
        *,
        interrupted: bool,
    ) -> None:
        """Remove what is not retained (``interrupted``: see `JobEnd`), and end the threads; `when_done` has to follow.

        ``close_by_s`` None: what takes longer than `CLOSE_WAIT_S` a step is left to itself.
        """
        io = self._io
        io.close_by_s = close_by_s
        self._cancel()
        # What is being published decides whether its sinks are committed, and that takes a turn more.
        for _ in range(3):
            io.settle(take_events)
        self._abort_given_up(range(self._parts.graph.slots))
        # Before the result says that nothing is left to do, and before the checkpoints go that alone hold them.
        if not self._letters.write_all(take_events, close_by_s):
            logger.error(
                "dead letters of %r could not be written, so its last checkpoints stay where they are, whatever its "
                "retention says: started again with restore_from='latest' it writes them",
                self._parts.graph.name,
            )
            self._end(state, take_events, close_by_s)
            return
        if state is job_events.JobState.ENDED:
            io.keep_result(self._coordinator.completed)
            io.settle(take_events)
        if (
            state is job_events.JobState.ENDED
            and self.result is None
            and self._parts.config.directory is not None
        ):
            logger.error(
                "the result of %r could not be kept, so its last checkpoints stay where they are: started again with "
                "restore_from='latest' it finds nothing left to do",
                self._parts.graph.name,
            )
        else:
            self._remove_unretained(state, interrupted=interrupted)
        self._end(state, take_events, close_by_s)

    def _end(
        self, state: job_events.JobState, take_events: Callable[[], None], close_by_s: float | None
    ) -> None:
        self._letters.close(take_events, close_by_s)
        self._io.close_storage(self._coordinator.completed, take_events)
        self._requests.refuse_all(f"the job is {state}")

    def _remove_unretained(self, state: job_events.JobState, *, interrupted: bool) -> None:
        instructions = self._coordinator.handle(events.JobOver(_end_of(state, interrupted)), system_now())
        self._carry_out_all(instructions)
        if state is not job_events.JobState.ENDED and any(
            isinstance(each, events.Discard) for each in instructions
        ):
            # Behind the removal, which another driver's job is spared.
            self._io.clean(lambda: self._say_what_is_gone(state))

    def _say_what_is_gone(self, state: job_events.JobState) -> None:
        config = self._parts.config
        if config.directory is not None:
            logger.warning(
                "%r has %s, and its last checkpoint is removed, as retention=Retention.%s says: its next start begins "
                "anew, and transactional sinks get again what they have got",
                self._parts.graph.name,
                "been cancelled" if state is job_events.JobState.CANCELLED else state,
                config.effective_retention.name,
            )

    def when_done(self, done: Callable[[], None]) -> None:
        """Call ``done``: now, or by another thread where `close` has left something to itself, behind that."""
        self._io.when_done(done)

    def savepoint_location(self, directory: str) -> str:
        config = self._parts.config
        own = config.savepoint_directory or ""
        # A console knows of the configured one what is shown.
        where, shown = directory or own, shown_url(own)
        if own != shown and where.startswith(f"{shown}/"):
            where = own + where.removeprefix(shown)
        if not where:
            raise ConfigError(
                "savepoint: no directory is given (of a command --directory), and CheckpointConfig has no "
                "savepoint_directory; give one of them"
            )
        return new_savepoint(where, self._parts.run)

    def request(self, ask: Callable[[int], events.CheckpointEvent], answer: Future[Checkpoint]) -> None:
        """Have a user's request carried out, whose event ``ask`` makes by its number, and answered."""
        number = self._requests.add(answer)
        if self._cancelled:
            self._requests.refuse_all("the job is ending")
        else:
            self._handle(ask(number))

    def _handle(self, event: events.CheckpointEvent) -> None:
        self._carry_out_all(self._coordinator.handle(event, system_now()))

    def _carry_out_all(self, instructions: list[events.CheckpointInstruction]) -> None:
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, instruction: events.CheckpointInstruction) -> None:
        match instruction:
            case events.Trigger(barrier):
                if barrier.final:
                    # What came back behind it would be in no checkpoint.
                    self._letters.ending()
                self._parts.readers.under_way(self._coordinator.in_progress)
                for slot in self._source_slots:
                    self._tell(slot, messages.TriggerCheckpoint(barrier))
            case events.Publish(checkpoint, location):
                self._io.publish(self._letters.to_publish(checkpoint), location)
            case events.CommitSinks(checkpoint):
                self._io.commit(checkpoint)
            case events.NotifyCompleted(number):
                known = next(
                    (each for each in self._coordinator.completed if each.checkpoint == number), None
                )
                read = 0 if known is None else sum(part.read or 0 for part in known.subtasks)
                self._tell_all(messages.CheckpointCompleted(number, read))
                # What those that were given up before had written was in this one.
                self._given_up.completed(number)
                if known is not None:
                    self._parts.readers.completed(known)
                    self._letters.stands(known, self._coordinator.completed)
                    self._happened(job_events.CheckpointComplete(_condemned(known), read))
            case events.NotifyAborted(checkpoint, reason):
                logger.info("checkpoint %d is given up: %s", checkpoint, reason)
                self._tell_all(
                    messages.CheckpointAborted(
                        checkpoint, files_stay=checkpoint in self._io.publisher.undecided
                    )
                )
            case events.Discard(old):
                self._io.discard(old, self._coordinator.completed)
                self._letters.retained(self._coordinator.completed)
            case events.DiscardParts(number, parts, location):
                self._given_up.add(parts)
                self._io.discard_parts(number, parts, self._coordinator.completed, location)
            case events.FailJob(reason, final):
                self._happened(
                    job_events.RestartRequested(reason) if final is None else job_events.Broken(final)
                )
            case events.RestoreFrom(number, checkpoint):
                self._restores.restore(number, checkpoint)
            case events.Answer():
                self._requests.answer(instruction)
            case events.FinishTasks(drain):
                latest = self._coordinator.completed[-1]
                self.stopped_with = latest if latest.kind == SnapshotKind.SAVEPOINT else None
                self._happened(job_events.EndTasksRequested(drain))

    def _tell_all(self, message: messages.ToSlot) -> None:
        for slot in self._crew.slots:
            self._tell(slot.number, message)

    def _abort_given_up(self, slots: Collection[int]) -> None:
        """Abort what tasks in ``slots`` wrote for checkpoints that are none. Survivors abort their own."""
        slot_of = self._parts.graph.slot_of
        gone = self._given_up.take(lambda uid, subtask: slot_of(uid, subtask) in slots)
        if gone:
            self._io.abort(gone)

    def _restored(self, asked: job_events.PrepareRestore, checkpoint: Checkpoint | None) -> None:
        self._handle(events.TasksRestored(checkpoint))
        if checkpoint is not None:
            self._letters.stands(checkpoint, self._coordinator.completed)
        self._abort_given_up(asked.slots)

    def _later_handle(self, event: events.CheckpointEvent) -> None:
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

    def answer(self, answer: events.Answer) -> None:
        future = self._waiting.pop(answer.request, None)
        if future is None:
            return
        if answer.checkpoint is not None:
            future.set_result(answer.checkpoint)
        else:
            future.set_exception(answer.error or CheckpointError("there is no checkpoint"))

    def refuse_all(self, reason: str) -> None:
        for number in list(self._waiting):
            self.answer(events.Answer(number, error=CheckpointError(reason)))


def _condemned(checkpoint: Checkpoint) -> frozenset[tuple[str, bytes]]:
    return frozenset((part.uid, digest) for part in checkpoint.subtasks for digest in part.condemned)


def _end_of(state: job_events.JobState, interrupted: bool) -> events.JobEnd:
    if state is job_events.JobState.ENDED:
        return events.JobEnd.FINISHED
    if interrupted:
        # Though it may have failed: at Ctrl-C, PySpark cancels all Spark jobs before it interrupts the program.
        return events.JobEnd.INTERRUPTED
    return events.JobEnd.CANCELLED if state is job_events.JobState.CANCELLED else events.JobEnd.FAILED
