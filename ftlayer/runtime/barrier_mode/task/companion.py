"""Barrier mode beside a chain of functions: its state is tended, and nothing stirs behind the job's last barrier."""

from __future__ import annotations

from ftlayer.clock import Now
from ftlayer.runtime.barrier_mode.task.shared_backend import SharedBackend
from ftlayer.runtime.task.actions import Action, DataEnded, HoldInput

RETRY_MS = 100
"""How often a task that rests behind the last barrier looks whether that checkpoint was given up."""

LOOK_MS = 2
"""How often a task whose state is too much for memory looks whether there is room again."""


class BarrierCompanion:
    """`ftlayer.runtime.task.companion.ChainCompanion` of barrier mode.

    Attributes:
        backend: the chain's state; None: it keeps none.
        last_barrier: the checkpoint that the job ends with, once its barrier has passed. Behind it no timer of
            processing time fires, and nothing goes round a loop: what came of it would be in no checkpoint.
    """

    def __init__(
        self, uid: str, subtask: int, backend: SharedBackend | None, *, keeps_failed: bool = False
    ) -> None:
        """``keeps_failed``: records may wait in the chain, so that its own end is not that of its inputs."""
        self._uid = uid
        self._subtask = subtask
        self._keeps_failed = keeps_failed
        self.backend = backend
        self.last_barrier: int | None = None

    def opened(self) -> None:
        """Tell the backend that all states are declared."""
        if self.backend is not None:
            self.backend.backend.opened()

    def closed(self) -> None:
        """Close the backend behind the snapshots that are being written."""
        if self.backend is not None:
            self.backend.close()

    def reports(self) -> list[Action]:
        """Return nothing: the first failure was raised, and what was settled has no use."""
        return []

    def loop_ended(self) -> list[Action]:
        """Tell the coordinator: the job's last checkpoint waits for it, as for the end of a source's data.

        Where records may wait in the chain, `data_ended` does.
        """
        return [] if self._keeps_failed else [DataEnded(self._uid, self._subtask)]

    def data_ended(self) -> list[Action]:
        """Tell the coordinator, where records may have waited in the chain."""
        return [DataEnded(self._uid, self._subtask)] if self._keeps_failed else []

    def tend(self, records: int, now: Now) -> list[Action]:
        """Let the backend do its work beside; hold the input while there is no room for more state."""
        if self.backend is None or self.backend.closed:
            return []
        backend = self.backend.backend
        backend.tend(now.mono_ms, records)
        # Where a snapshot is in the way, it says so by no event.
        return [HoldInput(now.mono_ms + LOOK_MS)] if backend.is_full else []

    @property
    def rest_ms(self) -> int | None:
        return None if self.last_barrier is None else RETRY_MS
