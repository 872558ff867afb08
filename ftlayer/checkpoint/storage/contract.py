"""The interfaces of the storage of checkpoints, for slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.snapshots import Piece, Scope


class PieceWriter(Protocol):
    """Writes pieces of one slot's part of one checkpoint. For several threads at once.

    A piece may be referred to in a `SubtaskSnapshot` once `sync` returned after it was written.
    """

    def write(self, chunks: Iterable[bytes], scope: Scope = Scope.EXCLUSIVE, in_flight_of: str = "") -> Piece:
        """Write one piece; small ones are inline.

        ``in_flight_of``: the subtask of this slot ("uid/subtask", say) that these records in flight are of: they lie
        in a file which so many subtasks share as the options allow, and nothing else.

        Raises `CheckpointStorageError`, and what ``chunks`` raises; nothing refers to what was written then.
        """

    def wasteful(self, owner: str, pieces: Iterable[Piece]) -> set[str]:
        """Return the paths of shared files that are kept for too little, and whose pieces are better written anew.

        ``owner`` names who asks among all who write in this slot ("uid/subtask", say); ``pieces`` are all SHARED ones
        that it needs from now on. To be asked with every checkpoint.
        """

    def sync(self) -> None:
        """Return when all that was written outlives this process and its machine (as the storage gives it).

        On an object store this ends the files: call it once when everybody in the slot has written, not after
        every piece. A writer that has failed once raises that error for good.
        """

    def close(self) -> None:
        """Nothing more is written for this checkpoint; syncs."""

    def discard(self) -> None:
        """The checkpoint is given up: remove what can be removed."""


class SlotStorage(Protocol):
    """The storage as one slot instance sees it. For several threads at once.

    ``location``: the directory that paths of checkpoints' pieces are relative to (those of a savepoint are relative
    to the savepoint's); "" for driver memory. New checkpoints may refer to pieces of restored ones only if those
    lie in the same, or were brought there (`adopt`).
    """

    location: str

    def writer(self, barrier: Barrier) -> PieceWriter:
        """Return the writer of a checkpoint or savepoint, the same at every call for one checkpoint."""

    def log_writer(self) -> PieceWriter:
        """Return a writer that belongs to no checkpoint, for changelogs: SHARED pieces, written ahead of barriers.

        They are never inline. Each call returns another writer, whose `sync` is about what was written with it. After
        an error ask for a new one, and write again what was not synced. A file is kept while a completed checkpoint
        refers to it, and until all checkpoints that its pieces can be new in are complete or given up.
        """

    def open(self, location: str, piece: Piece) -> BinaryIO:
        """Open a piece for reading, checked against its digest; `CheckpointDamagedError` if it does not fit.

        ``location`` is the directory its path is relative to (`pieces_directory`, for inline ones too, since it says
        which key they are signed with). What the slot has a local copy of is read from there.
        """

    def fetch(self, location: str, piece: Piece, path: Path) -> None:
        """Write a piece into a new local file; errors as `open`."""

    def adopt(self, location: str, pieces: Sequence[Piece]) -> list[Piece] | None:
        """Return SHARED pieces of a restored checkpoint as new ones may refer to them; None: they are to be written.

        Those of an earlier run of the job have their files brought here by the storage itself, if it can. They share
        what is in them: where one is damaged, the other is.
        """

    def completed(self, checkpoint: int) -> None:
        """The checkpoint is complete: local copies of older ones are not needed any more."""

    def aborted(self, checkpoint: int) -> None:
        """The checkpoint was given up: `PieceWriter.discard` for its writer, if there is one."""

    def close(self, *, over: bool = False) -> None:
        """Close what is open; what no checkpoint refers to may be removed.

        ``over``: the job is over, so that local copies are of no use to the next instance.
        """
