"""The interface of a state backend that takes part in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.snapshots import KeyedSnapshot, OperatorState
from ftlayer.checkpoint.storage.writer import PieceWriter
from ftlayer.functions.keyed import KeyedState, OperatorStates, Timers


@dataclass(frozen=True, slots=True)
class BackendSnapshot:
    keyed: KeyedSnapshot | None
    operators: tuple[OperatorState, ...]


class Frozen(Protocol):
    """The state as it was at a barrier. `write` runs once, in any thread, while the task goes on."""

    def write(self, writer: PieceWriter, cancelled: Callable[[], bool]) -> BackendSnapshot:
        """Write the snapshot. Those of one backend are written one after the other, in the order of their freezes.

        Looks at ``cancelled`` every few milliseconds of work, and raises `SnapshotCancelledError` once it is true.
        Raises `CheckpointStorageError`, and `StateSerializationError` for a key or value that cannot be written.
        """

    def release(self) -> None:
        """Give up what is kept for it, whether it was written or not; called exactly once, in the task's thread."""


class CheckpointedBackend(Protocol):
    """State and timers of every operator of a subtask. Belongs to the task's thread, save what `Frozen` says.

    It is a `ftlayer.functions.keyed.Backend` too.
    """

    @property
    def copies(self) -> bool:
        """See `Backend`."""

    def state(self, uid: str) -> KeyedState:
        """Return the keyed state of an operator, the same at every call."""

    def timers(self, uid: str) -> Timers:
        """Return the timers of an operator, the same at every call."""

    def operators(self, uid: str) -> OperatorStates:
        """Return the operator state of an operator, the same at every call."""

    def opened(self) -> None:
        """All functions are open, and no record was handled: a state that is asked for from now on is not declared.

        `IncompatibleCheckpointError` for what the checkpoint's program declared, and this one does not.
        """

    def freeze(self, barrier: Barrier, now_ms: int = 0) -> Frozen:
        """The synchronous part of a snapshot: a few milliseconds at most. Several may be out at a time.

        ``now_ms``: processing time. Values with a time to live that are over by then may be left out; 0: none are.
        """

    def completed(self, checkpoint: int) -> None:
        """The checkpoint is complete: what it refers to stays, and later ones may build on it."""

    def aborted(self, checkpoint: int) -> None:
        """The checkpoint was given up: nothing may build on it."""

    @property
    def is_full(self) -> bool:
        """Whether the task is to take no input before `tend`, called now and then, has made room."""

    def tend(self, now_ms: int, handled: int = 0) -> None:
        """Called between two batches: merge layers, spill, write the changelog, where it is time.

        ``handled``: records that the task has handled since the last call.
        """

    def close(self) -> None:
        """Give everything up; local files are removed."""


@dataclass(frozen=True)
class BackendSpec:
    """The subtask that a backend is opened for.

    Attributes:
        first_group, end_group: its key groups, of ``max_parallelism``.
        keys: by operator uid, the types of its key columns: what key groups are computed from.
        directory: where an LMDB backend may make its directory; None: the system's for temporary files.
    """

    first_group: int
    end_group: int
    max_parallelism: int
    keys: Mapping[str, pa.Schema]
    directory: str | None = None


Table = MutableMapping[Any, Any]
