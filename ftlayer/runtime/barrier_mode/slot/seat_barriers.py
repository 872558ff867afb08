"""One task's barriers: its handler, and what is known of its snapshots that are under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftlayer.checkpoint.handlers.contract import BarrierHandler
from ftlayer.checkpoint.handlers.making import make_handler
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.runtime.barrier_mode.slot.in_flight import CapturedChannel
from ftlayer.runtime.barrier_mode.task.contract import Checkpointed
from ftlayer.runtime.protocol.elements import Batch
from ftlayer.runtime.slot.feedback import HeadInbox
from ftlayer.runtime.slot.seat import Seat
from ftlayer.topology.job_graph import Channel


@dataclass(slots=True)
class Underway:
    """A snapshot that was begun, and whose records in flight are not all known.

    ``inputs``: those of the inputs are not; ``outputs``: nor those of these channels.
    """

    inputs: bool
    outputs: set[Channel]
    captured: list[CapturedChannel]
    start_delay_ms: int
    alignment_ms: int
    sync_ms: float
    unaligned: bool


@dataclass(slots=True, eq=False)
class SeatBarriers:
    """The barriers of one task. Sources have no handler.

    Attributes:
        seat: the task's.
        task: the task's part in checkpoints.
        handler: knows input channels by their place in ``channels``, which ``numbers`` has the other way round.
        captures: by channel, the batches that belong to the checkpoint whose barriers have not all come.
        underway: by checkpoint.
        snapshots, alignment_ms, start_delay_ms, in_flight: totals; the last one counts records.
    """

    seat: Seat
    task: Checkpointed
    handler: BarrierHandler | None
    channels: tuple[Channel, ...]
    numbers: dict[Channel, int]
    captures: dict[Channel, list[Batch]] = field(default_factory=dict)
    underway: dict[int, Underway] = field(default_factory=dict)
    snapshots: int = 0
    alignment_ms: int = 0
    start_delay_ms: int = 0
    in_flight: int = 0

    @classmethod
    def of(
        cls, seat: Seat, task: Checkpointed, config: CheckpointConfig, *, may_overtake: bool
    ) -> SeatBarriers:
        """Begin with no barriers. None come by the channels that lead back to the head of an iteration.

        ``may_overtake``: some may overtake records.
        """
        back = seat.inbox.feedback if isinstance(seat.inbox, HeadInbox) else ()
        channels = tuple(channel for channel in seat.inbox.channels if channel not in back)
        handler = make_handler(config.mode, may_overtake, len(channels)) if channels else None
        return cls(seat, task, handler, channels, {channel: place for place, channel in enumerate(channels)})
