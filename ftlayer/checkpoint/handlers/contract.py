"""The events of a barrier handler, and its decisions.

One handler serves one task with n input channels, which it knows by numbers from 0 to n-1. Its owner hands elements
of a channel to the task in their order, leaves blocked channels alone, and carries decisions out in their order,
before it hands on anything else. Times are wall-clock ms, as in `Barrier.started_ms`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ftlayer.checkpoint.barrier import Barrier


@dataclass(frozen=True, slots=True)
class BlockChannel:
    """Hand nothing more of this channel to the task."""

    channel: int


@dataclass(frozen=True, slots=True)
class Unblock:
    """Go on with this channel; what has waited comes first."""

    channel: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Take the task's snapshot now, and send ``barrier`` on to all its outputs (ahead of everything if UNALIGNED).

    ``alignment_ms``: time since the first barrier of this checkpoint was reached.
    ``start_delay_ms``: from the coordinator's beginning to the first barrier here.
    With an UNALIGNED barrier each of ``capture`` has records in front of its barrier: those that wait now belong to
    the checkpoint, and so do those that still come until the barrier does, or until `StopCapture`.
    """

    barrier: Barrier
    alignment_ms: int
    start_delay_ms: int
    capture: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StopCapture:
    """Nothing more of this channel belongs to the checkpoint: its barrier has come, or it has ended."""

    checkpoint: int
    channel: int


@dataclass(frozen=True, slots=True)
class AllBarriers:
    """The barrier has come on all channels: what was captured of an unaligned checkpoint is complete."""

    checkpoint: int
    alignment_ms: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """This checkpoint cannot be taken here: say so to the coordinator, and send `CancelMarker` to all outputs.

    If its snapshot was begun it is cancelled.
    """

    checkpoint: int
    reason: str


Decision = BlockChannel | Unblock | TakeSnapshot | StopCapture | AllBarriers | GiveUp


class BarrierHandler(Protocol):
    """Each checkpoint leads to one `TakeSnapshot` or one `GiveUp` at most; every channel is released."""

    def announced(self, channel: int, barrier: Barrier, now_ms: int) -> list[Decision]:
        """A barrier waits in a channel behind records that the task has not had yet.

        Told for every barrier of a remote or local channel when it arrives. An UNALIGNED one is not handed out again
        by `barrier`: its owner takes it out of the channel, it counts as come, and what was before it stays.
        """

    def barrier(self, channel: int, barrier: Barrier, now_ms: int) -> list[Decision]:
        """A barrier that is not UNALIGNED has come to its turn."""

    def cancelled(self, channel: int, checkpoint: int, now_ms: int) -> list[Decision]:
        """A `CancelMarker` has come to its turn."""

    def ended(self, channel: int, now_ms: int) -> list[Decision]:
        """The channel has ended; nothing comes on it any more. It counts as through for every checkpoint."""

    def aborted(self, checkpoint: int, now_ms: int) -> list[Decision]:
        """The coordinator has given this checkpoint up (and maybe all before it).

        No `GiveUp` follows, and no cancel marker need be sent.
        """

    def on_time(self, now_ms: int) -> list[Decision]:
        """Time has passed; early calls do no harm."""

    @property
    def due_ms(self) -> int | None:
        """When `on_time` has something to do; None: not foreseen."""
