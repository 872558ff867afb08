"""What barrier mode's rules in a slot want of tasks, of the storage of checkpoints, and of the coordinator.

For each task and checkpoint: `BeginSnapshot`, then `SnapshotCaptured`, each once at most and in this order (often
without another turn between). `GiveUpSnapshot` or `CancelSnapshot` may come instead of the first, between the two, or
behind both, also when everything is written: the last word then is that it was given up.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.handlers.making import TakeSnapshot
from ftlayer.checkpoint.snapshots import SnapshotTimes
from ftlayer.runtime.barrier_mode.slot.in_flight import CapturedChannel
from ftlayer.runtime.barrier_mode.task.mode import PendingSnapshot
from ftlayer.runtime.slot.events import ModeInstruction, ModeWork
from ftlayer.runtime.task.contract import TaskKey


@dataclass(frozen=True, slots=True)
class SnapshotWork(ModeWork):
    """The synchronous part of a task's snapshot."""

    decision: TakeSnapshot


@dataclass(frozen=True, slots=True)
class BeginSnapshot(ModeInstruction):
    """The synchronous part is over and the barrier sent on: write ``pending``, and release it at the end."""

    key: TaskKey
    barrier: Barrier
    pending: PendingSnapshot


@dataclass(frozen=True, slots=True)
class SnapshotCaptured(ModeInstruction):
    """All records in flight that belong to the checkpoint are known; mostly there are none.

    ``times`` lacks ``async_ms`` and ``in_flight_bytes`` (the length of what the channels wrote).
    """

    key: TaskKey
    checkpoint: int
    channels: tuple[CapturedChannel, ...]
    times: SnapshotTimes


@dataclass(frozen=True, slots=True)
class GiveUpSnapshot(ModeInstruction):
    """The task cannot take its part: tell the coordinator. What was begun is cancelled."""

    key: TaskKey
    checkpoint: int
    reason: str


@dataclass(frozen=True, slots=True)
class CancelSnapshot(ModeInstruction):
    """The coordinator has given the checkpoint up. What was begun is cancelled; nothing to tell."""

    key: TaskKey
    checkpoint: int


@dataclass(frozen=True, slots=True)
class ReleaseSnapshot(ModeInstruction):
    """Nothing of a snapshot is needed any more."""

    key: TaskKey
    checkpoint: int


@dataclass(frozen=True, slots=True)
class KeepFiles(ModeInstruction):
    """The checkpoint is complete: its files stay."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class DropFiles(ModeInstruction):
    """The checkpoint was given up, and nothing else needs its files."""

    checkpoint: int
