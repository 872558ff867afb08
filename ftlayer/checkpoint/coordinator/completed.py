"""Completed checkpoints: how many are kept, and what becomes of them in the end.

Incremental checkpoints refer to one another's pieces, so that damage to one file may reach all that are retained. With
``retained`` 2 or more there is always a way back beside that: one more checkpoint is kept, the latest that shares
nothing with the latest one. So that there is one, and never an old one, every `FULL_EVERY`-th checkpoint is a full
one, and so is the second of a job that begins with nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from ftlayer.checkpoint.barrier import SnapshotKind
from ftlayer.checkpoint.coordinator.instructions import JobEnd
from ftlayer.checkpoint.options import CheckpointConfig, Retention
from ftlayer.checkpoint.pieces import Scope
from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot

_REMEMBERED = 16
# Of so many discarded checkpoints the pieces are known: a task that has missed so many completions cannot take part.

FULL_EVERY = 10
"""Where checkpoints build on one another and more than one is retained, every so many-th is a full one."""

_Place = tuple[str, int]
"""File and offset of a piece. Files say too little: one that a discarded checkpoint was in may be written on."""


class CompletedStore:
    """Checkpoints that the job may be restored from, the oldest first. Savepoints among them are never discarded."""

    def __init__(self, config: CheckpointConfig, known: Sequence[Checkpoint], *, claimed: bool) -> None:
        """``known`` are there from the beginning; they are discarded like the job's own ones if ``claimed``."""
        self._retained = config.retained
        self._retention = config.effective_retention
        self._is_lasting = config.directory is not None
        self._has_own = False
        self._checkpoints = sorted(known, key=lambda each: each.checkpoint)
        self._foreign = set() if claimed else {each.checkpoint for each in known}
        self._gone: deque[set[_Place]] = deque(maxlen=_REMEMBERED)
        self._builds = config.incremental or config.changelog
        self._since_full = 0

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        return tuple(self._checkpoints)

    @property
    def latest(self) -> Checkpoint | None:
        return self._checkpoints[-1] if self._checkpoints else None

    @property
    def needs_full(self) -> bool:
        """Whether the next checkpoint is to share nothing with those before."""
        if not self._builds or self._retained == 1 or not self._checkpoints:
            return False
        return self._since_full >= FULL_EVERY or self._spare() is None

    def add(self, checkpoint: Checkpoint, *, full: bool = False) -> None:
        """Take one that the job has completed. ``full``: it was written to share nothing with those before."""
        self._has_own = self._has_own or checkpoint.kind != SnapshotKind.SAVEPOINT
        self._insert(checkpoint)
        self._since_full = 1 if full else self._since_full + 1

    def _insert(self, checkpoint: Checkpoint) -> None:
        self._checkpoints.append(checkpoint)
        self._checkpoints.sort(key=lambda each: each.checkpoint)

    def subsume(self) -> list[Checkpoint]:
        """Forget what is more than is retained; returns what is to be discarded of it."""
        spare = self._spare()
        return self._forget([each for each in self._checkpoints[: -self._retained] if each is not spare])

    def _spare(self) -> Checkpoint | None:
        """Return the latest checkpoint that shares nothing with the latest one of all, where that is promised."""
        if self._retained == 1 or not self._checkpoints:
            return None
        *earlier, latest = self._checkpoints
        places = _shared(latest.subtasks)
        return next((each for each in reversed(earlier) if places.isdisjoint(_shared(each.subtasks))), None)

    def restored(self, checkpoint: Checkpoint | None) -> list[Checkpoint]:
        """The job was restored from this one: later ones do not stand any more. Returns what is to be discarded."""
        last = 0 if checkpoint is None else checkpoint.checkpoint
        dropped = self._forget([each for each in self._checkpoints if each.checkpoint > last])
        if checkpoint is not None and all(each.checkpoint != last for each in self._checkpoints):
            self._foreign.add(last)
            self._insert(checkpoint)
            self._since_full += 1
        return dropped

    def over(self, end: JobEnd) -> list[Checkpoint]:
        """The job is over; returns what is to be discarded."""
        if end is JobEnd.FINISHED:
            keep = False
        elif end is JobEnd.INTERRUPTED:
            keep = self._is_lasting
        elif end is JobEnd.CANCELLED:
            keep = self._retention is Retention.RETAIN_ON_CANCELLATION
        else:
            # Before a checkpoint of its own, it may be the restore that was refused: what was restored is the way back.
            keep = self._retention is not Retention.NO_EXTERNALIZED_CHECKPOINTS or not self._has_own
        return [] if keep else self._forget(list(self._checkpoints))

    def lacks_base(self, parts: Iterable[SubtaskSnapshot]) -> bool:
        """Whether parts of a new checkpoint refer to pieces that went with a discarded one.

        A task builds on the last checkpoint that it was told is complete. The news of the next one may reach it
        later than a barrier does, and meanwhile what it builds on may have been discarded.
        """
        places = _shared(parts)
        return any(not places.isdisjoint(gone) for gone in self._gone)

    def validate(self) -> None:
        """Raise `AssertionError` if what is known does not fit together; for tests."""
        numbers = [each.checkpoint for each in self._checkpoints]
        assert numbers == sorted(set(numbers)), f"completed checkpoints are {numbers}"
        assert self._foreign <= set(numbers), f"{self._foreign} are foreign, of {numbers}"

    def _forget(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        dropped = {each.checkpoint for each in checkpoints}
        self._checkpoints = [each for each in self._checkpoints if each.checkpoint not in dropped]
        discarded = [
            each
            for each in checkpoints
            if each.checkpoint not in self._foreign and each.kind != SnapshotKind.SAVEPOINT
        ]
        for each in discarded:
            kept = [part for left in self._checkpoints for part in left.subtasks]
            self._gone.append(_shared(each.subtasks) - _shared(kept))
        self._foreign -= dropped
        return discarded


def _shared(parts: Iterable[SubtaskSnapshot]) -> set[_Place]:
    return {
        (piece.path, piece.offset)
        for part in parts
        for piece in part.pieces()
        if piece.scope is Scope.SHARED and piece.inline is None
    }
