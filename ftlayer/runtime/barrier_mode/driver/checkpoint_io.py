"""What may block of a job's checkpoints, in threads of its own: storage and sinks in one, removals in another.

All methods belong to the job's thread, and return at once, save `CheckpointIo.settle`. What comes of them is told as
events of the rules of checkpoints.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

from ftlayer.checkpoint.barrier import SnapshotKind
from ftlayer.checkpoint.coordinator.events import (
    CheckpointEvent,
    CommitFailed,
    Published,
    PublishFailed,
    SinksCommitted,
)
from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot
from ftlayer.checkpoint.storage.removing import sweep_earlier_runs
from ftlayer.checkpoint.storage.results import JobResult, put_result
from ftlayer.clock import system_now
from ftlayer.errors import CheckpointError, FTLayerError, StaleOwnerError
from ftlayer.recovery import lasting
from ftlayer.runtime.barrier_mode.driver.publishing import JobCheckpointParts, Publisher
from ftlayer.runtime.driver.events import Broken, Event
from ftlayer.runtime.worker import Worker

CLOSE_WAIT_S = 30.0
"""How long the end of a job waits for what is being published, committed and removed."""

logger = logging.getLogger(__name__)


class CheckpointIo:
    """See the module.

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
        happened: Callable[[Event], None],
        tell: Callable[[CheckpointEvent], None],
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

    # ------------------------------------------------------------ storage and sinks, in the order asked for

    def do(self, work: Callable[[], None]) -> None:
        """Have something done behind all that was asked for."""
        self._io.do(work)

    def publish(self, checkpoint: Checkpoint, location: str) -> None:
        """Publish a checkpoint: `Published` or `PublishFailed` follows."""

        def work() -> None:
            try:
                published = self.publisher.publish(checkpoint, location)
            except StaleOwnerError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, the rules wait for an answer
                self._tell(PublishFailed(checkpoint.checkpoint, _said(error), lasting(error)))
            else:
                self._tell(Published(published))

        self._io.do(work)

    def commit(self, checkpoint: Checkpoint) -> None:
        """Commit what a checkpoint holds of sinks: `SinksCommitted` or `CommitFailed` follows."""

        def work() -> None:
            try:
                self.publisher.commit(checkpoint)
            except StaleOwnerError:
                raise
            except Exception as error:  # noqa: BLE001 - as above
                self._tell(CommitFailed(checkpoint.checkpoint, _said(error), lasting(error)))
            else:
                self._tell(SinksCommitted(checkpoint.checkpoint))

        self._io.do(work)

    def abort(self, gone: Sequence[SubtaskSnapshot]) -> None:
        """Abort what these parts hold of sinks."""
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

    # ------------------------------------------------------------ removals

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
        """Remove what drivers before this one have left behind that were killed."""
        config, graph, run = self._parts.config, self._parts.graph, self._parts.run

        def work() -> None:
            if config.directory is not None:
                for path in sweep_earlier_runs(config.directory, graph.name, run, config.key):
                    logger.info("%s was left behind by a driver that is gone", path)

        self.clean(work)

    def discard(self, old: Checkpoint, keep: Sequence[Checkpoint]) -> None:
        """Remove a checkpoint, save what others need of it."""
        self.clean(lambda: self._parts.storage.discard(old, keep))

    def discard_parts(
        self, number: int, parts: Sequence[SubtaskSnapshot], keep: Sequence[Checkpoint], location: str
    ) -> None:
        """Remove parts of a checkpoint that was given up."""
        self.clean(lambda: self._parts.storage.discard_parts(number, parts, keep, location))

    # ------------------------------------------------------------ the end

    def settle(self, take_events: Callable[[], None]) -> None:
        """Wait until storage and sinks are done with what was asked for; ``take_events`` takes what is told of it."""
        self._settle(self._io, take_events)

    def close_storage(self, keep: Sequence[Checkpoint], take_events: Callable[[], None]) -> None:
        """Close the storage, and wait for both threads."""
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

    def _failed(self, error: Exception) -> None:
        if isinstance(error, StaleOwnerError):
            self._happened(Broken(error))
        elif isinstance(error, CheckpointError):
            logger.warning("checkpoints: %s", error)
        else:
            logger.error("checkpoints failed in a way they never should", exc_info=error)


def _said(error: Exception) -> str:
    """Return the reason to give; what should never have been raised is logged with where it comes from."""
    if isinstance(error, FTLayerError):
        return str(error)
    logger.error("checkpoints failed in a way they never should", exc_info=error)
    return f"{type(error).__name__}: {error}"
