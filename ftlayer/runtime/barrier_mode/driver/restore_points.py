"""From the loss of tasks to what their next instances begin with: which checkpoint, its sinks, its readers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from ftlayer.checkpoint.snapshots import Checkpoint, Restore
from ftlayer.errors import CheckpointDamagedError, FTLayerError, JobError
from ftlayer.recovery import lasting
from ftlayer.runtime.barrier_mode.driver.checkpoint_io import CheckpointIo
from ftlayer.runtime.barrier_mode.driver.publishing import JobCheckpointParts
from ftlayer.runtime.driver.events import Event, PrepareRestore, RestoreFailed, RestoreReady

logger = logging.getLogger(__name__)


class RestorePoints:
    """Answers `PrepareRestore` by `RestoreReady` or `RestoreFailed`. All methods belong to the job's thread."""

    def __init__(
        self,
        parts: JobCheckpointParts,
        io: CheckpointIo,
        *,
        happened: Callable[[Event], None],
        later: Callable[[Callable[[], None]], None],
        restored: Callable[[PrepareRestore, Checkpoint | None], None],
    ) -> None:
        """``happened`` and ``later`` are `JobCheckpoints`'.

        ``restored`` is told of the checkpoint that stands, before the answer is given.
        """
        self._rules = parts.rules
        self._readers = parts.readers
        self._publisher = io.publisher
        self._io = io
        self._happened, self._later = happened, later
        self._tell_restored = restored
        self._asked: dict[int, PrepareRestore] = {}
        self._damaged: dict[int, str] = {}

    def ask(self, asked: PrepareRestore) -> None:
        """This is asked for; `restore` has to follow, once it is known what there is."""
        self._asked[asked.number] = asked

    def damaged(self, checkpoint: int, reason: str) -> None:
        """A slot could not read this checkpoint: it is not restored any more."""
        self._damaged[checkpoint] = reason

    def restore(self, number: int, checkpoint: Checkpoint | None) -> None:
        """Bring sinks and readers to where a checkpoint has them, and say what each slot begins with."""
        asked = self._asked.pop(number)
        try:
            chosen = self._readable(checkpoint)
        except CheckpointDamagedError as error:
            self._happened(RestoreFailed(number, error, lasting=True))
            return

        def work() -> None:
            try:
                made = self._publisher.prepare(chosen)
            except FTLayerError as error:
                final = lasting(error)
                self._happened(RestoreFailed(number, final or error, lasting=final is not None))
                return
            except Exception as error:
                logger.error("a restore failed in a way it never should", exc_info=error)
                self._happened(
                    RestoreFailed(number, JobError(f"{type(error).__name__}: {error}"), lasting=True)
                )
                return
            self._later(lambda: self._restored(asked, chosen, made))

        self._io.do(work)

    def _readable(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """Return the checkpoint, or, if it is damaged, the latest one that is not known to be."""
        if checkpoint is None or checkpoint.checkpoint not in self._damaged:
            return checkpoint
        readable = [known for known in self._rules.completed if known.checkpoint not in self._damaged]
        if not readable:
            raise CheckpointDamagedError(
                f"there is no checkpoint that can be read: {self._reasons()}; retained=2 or more keeps older ones, "
                "and restore_from takes any checkpoint or savepoint by its path"
            )
        logger.error(
            "checkpoint %d is damaged (%s): the job goes back to checkpoint %d; what sinks have committed since "
            "will be committed again",
            checkpoint.checkpoint,
            self._damaged[checkpoint.checkpoint],
            readable[-1].checkpoint,
        )
        return readable[-1]

    def _reasons(self) -> str:
        return "; ".join(f"{number}: {reason}" for number, reason in sorted(self._damaged.items()))

    def _restored(
        self, asked: PrepareRestore, checkpoint: Checkpoint | None, made: Mapping[int, Restore]
    ) -> None:
        try:
            self._readers.restore(checkpoint, asked.slots)
        except FTLayerError as error:
            self._happened(RestoreFailed(asked.number, error, lasting=True))
            return
        self._tell_restored(asked, checkpoint)
        mine = {slot: made[slot] for slot in asked.slots if slot in made}
        number = 0 if checkpoint is None else checkpoint.checkpoint
        undecided = max(self._publisher.undecided, default=0)
        self._happened(RestoreReady(asked.number, number, mine, undecided))
