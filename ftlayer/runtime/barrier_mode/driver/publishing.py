"""The work of checkpoints that may block: storage and sinks. It is done in one thread, in the order asked for."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ftlayer.checkpoint.coordinator.coordinator import CheckpointCoordinator
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint, Restore
from ftlayer.checkpoint.storage.contract import DriverStorage
from ftlayer.checkpoint.storage.layout import pieces_directory
from ftlayer.checkpoint.storage.ownership import Ownership
from ftlayer.errors import CheckpointStorageError
from ftlayer.runtime.barrier_mode.driver.committing import Committer, resealed
from ftlayer.runtime.barrier_mode.driver.letters import LetterPlaces
from ftlayer.runtime.barrier_mode.driver.reader_checkpoints import ReaderCheckpoints
from ftlayer.runtime.barrier_mode.driver.restoring import restores
from ftlayer.topology.job_graph import JobGraph

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
        except Exception:
            with contextlib.suppress(CheckpointStorageError):
                self.check_owner()
            raise


class Publisher:
    """Publishes checkpoints, commits their sinks, and prepares their restore.

    Attributes:
        undecided: checkpoints that could not be published, and may be there all the same. Read by other threads
            behind what was done.
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
