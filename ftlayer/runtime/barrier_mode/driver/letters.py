"""A job's dead letters, as its driver carries them out: files, the vertex, and letters that come back.

The rules are `LetterOutbox` and `Readmission`; here their work is done by two threads, one for files and one for the
vertex. Nothing of it holds up a checkpoint, and nothing of it fails one: what cannot be done now is done later. All
public methods belong to the job's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.checkpoint.storage.dead_letters import LetterFiles, LettersInMemory, StoredLetters
from ftlayer.checkpoint.storage.layout import last_name, parent, part
from ftlayer.clock import system_now
from ftlayer.errors import (
    CheckpointDamagedError,
    CheckpointError,
    ConfigError,
    FTLayerError,
    StaleOwnerError,
)
from ftlayer.runtime.barrier_mode.driver.letter_calls import LetterCalls
from ftlayer.runtime.barrier_mode.driver.letter_targets import target_of
from ftlayer.runtime.barrier_mode.driver.outbox import (
    FIRST_PAUSE_MS,
    EmptyFile,
    ForgetBatch,
    FoundFile,
    LetterOutbox,
    OutboxWork,
    RemoveFile,
    SendFile,
    WriteFile,
)
from ftlayer.runtime.barrier_mode.driver.readmission import (
    AskRequeued,
    ConfirmLetters,
    Offered,
    Readmission,
    ReadmissionWork,
    ReturnToDead,
    SendLetters,
)
from ftlayer.runtime.driver.driver_mode import JobContext
from ftlayer.runtime.protocol.messages import Readmit
from ftlayer.runtime.worker import Worker
from ftlayer.topology.job_graph import JobGraph
from ftlayer.vertex.client.client import VertexClient

WRITE_WAIT_S = 30.0
"""How long the end of a job waits for letters to be written. They are in its last checkpoint alone before that."""

SEND_WAIT_S = 5.0
"""How long it waits for them to be sent then: what is left is done by the next driver, where there are files."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LetterPlaces:
    """Where a job's dead letters go: files, which ``found`` tells of, and the vertex, None where there is none."""

    files: LetterFiles
    found: tuple[FoundFile, ...] = ()
    vertex: VertexClient | None = None


def open_letters(config: CheckpointConfig, job: str, key: bytes, checkpoints: Sequence[str]) -> LetterPlaces:
    """Return a job's files of dead letters, with what is there; ``checkpoints`` are the locations of its checkpoints.

    Raises `CheckpointStorageError` for a directory that cannot be read.
    """
    if config.directory is None:
        return LetterPlaces(LettersInMemory())
    files = StoredLetters(config.directory, job, key)
    runs = {last_name(parent(location)) for location in checkpoints}
    found = tuple(
        FoundFile(file.name, file.letters, file.lasting or part(file.name.rpartition("-")[0]) in runs)
        for file in files.found()
    )
    return LetterPlaces(files, found)


def check_place(graph: JobGraph, config: CheckpointConfig, *, has_vertex: bool) -> None:
    """Raise `ConfigError` for a job whose records may die, and whose letters would be gone with its driver.

    Letters that are records of the topology (`DataStream.dead_letters`) need no place.
    """
    dying = [
        vertex.uid
        for vertex in graph.vertices
        if vertex.failures is not None and not graph.sends_letters(vertex.uid)
    ]
    if dying and config.directory is None and not has_vertex:
        raise ConfigError(
            f"failures, directory: a record that {dying[0]!r} gives up becomes a dead letter, and there is no place "
            "for it: without a directory checkpoints and letters are in the driver's memory. Give CheckpointConfig a "
            "directory, or the environment a vertex: board=FTLayer.connect(…); or let the letters of each chain go to "
            "dead_letters().sink(…), and say on_failure='fail' for its sinks"
        )


class JobLetters:
    def __init__(self, places: LetterPlaces, job: JobContext, check_owner: Callable[[], None]) -> None:
        """``check_owner`` raises `StaleOwnerError` once another driver has taken the job over."""
        self._graph, self._later, self._tell = job.graph, job.later, job.tell
        self._check_owner = check_owner
        self._files = places.files
        self._calls = (
            None
            if places.vertex is None
            else LetterCalls(places.vertex, job.graph.name, job.run, check_owner)
        )
        self._chains = tuple(vertex.uid for vertex in job.graph.vertices if vertex.failures is not None)
        self._outbox = LetterOutbox(
            job.run,
            has_vertex=self._calls is not None,
            files_stay=not isinstance(self._files, LettersInMemory),
        )
        self._outbox.found(places.found)
        self._slots = range(job.graph.slots)
        self._readmission = Readmission(self._slots)
        self._storage = Worker("letters", _failed)
        self._vertex = Worker("letters-vertex", _failed)
        self._under_way = 0
        self._is_heard = threading.Event()
        self._begun = self._closed = self._is_taken_over = False
        self._said_away = False

    # ------------------------------------------------------------ what is known

    @property
    def unsent(self) -> int:
        """Letters that wait to be sent to the vertex, or to be written where there is none. Any thread."""
        return self._outbox.unsent

    # ------------------------------------------------------------ checkpoints and tasks

    def to_publish(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint as it is to be published."""
        return self._readmission.to_publish(self._outbox.to_publish(checkpoint))

    def stands(self, checkpoint: Checkpoint, retained: Collection[Checkpoint]) -> None:
        """A checkpoint is complete, or was restored; see `retained`."""
        self._outbox.stands(checkpoint)
        self._readmission.stands(checkpoint)
        self.retained(retained)

    def retained(self, checkpoints: Collection[Checkpoint]) -> None:
        """The job may be restored from these."""
        self._outbox.retained(checkpoints)
        self._readmission.retained(checkpoints)
        self.tick()

    def down(self, slots: Collection[int]) -> None:
        """Tasks in these slots are gone."""
        self._readmission.down(slots)

    def running(self) -> None:
        """All tasks run."""
        self._readmission.up(self._slots)

    def ending(self) -> None:
        """The job comes to its end: nothing goes back into it any more."""
        self._readmission.ending()

    # ------------------------------------------------------------ work

    def tick(self) -> None:
        """Do what there is to be done now."""
        if self._closed or self._is_taken_over:
            return
        now_ms = system_now().mono_ms
        if self._calls is not None and self._chains:
            if not self._begun:
                self._begun = True
                self._do_in_vertex(lambda calls: calls.begin(self._chains), lambda _: None, lambda _: None)
            for asked in self._readmission.work(now_ms):
                self._ask(asked)
        for work in self._outbox.work(now_ms):
            self._do(work)

    def close(self, take_events: Callable[[], None], close_by_s: float | None) -> None:
        """The job is over: go on for a while with what is to be done, and end the threads. Behind `write_all`.

        ``take_events`` calls what `JobContext.later` was given meanwhile.
        """
        self.ending()
        wait_s = WRITE_WAIT_S if isinstance(self._files, LettersInMemory) else SEND_WAIT_S
        self._go_on(lambda: not self._under_way, take_events, wait_s, close_by_s)
        self._closed = True
        if self.unsent and self._calls is not None:
            self._say_what_is_unsent()
        self._storage.stop()
        self._vertex.stop()

    def write_all(self, take_events: Callable[[], None], close_by_s: float | None) -> bool:
        """The job is over: wait until all letters of its checkpoints are in files; returns whether they are.

        Before that the checkpoints have to stay: nothing else has the letters.
        """
        self.ending()

        def are_written() -> bool:
            # Another driver has what this one has left.
            return self._is_taken_over or not self._outbox.unwritten

        self._go_on(are_written, take_events, WRITE_WAIT_S, close_by_s)
        return are_written()

    def _go_on(
        self,
        is_enough: Callable[[], bool],
        take_events: Callable[[], None],
        wait_s: float,
        close_by_s: float | None,
    ) -> None:
        """Do what there is to be done until it is enough, or too late."""
        until = time.monotonic() + wait_s
        if close_by_s is not None:
            until = min(until, close_by_s)
        self.tick()
        while not is_enough() and (left_s := until - time.monotonic()) > 0:
            # A failed letter is tried again behind a pause, which ends without a message.
            self._is_heard.wait(min(left_s, FIRST_PAUSE_MS / 1_000))
            self._is_heard.clear()
            take_events()
            self.tick()

    def _say_what_is_unsent(self) -> None:
        if isinstance(self._files, LettersInMemory):
            logger.error(
                "%r: %d of its dead letters could not be sent to the vertex, and are lost with its driver's memory; "
                "with CheckpointConfig(directory=…) they would be in files",
                self._graph.name,
                self.unsent,
            )
        else:
            logger.warning(
                "%r: %d of its dead letters have not been sent to the vertex; they are in files beside its "
                "checkpoints, and its next start sends them",
                self._graph.name,
                self.unsent,
            )

    # ------------------------------------------------------------ the outbox

    def _do(self, work: OutboxWork) -> None:
        def done(_: object) -> None:
            self._outbox.done(work)

        def failed(error: FTLayerError) -> None:
            damaged = isinstance(error, CheckpointDamagedError)
            if damaged:
                logger.error("dead letters are left where they are: %s", error)
            self._outbox.failed(work, system_now().mono_ms, damaged=damaged)

        match work:
            case WriteFile(batch):
                self._do_in_files(lambda: self._files.write(batch), done, failed)
            case EmptyFile(name):
                self._do_in_files(lambda: self._files.empty(name), done, failed)
            case RemoveFile(name):
                self._do_in_files(lambda: self._files.remove(name), done, failed)
            case SendFile(name):
                self._do_in_vertex(lambda calls: calls.keep(name, self._files.read(name)), done, failed)
            case ForgetBatch(name):
                self._do_in_vertex(lambda calls: calls.forget(name), done, failed)

    # ------------------------------------------------------------ letters that come back

    def _ask(self, work: ReadmissionWork) -> None:
        def done(_: object) -> None:
            self._readmission.done()

        def failed(_: FTLayerError) -> None:
            self._readmission.failed(system_now().mono_ms)

        match work:
            case AskRequeued(after):
                self._do_in_vertex(lambda calls: self._offers(calls, after), self._take_offers, failed)
            case ConfirmLetters(keys):
                self._do_in_vertex(lambda calls: calls.readmitted(keys), done, failed)
            case ReturnToDead(keys, reason):
                self._do_in_vertex(lambda calls: calls.give_back(keys, reason), done, failed)

    def _offers(self, calls: LetterCalls, after: bytes) -> tuple[list[Offered], bytes]:
        letters, more = calls.requeued(after)
        return [Offered(key, letter, target_of(letter, self._graph)) for key, letter in letters], more

    def _take_offers(self, offers: tuple[list[Offered], bytes]) -> None:
        letters, more = offers
        for sent in self._readmission.offered(letters, more, system_now().mono_ms):
            self._send(sent)

    def _send(self, sent: SendLetters) -> None:
        self._tell(sent.slot, Readmit(sent.uid, sent.subtask, sent.letters))

    # ------------------------------------------------------------ threads

    def _do_in_files(
        self, work: Callable[[], T], done: Callable[[T], None], failed: Callable[[FTLayerError], None]
    ) -> None:
        def guarded() -> T:
            self._check_owner()
            return work()

        def not_done(error: FTLayerError) -> None:
            self._is_taken_over = self._is_taken_over or isinstance(error, StaleOwnerError)
            failed(error)

        self._run(self._storage, guarded, done, not_done)

    def _do_in_vertex(
        self,
        work: Callable[[LetterCalls], T],
        done: Callable[[T], None],
        failed: Callable[[FTLayerError], None],
    ) -> None:
        calls = self._calls
        assert calls is not None

        def away(error: FTLayerError) -> None:
            if not self._said_away:
                self._said_away = True
                logger.warning("dead letters wait for the vertex of %r: %s", self._graph.name, error)
            failed(error)

        def there(answer: T) -> None:
            self._said_away = False
            done(answer)

        self._run(self._vertex, lambda: work(calls), there, away)

    def _run(
        self,
        worker: Worker,
        work: Callable[[], T],
        done: Callable[[T], None],
        failed: Callable[[FTLayerError], None],
    ) -> None:
        """Have something done by a thread; what comes of it is heard in the job's thread."""

        def over(hear: Callable[[], None]) -> None:
            def heard() -> None:
                self._under_way -= 1
                hear()
                self.tick()

            self._later(heard)
            self._is_heard.set()

        def run() -> None:
            try:
                answer = work()
            except Exception as error:  # noqa: BLE001 - whatever it is, the rules wait for an answer
                said = _said(error)
                over(lambda: failed(said))
            else:
                over(lambda: done(answer))

        self._under_way += 1
        worker.do(run)


def _said(error: Exception) -> FTLayerError:
    if isinstance(error, FTLayerError):
        return error
    logger.error("dead letters failed in a way they never should", exc_info=error)
    return CheckpointError(f"{type(error).__name__}: {error}")


def _failed(error: Exception) -> None:
    logger.error("dead letters failed in a way they never should", exc_info=error)
