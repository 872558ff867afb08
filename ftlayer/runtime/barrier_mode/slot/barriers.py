"""Barriers in a slot: what its tasks' handlers decide is carried out here.

As in the core, nothing here waits, and time comes in with the calls.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ftlayer.checkpoint.barrier import Alignment, Barrier
from ftlayer.checkpoint.handlers.contract import (
    AllBarriers,
    BlockChannel,
    Decision,
    GiveUp,
    StopCapture,
    TakeSnapshot,
    Unblock,
)
from ftlayer.checkpoint.snapshots import SnapshotTimes
from ftlayer.clock import Now
from ftlayer.runtime.barrier_mode.slot.capture import CapturedChannel
from ftlayer.runtime.barrier_mode.slot.ports import CheckpointParts
from ftlayer.runtime.barrier_mode.slot.seat_barriers import SeatBarriers, Underway
from ftlayer.runtime.barrier_mode.task.contract import PendingSnapshot
from ftlayer.runtime.protocol.elements import CancelMarker, Element, EndOfStream
from ftlayer.runtime.protocol.messages import EndTasks
from ftlayer.runtime.slot.feedback import FeedbackOutput
from ftlayer.runtime.slot.mode import SlotParts
from ftlayer.runtime.slot.outputs import RemoteOutput
from ftlayer.runtime.slot.seat import Seat
from ftlayer.runtime.task.actions import Action
from ftlayer.topology.job_graph import Channel


@dataclass(frozen=True, slots=True)
class _Arrived:
    mine: SeatBarriers
    channel: Channel
    barrier: Barrier
    credit: int


class Barriers:
    """The barriers of all tasks of a slot.

    A barrier that arrives is put into its channel, and its handler is told with the next `settle`: barriers run
    through the tasks of one slot one after another, not inside each other.
    """

    def __init__(self, checkpoints: CheckpointParts, parts: SlotParts) -> None:
        """``checkpoints`` has a part of each task of the slot."""
        self._graph = parts.graph
        self._codec = parts.codec
        self._outgoing = parts.outgoing
        self._snapshots = checkpoints.snapshots
        self._credit = parts.credit
        self._run = parts.run
        self._run_part = parts.run_part
        seating = parts.seating
        self._all = [
            SeatBarriers.of(seat, checkpoints.tasks[key], checkpoints.config)
            for key, seat in seating.seats.items()
        ]
        self._of_seat = {mine.seat.key: mine for mine in self._all}
        self._receivers = {channel: self._of_seat[seat.key] for channel, seat in seating.receivers.items()}
        self._arrived: deque[_Arrived] = deque()
        self._due_ms: int | None = None  # of handlers, monotone

    # ------------------------------------------------------------ the coordinator

    def trigger(self, barrier: Barrier, now: Now) -> None:
        """Let every source take its snapshot and send a barrier, whether it has more rows or not."""
        for mine in self._all:
            if mine.seat.is_source and not mine.seat.ended:
                delay = max(0, now.wall_ms - barrier.started_ms)
                self._take_snapshot(mine, TakeSnapshot(barrier, 0, delay), now)
        self.settle(now)

    def completed(self, checkpoint: int) -> None:
        """Tell all tasks."""
        for mine in self._all:
            if not mine.seat.ended:
                mine.task.completed(checkpoint)

    def aborted(self, checkpoint: int, now: Now) -> None:
        """A checkpoint is given up: forget it, and go on with what it held up."""
        for mine in self._all:
            if mine.seat.ended:
                continue
            if mine.handler is not None:
                self._carry_out(mine, mine.handler.aborted(checkpoint, now.wall_ms), now)
            self._forget(mine, checkpoint)
            self._snapshots.cancel(mine.seat.key, checkpoint)
            mine.task.aborted(checkpoint)
        self._outgoing.forget_late(checkpoint)
        self.settle(now)

    def end_sources(self, now: Now) -> None:
        """Everything is committed: the sources end their streams."""
        for mine in self._all:
            if mine.seat.is_source and not mine.seat.ended:
                self._run(mine.seat, EndTasks(), now)

    # ------------------------------------------------------------ elements

    def arrived(self, channel: Channel, barrier: Barrier, credit: int) -> None:
        """A barrier was put into the inbox of its receiver; ``credit`` is what it has used."""
        self._arrived.append(_Arrived(self._receivers[channel], channel, barrier, credit))

    def settle(self, now: Now) -> None:
        """Tell handlers of what has arrived, and note what has left."""
        while self._arrived:
            here = self._arrived.popleft()
            mine, channel, barrier = here.mine, here.channel, here.barrier
            assert mine.handler is not None
            number = mine.numbers[channel]
            self._carry_out(mine, mine.handler.announced(number, barrier, now.wall_ms), now)
            if barrier.alignment is Alignment.UNALIGNED:
                mine.seat.inbox.take_out(channel, barrier)
                if here.credit:
                    self._credit.give_back(channel, here.credit, now.mono_ms)
        for departed in self._outgoing.take_departed():
            channel = departed.channel
            edge = self._graph.edges[channel.edge]
            mine = self._of_seat[edge.source, channel.sender]
            underway = mine.underway.get(departed.checkpoint)
            if underway is not None:
                underway.outputs.discard(channel)
                self._add_outgoing(underway, channel, departed.overtaken)
                self._look(mine, departed.checkpoint)

    def took(self, seat: Seat, channel: Channel, mark: Element, now: Now) -> bool:
        """A mark has come to its turn; whether it was for the handler, and not for the task."""
        mine = self._of_seat[seat.key]
        if mine.handler is None or not isinstance(mark, Barrier | CancelMarker | EndOfStream):
            return False
        number = mine.numbers[channel]
        match mark:
            case Barrier():
                decisions = mine.handler.barrier(number, mark, now.wall_ms)
            case CancelMarker(checkpoint):
                decisions = mine.handler.cancelled(number, checkpoint, now.wall_ms)
            case EndOfStream():
                # Before the task hears of it: a task that has ended can send no barrier any more.
                decisions = mine.handler.ended(number, now.wall_ms)
        self._carry_out(mine, decisions, now)
        self.settle(now)
        return not isinstance(mark, EndOfStream)

    # ------------------------------------------------------------ time

    def on_time(self, now: Now) -> None:
        """Let barriers that have waited long enough overtake records."""
        if self._due_ms is not None and self._due_ms <= now.mono_ms:
            for mine in self._all:
                if mine.handler is not None and mine.handler.due_ms is not None:
                    self._carry_out(mine, mine.handler.on_time(now.wall_ms), now)
            self._look_at_clocks(now)
        self._outgoing.overtake_late(now.mono_ms)
        self.settle(now)

    @property
    def due_ms(self) -> int | None:
        """When `on_time` has something to do (monotone, ms)."""
        dues = (self._due_ms, self._outgoing.late_due_ms)
        return min((due for due in dues if due is not None), default=None)

    def _look_at_clocks(self, now: Now) -> None:
        dues = [mine.handler.due_ms for mine in self._all if mine.handler is not None]
        due_ms = min((due for due in dues if due is not None), default=None)
        # Handlers go by the wall clock.
        self._due_ms = None if due_ms is None else now.mono_ms + due_ms - now.wall_ms

    # ------------------------------------------------------------ what is known of it

    def counters(self) -> dict[str, int]:
        """Return totals by name, all of them and by chain (``…/<uid>``); may be called by any thread.

        ``snapshots`` taken, ``alignment_ms`` and ``start_delay_ms`` of all of them together (as in `SnapshotTimes`),
        and ``in_flight_records`` that became part of one.
        """
        counters: dict[str, int] = {}
        for mine in self._all:
            for name, count in (
                ("snapshots", mine.snapshots),
                ("alignment_ms", mine.alignment_ms),
                ("start_delay_ms", mine.start_delay_ms),
                ("in_flight_records", mine.in_flight),
            ):
                for key in (name, f"{name}/{mine.seat.uid}"):
                    counters[key] = counters.get(key, 0) + count
        return counters

    # ------------------------------------------------------------ decisions

    def _carry_out(self, mine: SeatBarriers, decisions: list[Decision], now: Now) -> None:
        inbox = mine.seat.inbox
        for decision in decisions:
            match decision:
                case BlockChannel(number):
                    inbox.block(mine.channels[number])
                case Unblock(number):
                    inbox.unblock(mine.channels[number])
                case TakeSnapshot():
                    self._take_snapshot(mine, decision, now)
                case StopCapture(_, number):
                    inbox.stop_capture(mine.channels[number])
                case AllBarriers(checkpoint, alignment_ms):
                    self._complete_inputs(mine, checkpoint, alignment_ms)
                case GiveUp(checkpoint, reason):
                    self._give_up(mine, checkpoint, reason, now)
        self._look_at_clocks(now)

    def _take_snapshot(self, mine: SeatBarriers, decision: TakeSnapshot, now: Now) -> None:
        barrier, seat = decision.barrier, mine.seat
        pending: list[PendingSnapshot] = []

        def work() -> list[Action]:
            actions, frozen = mine.task.snapshot(barrier, now)
            pending.append(frozen)
            return actions

        began_ms = self._snapshots.stopwatch_ms()
        self._run_part(seat, work, now)
        for number in decision.capture:
            channel = mine.channels[number]
            mine.captures[channel] = seat.inbox.capture(channel, barrier.checkpoint)
        unaligned = barrier.alignment is Alignment.UNALIGNED
        underway = Underway(
            inputs=unaligned and mine.handler is not None,
            outputs=set(),
            captured=[],
            start_delay_ms=decision.start_delay_ms,
            alignment_ms=decision.alignment_ms,
            sync_ms=0.0,
            unaligned=unaligned,
        )
        mine.underway[barrier.checkpoint] = underway
        self._send_on(seat, barrier, underway, now)
        underway.sync_ms = self._snapshots.stopwatch_ms() - began_ms
        self._snapshots.begin(seat.key, barrier, pending[0])
        self._look(mine, barrier.checkpoint)

    def _send_on(self, seat: Seat, barrier: Barrier, underway: Underway, now: Now) -> None:
        for channel, output in seat.outputs.items():
            if isinstance(output, RemoteOutput):
                overtaken = self._outgoing.send_barrier(output, barrier, now)
                if overtaken is None:
                    underway.outputs.add(channel)
                else:
                    self._add_outgoing(underway, channel, overtaken)
            elif not isinstance(output, FeedbackOutput):
                output.send(barrier, now.mono_ms)
                self.arrived(channel, barrier, 0)

    def _give_up(self, mine: SeatBarriers, checkpoint: int, reason: str, now: Now) -> None:
        self._forget(mine, checkpoint)
        self._snapshots.give_up(mine.seat.key, checkpoint, reason)
        for output in mine.seat.outputs.values():
            if isinstance(output, RemoteOutput):
                self._outgoing.send(output, CancelMarker(checkpoint), now.mono_ms)
            else:
                output.send(CancelMarker(checkpoint), now.mono_ms)

    def _forget(self, mine: SeatBarriers, checkpoint: int) -> None:
        underway = mine.underway.pop(checkpoint, None)
        if underway is not None and underway.inputs:
            self._stop_captures(mine)

    # ------------------------------------------------------------ records in flight

    def _complete_inputs(self, mine: SeatBarriers, checkpoint: int, alignment_ms: int) -> None:
        underway = mine.underway.get(checkpoint)
        if underway is None or not underway.inputs:
            return
        for channel, batches in mine.captures.items():
            parts = tuple(batch for batch in batches if batch.num_rows)
            if parts:
                edge = self._graph.edges[channel.edge]
                underway.captured.append(CapturedChannel(edge, channel, False, parts, self._codec))
        self._stop_captures(mine)
        underway.inputs, underway.alignment_ms = False, alignment_ms
        self._look(mine, checkpoint)

    def _stop_captures(self, mine: SeatBarriers) -> None:
        for channel in mine.captures:
            mine.seat.inbox.stop_capture(channel)
        mine.captures = {}

    def _add_outgoing(self, underway: Underway, channel: Channel, frames: tuple[bytes, ...]) -> None:
        if frames:
            edge = self._graph.edges[channel.edge]
            underway.captured.append(CapturedChannel(edge, channel, True, frames, self._codec))
            underway.unaligned = True

    def _look(self, mine: SeatBarriers, checkpoint: int) -> None:
        """Hand over what is in flight if all of it is known."""
        underway = mine.underway.get(checkpoint)
        if underway is None or underway.inputs or underway.outputs:
            return
        del mine.underway[checkpoint]
        captured = tuple(underway.captured)
        mine.snapshots += 1
        mine.alignment_ms += underway.alignment_ms
        mine.start_delay_ms += underway.start_delay_ms
        mine.in_flight += sum(channel.records for channel in captured)
        times = SnapshotTimes(
            start_delay_ms=underway.start_delay_ms,
            alignment_ms=underway.alignment_ms,
            sync_ms=underway.sync_ms,
            unaligned=underway.unaligned,
        )
        self._snapshots.captured(mine.seat.key, checkpoint, captured, times)
