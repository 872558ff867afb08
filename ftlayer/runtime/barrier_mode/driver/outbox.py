"""What becomes of the dead letters of completed checkpoints: files first, and the vertex where there is one.

The letters that a checkpoint is the first to hold are one *batch*, named after the checkpoint's own run and number.
A batch goes on one step at a time, and each step may be done again after a crash:

    UNWRITTEN → `WriteFile` → WRITTEN → `SendFile` → KEPT → `EmptyFile` → EMPTY → `ForgetBatch` → FORGOTTEN

A file that is there is never written again, not even an emptied one, and the vertex takes the letters of one name
once. So whichever checkpoint is restored, each of its letters is among the dead once. What is not in a file yet
travels in the next checkpoint (`LetterOutbox.to_publish`), for the chains let go of letters once their checkpoint is
complete. An emptied file is removed when no checkpoint that may be restored names it.

Without a vertex a batch stays WRITTEN: the files are where the letters are. Where files are gone with their driver,
the vertex alone knows that it has the letters of a savepoint: it does not forget them. No I/O, no threads, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeAlias

from ftlayer.checkpoint.barrier import SnapshotKind
from ftlayer.checkpoint.letters import LetterBatch
from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot

# ---------------------------------------------------------------- what the outbox wants done


@dataclass(frozen=True, slots=True)
class WriteFile:
    batch: LetterBatch


@dataclass(frozen=True, slots=True)
class SendFile:
    """Have the vertex keep the letters of this file, under its name."""

    name: str


@dataclass(frozen=True, slots=True)
class EmptyFile:
    name: str


@dataclass(frozen=True, slots=True)
class ForgetBatch:
    """Let the vertex forget the name of this file, which is empty."""

    name: str


@dataclass(frozen=True, slots=True)
class RemoveFile:
    """Remove this file, which is empty, and which no checkpoint names."""

    name: str


StorageWork: TypeAlias = WriteFile | EmptyFile | RemoveFile
VertexWork: TypeAlias = SendFile | ForgetBatch
OutboxWork: TypeAlias = StorageWork | VertexWork

# ---------------------------------------------------------------- what it is told


@dataclass(frozen=True, slots=True)
class OutboxFile:
    """A file that was there when the driver began. ``restorable``: checkpoints of its run may be restored."""

    name: str
    letters: int
    restorable: bool


FIRST_PAUSE_MS = 500
MOST_PAUSE_MS = 60_000
"""Pauses behind what has failed: each is twice the one before, up to the second."""


class _Stage(IntEnum):
    UNWRITTEN = 0
    WRITTEN = 1
    KEPT = 2
    EMPTY = 3
    FORGOTTEN = 4


@dataclass(slots=True)
class _Entry:
    """A batch. ``letters`` is how many are to be written or sent; ``batch`` is there until the file is."""

    name: str
    stage: _Stage
    letters: int
    batch: LetterBatch | None = None
    is_restorable: bool = True
    is_lasting: bool = False
    is_damaged: bool = False


@dataclass(slots=True)
class _Lane:
    doing: OutboxWork | None = None
    failures: int = 0
    not_before_ms: int = 0


def batch_name(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.run}-{checkpoint.checkpoint}"


def named_batches(checkpoint: Checkpoint) -> list[LetterBatch]:
    """Return the batches of a checkpoint, those that it carries for earlier ones first."""
    own = tuple(letter for part in checkpoint.subtasks for letter in part.letters)
    lasting = checkpoint.kind == SnapshotKind.SAVEPOINT
    return [*checkpoint.letters, LetterBatch(batch_name(checkpoint), own, lasting)]


class LetterOutbox:
    """What it returns of `work` is to be answered by `done` or `failed`, each once."""

    def __init__(self, run: str, *, has_vertex: bool, files_stay: bool = True) -> None:
        """``run`` names this execution. ``files_stay`` False: another driver does not find this one's files."""
        self._run = run
        self._has_vertex = has_vertex
        self._files_stay = files_stay
        self._entries: dict[str, _Entry] = {}
        self._completed = 0
        self._knows_begin = False  # until then any file may be named by what is restored
        self._storage, self._vertex = _Lane(), _Lane()
        self.held_back: Collection[str] = ()
        """Files that are not to be sent now: some of their letters go back into the job."""

    # ------------------------------------------------------------ checkpoints

    def found(self, files: Iterable[OutboxFile]) -> None:
        """These files are there; to be told once, before anything else."""
        for file in files:
            stage = _Stage.WRITTEN if file.letters else self._when_empty
            self._entries[file.name] = _Entry(file.name, stage, file.letters, is_restorable=file.restorable)

    def to_publish(self, checkpoint: Checkpoint) -> Checkpoint:
        """Leave out letters that an earlier checkpoint was first to hold; carry those that no file holds yet."""
        parts = tuple(self._with_new_letters(part) for part in checkpoint.subtasks)
        carried = tuple(entry.batch for entry in self._entries.values() if entry.batch is not None)
        if checkpoint.kind == SnapshotKind.SAVEPOINT:
            self._is_in_savepoint(carried)
        return replace(checkpoint, subtasks=parts, letters=carried)

    def stands(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is complete, or was restored; it is as `to_publish` gave it."""
        self._completed = checkpoint.checkpoint
        for batch in named_batches(checkpoint):
            if batch.letters and batch.name not in self._entries:
                self._entries[batch.name] = _Entry(
                    batch.name, _Stage.UNWRITTEN, len(batch.letters), batch, is_lasting=batch.lasting
                )
        if checkpoint.kind == SnapshotKind.SAVEPOINT:
            self._is_in_savepoint(checkpoint.letters)
        self._knows_begin = True

    def retained(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Of this run the job may be restored from these, and savepoints. (Other runs may be a user's.)"""
        names = {batch.name for each in checkpoints for batch in named_batches(each)}
        for entry in self._entries.values():
            if entry.name.startswith(f"{self._run}-") and not entry.is_lasting:
                entry.is_restorable = entry.name in names

    # ------------------------------------------------------------ work

    def work(self, now_ms: int) -> list[OutboxWork]:
        """Return what is to be done now: one thing for the storage at a time, and one for the vertex."""
        found: list[OutboxWork] = []
        for lane, next_work in ((self._storage, self._for_storage), (self._vertex, self._for_vertex)):
            if lane.doing is None and now_ms >= lane.not_before_ms:
                lane.doing = next(
                    (work for entry in self._entries.values() if (work := next_work(entry))), None
                )
                if lane.doing is not None:
                    found.append(lane.doing)
        return found

    def done(self, work: OutboxWork) -> None:
        self._free(work).failures = 0
        entry = self._entries[_name_of(work)]
        match work:
            case WriteFile():
                entry.stage, entry.batch = _Stage.WRITTEN, None
            case SendFile():
                entry.stage, entry.letters = _Stage.KEPT, 0
            case EmptyFile():
                entry.stage = self._when_empty
            case ForgetBatch():
                entry.stage = _Stage.FORGOTTEN
            case RemoveFile():
                del self._entries[entry.name]

    def failed(self, work: OutboxWork, now_ms: int, *, damaged: bool = False) -> None:
        """This is not done, or nobody knows: it is done again after a pause. ``damaged``: not in this life."""
        lane = self._free(work)
        if damaged:
            self._entries[_name_of(work)].is_damaged = True
            return
        lane.not_before_ms = now_ms + min(MOST_PAUSE_MS, FIRST_PAUSE_MS << min(lane.failures, 10))
        lane.failures += 1

    # ------------------------------------------------------------ views

    @property
    def unwritten(self) -> int:
        """Letters that no file holds yet: they are in a checkpoint alone."""
        return sum(entry.letters for entry in self._entries.values() if entry.batch is not None)

    @property
    def unsent(self) -> int:
        """Letters that wait to be sent to the vertex, or to be written where there is none."""
        last = _Stage.WRITTEN if self._has_vertex else _Stage.UNWRITTEN
        return sum(entry.letters for entry in self._entries.values() if entry.stage <= last)

    def validate(self) -> None:
        for entry in self._entries.values():
            assert (entry.batch is not None) == (entry.stage is _Stage.UNWRITTEN), f"{entry}"
            assert self._has_vertex or entry.stage not in (_Stage.KEPT, _Stage.EMPTY), f"{entry}"

    # ------------------------------------------------------------ small ones

    @property
    def _when_empty(self) -> _Stage:
        return _Stage.EMPTY if self._has_vertex else _Stage.FORGOTTEN

    def _is_in_savepoint(self, batches: Iterable[LetterBatch]) -> None:
        """A savepoint carries these, which may be restored at any time."""
        for batch in batches:
            self._entries[batch.name].is_lasting = True

    def _for_storage(self, entry: _Entry) -> StorageWork | None:
        if entry.batch is not None:
            return WriteFile(entry.batch)
        if entry.stage is _Stage.KEPT:
            return EmptyFile(entry.name)
        is_over = entry.stage is _Stage.FORGOTTEN and not (entry.is_restorable or entry.is_lasting)
        return RemoveFile(entry.name) if is_over and self._knows_begin else None

    def _for_vertex(self, entry: _Entry) -> VertexWork | None:
        if not self._has_vertex or entry.is_damaged:
            return None
        if entry.stage is _Stage.WRITTEN:
            return None if entry.name in self.held_back else SendFile(entry.name)
        may_forget = self._files_stay or not entry.is_lasting
        return ForgetBatch(entry.name) if entry.stage is _Stage.EMPTY and may_forget else None

    def _free(self, work: OutboxWork) -> _Lane:
        lane = self._vertex if isinstance(work, VertexWork) else self._storage
        if lane.doing != work:
            raise ValueError(f"{work} is not being done")
        lane.doing = None
        return lane

    def _with_new_letters(self, part: SubtaskSnapshot) -> SubtaskSnapshot:
        if not part.letters:
            return part
        return replace(
            part, letters=tuple(letter for letter in part.letters if letter.checkpoint > self._completed)
        )


def _name_of(work: OutboxWork) -> str:
    return work.batch.name if isinstance(work, WriteFile) else work.name
