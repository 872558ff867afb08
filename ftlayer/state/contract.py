"""What a state backend is opened for, and what it gives for a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from ftlayer.checkpoint.snapshots import KeyedSnapshot, OperatorState
from ftlayer.checkpoint.storage.writer import PieceWriter


@dataclass(frozen=True, slots=True)
class BackendSnapshot:
    keyed: KeyedSnapshot | None
    operators: tuple[OperatorState, ...]


class Frozen(Protocol):
    """The state as it was at a barrier. `write` runs once, in any thread, while the task goes on."""

    def write(self, writer: PieceWriter, cancelled: Callable[[], bool]) -> BackendSnapshot:
        """Write the snapshot, in the order of freezes; raises `CheckpointStorageError`, `StateSerializationError`.

        `SnapshotCancelledError` once ``cancelled`` is true, which is looked at every few milliseconds.
        """

    def release(self) -> None:
        """Give up what is kept for it, whether it was written or not; called exactly once, in the task's thread."""


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
