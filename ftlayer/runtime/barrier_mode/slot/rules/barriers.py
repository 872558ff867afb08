"""Barriers in a slot: what its tasks' handlers decide is carried out here.

As in the core, nothing here waits, time comes in with the calls, and what is to be done goes out as instructions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from ftlayer.checkpoint import handlers
from ftlayer.checkpoint.barrier import Alignment, Barrier
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import SnapshotTimes
from ftlayer.common.clock import Now
from ftlayer.runtime.barrier_mode.slot.in_flight import CapturedChannel
from ftlayer.runtime.barrier_mode.task.mode import Checkpointed, PendingSnapshot
from ftlayer.runtime.protocol.messages import (
    Batch,
    CancelMarker,
    Element,
    EndOfStream,
    EndTasks,
    may_overtake,
)
from ftlayer.runtime.slot.rules.events import ModeInstruction, ModeWork, RunTask, SlotInstruction, Transmit
from ftlayer.runtime.slot.rules.inbox import FeedbackOutput, HeadInbox
from ftlayer.runtime.slot.rules.mode import SlotParts
from ftlayer.runtime.slot.rules.outgoing import Departed, RemoteOutput
from ftlayer.runtime.slot.rules.subtask import Seat
from ftlayer.runtime.task.actions import Action, ElementCame
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.topology.job_graph import Channel

# What barrier mode's rules in a slot want of tasks, of the storage of checkpoints, and of the coordinator.
#
# For each task and checkpoint: `BeginSnapshot`, then `SnapshotCaptured`, each once at most and in this order (often
# without another turn between). `GiveUpSnapshot` or `CancelSnapshot` may come instead of the first, between the two, or
# behind both, also when everything is written: the last word then is that it was given up.


@dataclass(frozen=True, slots=True)
class SnapshotWork(ModeWork):
    decision: handlers.TakeSnapshot


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
    key: TaskKey
    checkpoint: int


@dataclass(frozen=True, slots=True)
class KeepFiles(ModeInstruction):
    checkpoint: int


@dataclass(frozen=True, slots=True)
class DropFiles(ModeInstruction):
    """The checkpoint was given up, and nothing else needs its files."""

    checkpoint: int


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
    handler: handlers.BarrierHandler | None
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
        handler = handlers.make_handler(config.mode, may_overtake, len(channels)) if channels else None
        return cls(seat, task, handler, channels, {channel: place for place, channel in enumerate(channels)})


@dataclass(frozen=True, slots=True)
class CheckpointParts:
    """What a slot works with in barrier mode.

    Attributes:
        config: as the user gave it.
        tasks: the part in checkpoints of each task of the slot.
        stopwatch_ms: returns milliseconds since any fixed moment, as exactly as the machine can: for ``sync_ms``,
            the one time that no event can bring.
    """

    config: CheckpointConfig
    tasks: Mapping[TaskKey, Checkpointed]
    stopwatch_ms: Callable[[], float]


@dataclass(slots=True)
class _Taking:
    mine: SeatBarriers
    decision: handlers.TakeSnapshot
    began_ms: float = 0.0
    pending: PendingSnapshot | None = None


@dataclass(frozen=True, slots=True)
class _Arrived:
    mine: SeatBarriers
    channel: Channel
    barrier: Barrier
    credit: int


Step: TypeAlias = Callable[[Now], Sequence[SlotInstruction]]


class Barriers:
    """The barriers of all tasks of a slot.

    A barrier that arrives is put into its channel, and its handler is told in a step of its own: barriers run through
    the tasks of one slot one after another, not inside each other. The steps stop where a task takes its snapshot,
    which may take long, and go on with `snapshot_taken`.
    """

    def __init__(self, checkpoints: CheckpointParts, parts: SlotParts) -> None:
        self._graph = parts.graph
        self._codec = parts.codec
        self._outgoing = parts.outgoing
        self._credit = parts.credit
        self._stopwatch_ms = checkpoints.stopwatch_ms
        seating = parts.seating
        overtaking = may_overtake(parts.graph, checkpoints.config)
        self._all = [
            SeatBarriers.of(seat, checkpoints.tasks[key], checkpoints.config, may_overtake=overtaking)
            for key, seat in seating.seats.items()
        ]
        self._of_seat = {mine.seat.key: mine for mine in self._all}
        self._receivers = {channel: self._of_seat[seat.key] for channel, seat in seating.receivers.items()}
        self._arrived: deque[_Arrived] = deque()
        self._steps: deque[Step] = deque()
        self._taking: _Taking | None = None
        self._due_ms: int | None = None  # of handlers, monotone

    # ------------------------------------------------------------ the coordinator

    def trigger(self, barrier: Barrier, now: Now) -> list[SlotInstruction]:
        """Let every source take its snapshot and send a barrier, whether it has more rows or not."""
        delay = max(0, now.wall_ms - barrier.started_ms)
        decision = handlers.TakeSnapshot(barrier, 0, delay)
        sources = [mine for mine in self._all if mine.seat.is_source and not mine.seat.ended]
        self._steps.extend(partial(self._decide, mine, decision) for mine in sources)
        return self.settle(now)

    def completed(self, checkpoint: int, read: int) -> None:
        for mine in self._all:
            if not mine.seat.ended:
                mine.task.completed(checkpoint, read)

    def aborted(self, checkpoint: int, now: Now) -> list[SlotInstruction]:
        """A checkpoint is given up: forget it, and go on with what it held up."""
        self._steps.extend(
            partial(self._abort, mine, checkpoint) for mine in self._all if not mine.seat.ended
        )
        self._steps.append(partial(self._forget_late, checkpoint))
        return self.settle(now)

    def _abort(self, mine: SeatBarriers, checkpoint: int, now: Now) -> Sequence[SlotInstruction]:
        decisions = [] if mine.handler is None else mine.handler.aborted(checkpoint, now.wall_ms)
        self._do_next(*self._to_decide(mine, decisions), partial(self._cancel, mine, checkpoint))
        return ()

    def _cancel(self, mine: SeatBarriers, checkpoint: int, now: Now) -> Sequence[SlotInstruction]:
        self._forget(mine, checkpoint)
        mine.task.aborted(checkpoint)
        return [CancelSnapshot(mine.seat.key, checkpoint)]

    def _forget_late(self, checkpoint: int, now: Now) -> Sequence[SlotInstruction]:
        self._outgoing.forget_late(checkpoint)
        return ()

    def end_sources(self) -> list[RunTask]:
        sources = (mine.seat for mine in self._all if mine.seat.is_source and not mine.seat.ended)
        return [RunTask(seat.key, EndTasks()) for seat in sources]

    # ------------------------------------------------------------ elements

    def arrived(self, channel: Channel, barrier: Barrier, credit: int) -> None:
        self._arrived.append(_Arrived(self._receivers[channel], channel, barrier, credit))

    def settle(self, now: Now) -> list[SlotInstruction]:
        """Take all steps that there are, tell handlers of what has arrived, and note what has left."""
        self._steps.append(self._settle)
        return self._go_on(now)

    def took(self, seat: Seat, channel: Channel, mark: Element, now: Now) -> list[SlotInstruction] | None:
        """Take a mark that has come to its turn; None: it is the task's."""
        mine = self._of_seat[seat.key]
        if mine.handler is None or not isinstance(mark, Barrier | CancelMarker | EndOfStream):
            return None
        number = mine.numbers[channel]
        match mark:
            case Barrier():
                decisions = mine.handler.barrier(number, mark, now.wall_ms)
            case CancelMarker(checkpoint):
                decisions = mine.handler.cancelled(number, checkpoint, now.wall_ms)
            case EndOfStream():
                decisions = mine.handler.ended(number, now.wall_ms)
        self._steps.extend(self._to_decide(mine, decisions))
        instructions = self.settle(now)
        if isinstance(mark, EndOfStream):
            # Behind all that: a task that has ended can send no barrier any more.
            instructions.append(RunTask(seat.key, ElementCame(channel, mark)))
        return instructions

    # ------------------------------------------------------------ time

    def on_time(self, now: Now) -> list[SlotInstruction]:
        if self._due_ms is not None and self._due_ms <= now.mono_ms:
            for mine in self._all:
                if mine.handler is not None and mine.handler.due_ms is not None:
                    self._steps.extend(self._to_decide(mine, mine.handler.on_time(now.wall_ms)))
            self._look_at_clocks(now)
        self._steps.append(self._overtake_late)
        return self.settle(now)

    def is_due(self, now_ms: int) -> bool:
        if self._arrived or self._steps or self._outgoing.late or self._outgoing.departed:
            return True
        return self._due_ms is not None and self._due_ms <= now_ms

    def _overtake_late(self, now: Now) -> Sequence[SlotInstruction]:
        return self._outgoing.overtake_late(now.mono_ms)

    @property
    def due_ms(self) -> int | None:
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

    def validate(self) -> None:
        assert self._taking is not None or not self._steps, "steps wait for no snapshot"
        for mine in self._all:
            takes_inputs = any(underway.inputs for underway in mine.underway.values())
            assert takes_inputs or not mine.captures, f"{mine.seat.key} captures records for no snapshot"

    # ------------------------------------------------------------ steps

    def _go_on(self, now: Now) -> list[SlotInstruction]:
        """Take steps until there are none, or a task has to take its snapshot first."""
        instructions: list[SlotInstruction] = []
        while self._steps and self._taking is None:
            instructions += self._steps.popleft()(now)
        return instructions

    def _do_next(self, *steps: Step) -> None:
        self._steps.extendleft(reversed(steps))

    def _settle(self, now: Now) -> Sequence[SlotInstruction]:
        if not self._arrived:
            return [each for departed in self._outgoing.take_departed() for each in self._departed(departed)]
        here = self._arrived.popleft()
        handler = here.mine.handler
        assert handler is not None
        decisions = handler.announced(here.mine.numbers[here.channel], here.barrier, now.wall_ms)
        self._do_next(*self._to_decide(here.mine, decisions), partial(self._take_out, here), self._settle)
        return ()

    def _take_out(self, here: _Arrived, now: Now) -> Sequence[SlotInstruction]:
        """Take an unaligned barrier out of its queue: it has its effect at once."""
        if here.barrier.alignment is not Alignment.UNALIGNED:
            return ()
        here.mine.seat.inbox.take_out(here.channel, here.barrier)
        return self._credit.give_back(here.channel, here.credit, now.mono_ms) if here.credit else ()

    def _departed(self, departed: Departed) -> Sequence[SlotInstruction]:
        channel = departed.channel
        edge = self._graph.edges[channel.edge]
        mine = self._of_seat[edge.source, channel.sender]
        underway = mine.underway.get(departed.checkpoint)
        if underway is None:
            return ()
        underway.outputs.discard(channel)
        self._add_outgoing(underway, channel, departed.overtaken)
        return self._look(mine, departed.checkpoint)

    # ------------------------------------------------------------ decisions

    def _to_decide(self, mine: SeatBarriers, decisions: list[handlers.Decision]) -> list[Step]:
        steps: list[Step] = [partial(self._decide, mine, decision) for decision in decisions]
        return [*steps, self._clocks] if steps else []

    def _clocks(self, now: Now) -> Sequence[SlotInstruction]:
        self._look_at_clocks(now)
        return ()

    def _decide(self, mine: SeatBarriers, decision: handlers.Decision, now: Now) -> Sequence[SlotInstruction]:
        inbox = mine.seat.inbox
        match decision:
            case handlers.BlockChannel(number):
                inbox.block(mine.channels[number])
            case handlers.Unblock(number):
                inbox.unblock(mine.channels[number])
            case handlers.TakeSnapshot():
                self._taking = _Taking(mine, decision)
                return [RunTask(mine.seat.key, SnapshotWork(decision))]
            case handlers.StopCapture(_, number):
                inbox.stop_capture(mine.channels[number])
            case handlers.AllBarriers(checkpoint, alignment_ms):
                return self._complete_inputs(mine, checkpoint, alignment_ms)
            case handlers.GiveUp(checkpoint, reason):
                return self._give_up(mine, checkpoint, reason, now)
        return ()

    def take_snapshot(self, seat: Seat, work: SnapshotWork, now: Now) -> list[Action]:
        taking = self._taking
        assert taking is not None
        assert taking.mine.seat is seat
        taking.began_ms = self._stopwatch_ms()
        actions, taking.pending = taking.mine.task.snapshot(work.decision.barrier, now)
        return actions

    def snapshot_taken(self, now: Now) -> list[SlotInstruction]:
        """What the task has decided is carried out: send the barrier on, and take the steps that have waited."""
        taking, self._taking = self._taking, None
        assert taking is not None
        assert taking.pending is not None
        mine, decision = taking.mine, taking.decision
        barrier, seat = decision.barrier, mine.seat
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
        sent = self._send_on(seat, barrier, underway, now)
        underway.sync_ms = self._stopwatch_ms() - taking.began_ms
        return [
            *sent,
            BeginSnapshot(seat.key, barrier, taking.pending),
            *self._look(mine, barrier.checkpoint),
            *self._go_on(now),
        ]

    def _send_on(self, seat: Seat, barrier: Barrier, underway: Underway, now: Now) -> list[Transmit]:
        sent: list[Transmit] = []
        for channel, output in seat.outputs.items():
            if isinstance(output, RemoteOutput):
                frames, overtaken = self._outgoing.send_barrier(output, barrier, now)
                sent += frames
                if overtaken is None:
                    underway.outputs.add(channel)
                else:
                    self._add_outgoing(underway, channel, overtaken)
            elif not isinstance(output, FeedbackOutput):
                output.send(barrier, now.mono_ms)
                self.arrived(channel, barrier, 0)
        return sent

    def _give_up(
        self, mine: SeatBarriers, checkpoint: int, reason: str, now: Now
    ) -> Sequence[SlotInstruction]:
        self._forget(mine, checkpoint)
        instructions: list[SlotInstruction] = [GiveUpSnapshot(mine.seat.key, checkpoint, reason)]
        for output in mine.seat.outputs.values():
            if isinstance(output, RemoteOutput):
                instructions += self._outgoing.send(output, CancelMarker(checkpoint), now.mono_ms)
            else:
                output.send(CancelMarker(checkpoint), now.mono_ms)
        return instructions

    def _forget(self, mine: SeatBarriers, checkpoint: int) -> None:
        underway = mine.underway.pop(checkpoint, None)
        if underway is not None and underway.inputs:
            self._stop_captures(mine)

    # ------------------------------------------------------------ records in flight

    def _complete_inputs(
        self, mine: SeatBarriers, checkpoint: int, alignment_ms: int
    ) -> Sequence[SlotInstruction]:
        underway = mine.underway.get(checkpoint)
        if underway is None or not underway.inputs:
            return ()
        for channel, batches in mine.captures.items():
            parts = tuple(batch for batch in batches if batch.num_rows)
            if parts:
                edge = self._graph.edges[channel.edge]
                underway.captured.append(CapturedChannel(edge, channel, False, parts, self._codec))
        self._stop_captures(mine)
        underway.inputs, underway.alignment_ms = False, alignment_ms
        return self._look(mine, checkpoint)

    def _stop_captures(self, mine: SeatBarriers) -> None:
        for channel in mine.captures:
            mine.seat.inbox.stop_capture(channel)
        mine.captures = {}

    def _add_outgoing(self, underway: Underway, channel: Channel, frames: tuple[bytes, ...]) -> None:
        if frames:
            edge = self._graph.edges[channel.edge]
            underway.captured.append(CapturedChannel(edge, channel, True, frames, self._codec))
            underway.unaligned = True

    def _look(self, mine: SeatBarriers, checkpoint: int) -> Sequence[SlotInstruction]:
        underway = mine.underway.get(checkpoint)
        if underway is None or underway.inputs or underway.outputs:
            return ()
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
        return [SnapshotCaptured(mine.seat.key, checkpoint, captured, times)]
