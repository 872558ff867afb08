"""What barrier mode asks of a task beside `ftlayer.runtime.task.contract`: its part in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.snapshots import SinkPart, SubtaskSnapshot
from ftlayer.checkpoint.storage.contract import PieceWriter
from ftlayer.clock import Now
from ftlayer.runtime.task.actions import Action
from ftlayer.runtime.task.contract import SinkBody


class PendingSnapshot(Protocol):
    """A task's snapshot between its synchronous part, which is over, and its end."""

    def write(self, writer: PieceWriter, cancelled: Callable[[], bool]) -> SubtaskSnapshot:
        """The asynchronous part; runs once, in another thread. ``channels`` and ``times`` are not filled in.

        Raises as `ftlayer.state.contract.Frozen.write`; any exception declines the checkpoint.
        """

    def release(self) -> None:
        """Give up what is kept for it; called once in the task's thread, behind `write` or in its place."""


class Checkpointed(Protocol):
    """One subtask's part in checkpoints; its methods belong to the task's thread.

    `TaskStart` restores what the task was made with. Barriers never come to it as elements.
    """

    def snapshot(self, barrier: Barrier, now: Now) -> tuple[list[Action], PendingSnapshot]:
        """The synchronous part. The actions come before the barrier on the task's outputs.

        (They are `Send`s of what had to be flushed.) The caller sends the barrier on to all outputs by itself.
        """

    def completed(self, checkpoint: int) -> None:
        """The checkpoint is complete, and its committables are committed."""

    def aborted(self, checkpoint: int) -> None:
        """The checkpoint was given up: the next one has to hold what it would have held."""

    def discard(self, stands: int, acked: int) -> None:
        """The task goes away before its end: close everything, abort what no checkpoint can hold.

        ``stands`` is the latest checkpoint that may stand, ``acked`` the latest that the task has acknowledged: it is
        in none behind that, and in no savepoint either.
        """


class CommittingSinkBody(SinkBody, Protocol):
    """A sink whose rows become visible with the checkpoint that holds them.

    ``refused``: how many rows its writer has refused so far. Any thread may look.
    """

    refused: int

    def precommit(self, checkpoint: int) -> Callable[[], SinkPart]:
        """Set aside the rows so far, and return what writes them (in another thread, once).

        It returns every committable that this subtask has not been told to be committed, this checkpoint's last, and
        the letters of rows that were refused on the way.
        """

    def completed(self, checkpoint: int) -> None:
        """All committables for checkpoints up to this one are committed, and their letters are kept."""

    def discard(self, restored: int) -> None:
        """Abort what was written for checkpoints behind ``restored``, and what is gathered."""
