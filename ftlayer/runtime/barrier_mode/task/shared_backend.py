"""A task's state backend, open as long as the task or a snapshot needs it."""

from __future__ import annotations

from collections.abc import Callable

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.storage.contract import PieceWriter
from ftlayer.state.contract import BackendSnapshot, CheckpointedBackend, Frozen


class SharedBackend:
    """A backend, and the snapshots of it that are being written. All methods belong to the task's thread.

    Another thread may be writing a snapshot when the task ends or is discarded: the backend is closed behind the last
    one.
    """

    def __init__(self, backend: CheckpointedBackend) -> None:
        self.backend = backend
        self.closed = False
        self._out = 0

    def freeze(self, barrier: Barrier, now_ms: int) -> _SharedFrozen:
        frozen = self.backend.freeze(barrier, now_ms)
        self._out += 1
        return _SharedFrozen(frozen, self._released)

    def close(self) -> None:
        """Close the backend as soon as no snapshot is out; once is enough."""
        if not self.closed:
            self.closed = True
            self._close_if_unused()

    def _released(self) -> None:
        self._out -= 1
        if self.closed:
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if not self._out:
            self.backend.close()


class _SharedFrozen:
    """A `Frozen` that tells when it is released."""

    def __init__(self, frozen: Frozen, released: Callable[[], None]) -> None:
        self._frozen = frozen
        self._released = released

    def write(self, writer: PieceWriter, cancelled: Callable[[], bool]) -> BackendSnapshot:
        return self._frozen.write(writer, cancelled)

    def release(self) -> None:
        self._frozen.release()
        self._released()
