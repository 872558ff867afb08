"""Barrier mode's rules in a slot: barriers go through its tasks, and slow ones are sent less at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.clock import Now
from ftlayer.records.ids import U64Array
from ftlayer.runtime.barrier_mode.slot.barriers import Barriers
from ftlayer.runtime.barrier_mode.slot.debloating import Debloating
from ftlayer.runtime.barrier_mode.slot.ports import CheckpointParts
from ftlayer.runtime.protocol.elements import Barrier, Element
from ftlayer.runtime.protocol.messages import (
    CheckpointAborted,
    CheckpointCompleted,
    EndTasks,
    FromSlot,
    TriggerCheckpoint,
)
from ftlayer.runtime.slot.mode import ModeAction, ModeEvent, SlotParts, misplaced
from ftlayer.runtime.slot.seat import Seat
from ftlayer.runtime.task.actions import DataEnded
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.topology.job_graph import Channel


class BarrierSlot:
    """`ftlayer.runtime.slot.mode.SlotMode` of a job with checkpoints."""

    def __init__(
        self, checkpoints: CheckpointParts, tell: Callable[[FromSlot], None], parts: SlotParts
    ) -> None:
        """``checkpoints`` has a part of each task of the slot; ``tell`` reaches the coordinator."""
        self.activity = 0
        self._tell = tell
        self._parts = parts
        self._barriers = Barriers(checkpoints, parts)
        self._debloating = _debloating(checkpoints.config, parts)
        self._final: int | None = None  # the checkpoint that the job ends with

    def handle(self, event: ModeEvent, now: Now) -> None:
        """See `SlotMode.handle`."""
        match event:
            case TriggerCheckpoint(barrier):
                self.activity += 1
                if barrier.final:
                    # What came behind it would be in no checkpoint.
                    self._final = barrier.checkpoint
                self._barriers.trigger(barrier, now)
            case CheckpointCompleted(checkpoint):
                self._barriers.completed(checkpoint)
            case CheckpointAborted(checkpoint):
                self.activity += 1
                if checkpoint == self._final:
                    self._final = None
                self._barriers.aborted(checkpoint, now)
            case EndTasks():
                self._barriers.end_sources(now)
            case _:
                raise misplaced(event)

    def act(self, seat: Seat, action: ModeAction, now_ms: int) -> None:
        """See `SlotMode.act`."""
        match action:
            case DataEnded():
                self._tell(action)
            case _:
                raise misplaced(action)

    # ------------------------------------------------------------ elements

    def arrived(self, channel: Channel, barrier: Barrier, size: int) -> None:
        """See `SlotMode.arrived`."""
        self._barriers.arrived(channel, barrier, size)

    def takes(self, seat: Seat, channel: Channel, mark: Element, now: Now) -> bool:
        """See `SlotMode.takes`."""
        return self._barriers.took(seat, channel, mark, now)

    def worked(self, seat: Seat, size: int, now_ms: int) -> None:
        """See `SlotMode.worked`."""
        if self._debloating is not None:
            self._debloating.worked(seat, size, now_ms)

    def source_ended(self, seat: Seat) -> None:
        """Tell the coordinator: the job's last checkpoint waits for the end of all sources."""
        self._tell(DataEnded(*seat.key))

    # ------------------------------------------------------------ time

    def before_turn(self, now: Now) -> None:
        """See `SlotMode.before_turn`."""
        self._barriers.settle(now)

    def on_time(self, now: Now) -> None:
        """Let barriers that have waited long enough overtake records, and see who is idle."""
        self._barriers.on_time(now)
        if self._debloating is not None:
            self._debloating.look(now.mono_ms)

    def rest(self, now_ms: int) -> None:
        """See `SlotMode.rest`."""

    @property
    def due_ms(self) -> int | None:
        """See `SlotMode.due_ms`."""
        return self._barriers.due_ms

    # ------------------------------------------------------------ peers

    def peers_dropped(self, slots: Collection[int], now: Now) -> None:
        """See `SlotMode.peers_dropped`."""

    def peers_back(self, slots: Collection[int], now: Now) -> None:
        """See `SlotMode.peers_back`."""

    # ------------------------------------------------------------ what is known of it

    def may_read(self, seat: Seat) -> bool:
        """See `SlotMode.may_read`."""
        return self._final is None

    def rows_wanted(self, key: TaskKey) -> int:
        """See `SlotMode.rows_wanted`."""
        return (
            self._parts.options.batch_rows if self._debloating is None else self._debloating.rows_wanted(key)
        )

    def unaccepted(self, key: TaskKey) -> tuple[int, ...]:
        """See `SlotMode.unaccepted`: rows are a source's own once they are read."""
        return ()

    @property
    def is_open(self) -> bool:
        """See `SlotMode.is_open`."""
        return self._parts.seating.is_reading

    @property
    def is_quiet(self) -> bool:
        """See `SlotMode.is_quiet`: snapshots are the coordinator's to wait for."""
        return True

    def counters(self) -> dict[str, int]:
        """See `Barriers.counters`."""
        return self._barriers.counters()

    def held_roots(self) -> list[U64Array]:
        """See `SlotMode.held_roots`: no record has roots."""
        return []


def _debloating(config: CheckpointConfig, parts: SlotParts) -> Debloating | None:
    if not config.debloating:
        return None
    return Debloating(parts.seating, parts.credit, config.debloat_target_ms, parts.options)
