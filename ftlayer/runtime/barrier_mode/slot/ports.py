"""The way from barrier mode's rules in a slot to the storage of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import SnapshotTimes
from ftlayer.runtime.barrier_mode.slot.capture import CapturedChannel
from ftlayer.runtime.barrier_mode.task.contract import Checkpointed, PendingSnapshot
from ftlayer.runtime.task.contract import TaskKey


class Snapshots(Protocol):
    """The way of snapshots to the storage and the coordinator. Called in the loop's thread; nothing here waits.

    For each task and checkpoint: `begin`, then `captured`, each once at most and in this order (often in one turn of
    the loop). The subtask has acked when both `PendingSnapshot.write` and `CapturedChannel.write` of each channel
    are over and synced:

        snapshot = pending.write(writer, cancelled)                         # from `begin` on
        channels = tuple(channel.write(writer) for channel in captured)     # from `captured` on
        replace(snapshot, channels=channels, times=replace(times, async_ms=…, in_flight_bytes=…))

    `give_up` or `cancel` may come instead of `begin`, between the two, or behind both, also when everything is
    written: the last word then is that it was given up. The implementation owns the ``pending`` of each `begin`,
    and calls its `release` once in the loop's thread.
    """

    def stopwatch_ms(self) -> float:
        """Return milliseconds since any fixed moment, as exactly as the machine can: for ``sync_ms``."""

    def begin(self, key: TaskKey, barrier: Barrier, pending: PendingSnapshot) -> None:
        """The synchronous part is over and the barrier sent on: write ``pending``."""

    def captured(
        self, key: TaskKey, checkpoint: int, channels: tuple[CapturedChannel, ...], times: SnapshotTimes
    ) -> None:
        """All records in flight that belong to the checkpoint are known; mostly there are none.

        ``times`` lacks ``async_ms`` and ``in_flight_bytes`` (the length of what the channels wrote).
        """

    def give_up(self, key: TaskKey, checkpoint: int, reason: str) -> None:
        """The task cannot take its part: tell the coordinator. What was begun is cancelled."""

    def cancel(self, key: TaskKey, checkpoint: int) -> None:
        """The coordinator has given the checkpoint up. What was begun is cancelled; nothing to tell."""


@dataclass(frozen=True, slots=True)
class CheckpointParts:
    """What a slot works with in barrier mode.

    Attributes:
        config: as the user gave it.
        snapshots: the way to the storage.
        tasks: the part in checkpoints of each task of the slot.
    """

    config: CheckpointConfig
    snapshots: Snapshots
    tasks: Mapping[TaskKey, Checkpointed]
