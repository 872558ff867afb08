"""What slots and the driver need of the storage of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.pieces import Piece, Scope
from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot


class PieceWriter(Protocol):
    """Writes pieces of one slot's part of one checkpoint. For several threads at once.

    A piece may be referred to in a `SubtaskSnapshot` once `sync` returned after it was written.
    """

    def write(self, chunks: Iterable[bytes], scope: Scope = Scope.EXCLUSIVE) -> Piece:
        """Write one piece; small ones are inline.

        Raises `CheckpointStorageError`, and what ``chunks`` raises; nothing refers to what was written then.
        """

    def write_file(self, path: Path, scope: Scope = Scope.EXCLUSIVE) -> Piece:
        """Write a local file as one piece."""

    def sync(self) -> None:
        """Return when all that was written outlives this process and its machine (as the storage gives it)."""

    def close(self) -> None:
        """Nothing more is written for this checkpoint; syncs."""

    def discard(self) -> None:
        """The checkpoint is given up: remove what can be removed."""


class SlotStorage(Protocol):
    """The storage as one slot instance sees it. For several threads at once."""

    def writer(self, barrier: Barrier) -> PieceWriter:
        """Return the writer of a checkpoint or savepoint, the same at every call for one checkpoint."""

    def log_writer(self) -> PieceWriter:
        """Return a writer that belongs to no checkpoint, for changelogs: SHARED pieces, written ahead of barriers."""

    def open(self, location: str, piece: Piece) -> BinaryIO:
        """Open a piece for reading, checked against its digest; `CheckpointDamagedError` if it does not fit.

        ``location`` is the directory its path is relative to. What the slot has a local copy of is read from there.
        """

    def fetch(self, location: str, piece: Piece, path: Path) -> None:
        """Write a piece into a new local file; errors as `open`."""

    def completed(self, checkpoint: int) -> None:
        """The checkpoint is complete: local copies of older ones are not needed any more."""

    def aborted(self, checkpoint: int) -> None:
        """The checkpoint was given up: `PieceWriter.discard` for its writer, if there is one."""

    def close(self) -> None:
        """Close what is open; what no checkpoint refers to may be removed."""


class DriverStorage(Protocol):
    """The storage as the driver sees it: publishes, finds and removes whole checkpoints."""

    def publish(self, checkpoint: Checkpoint, location: str = "") -> Checkpoint:
        """Write the metadata, atomically; returns the checkpoint with its location.

        ``location``: directory of a savepoint. Raises `CheckpointStorageError`; then it is not there, or is not
        known to be there.
        """

    def completed(self, job: str) -> list[str]:
        """Return the locations of the checkpoints of a job (of all its runs), the latest first."""

    def load(self, location: str) -> Checkpoint:
        """Read a checkpoint or savepoint; `CheckpointDamagedError`, `CheckpointStorageError` if that cannot be."""

    def verify(self, checkpoint: Checkpoint) -> None:
        """Read everything that it refers to; `CheckpointDamagedError` names what is missing or does not fit."""

    def discard(self, checkpoint: Checkpoint, keep: Iterable[Checkpoint]) -> None:
        """Remove a checkpoint: its own files, and shared ones that none of ``keep`` refers to."""

    def discard_parts(
        self, checkpoint: int, parts: Iterable[SubtaskSnapshot], keep: Iterable[Checkpoint]
    ) -> None:
        """Remove what was written for a checkpoint that was given up."""

    def sweep(self, keep: Iterable[Checkpoint], is_alive: Callable[[str], bool]) -> Iterator[str]:
        """Remove files of this run that nobody refers to; yields their paths.

        ``is_alive(instance)``: whether an instance of a slot may still write.
        """

    def close(self, keep: Iterable[Checkpoint]) -> None:
        """The run is over: remove everything of it but ``keep``."""
