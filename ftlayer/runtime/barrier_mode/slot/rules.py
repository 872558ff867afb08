"""Barrier mode's rules in a slot: barriers go through its tasks, and slow ones are sent less at a time."""

from __future__ import annotations

from collections.abc import Collection

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.clock import Now
from ftlayer.histogram import Exemplar
from ftlayer.records.ids import U64Array
from ftlayer.runtime.barrier_mode.slot.barriers import Barriers, CheckpointParts
from ftlayer.runtime.barrier_mode.slot.debloating import Debloating
from ftlayer.runtime.barrier_mode.slot.held_rows import HeldRows
from ftlayer.runtime.barrier_mode.slot.instructions import DropFiles, KeepFiles, ReleaseSnapshot, SnapshotWork
from ftlayer.runtime.protocol.elements import Barrier, Element
from ftlayer.runtime.protocol.messages import (
    CheckpointAborted,
    CheckpointCompleted,
    EndTasks,
    LoopWaits,
    Readmit,
    TriggerCheckpoint,
)
from ftlayer.runtime.slot.events import RowsRead, SnapshotOver
from ftlayer.runtime.slot.instructions import ModeWork, RowsDone, RunTask, TellCoordinator
from ftlayer.runtime.slot.mode import Instructions, ModeAction, ModeEvent, SlotParts, misplaced
from ftlayer.runtime.slot.seat import Seat
from ftlayer.runtime.task.actions import Action, DataEnded
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.runtime.task.events import TaskEvent
from ftlayer.topology.job_graph import Channel, JobGraph
from ftlayer.topology.operators import QueueSource, Source


class BarrierSlot:
    """`ftlayer.runtime.slot.mode.SlotMode` of a job with checkpoints."""

    def __init__(self, checkpoints: CheckpointParts, parts: SlotParts) -> None:
        """``checkpoints`` has a part of each task of the slot."""
        self.activity = 0
        self._parts = parts
        self._barriers = Barriers(checkpoints, parts)
        self._debloating = _debloating(checkpoints.config, parts)
        self._held = {
            key: HeldRows() for key, seat in parts.seating.seats.items() if _is_queue(seat, parts.graph)
        }
        self._final: int | None = None  # the checkpoint that the job ends with

    def handle(self, event: ModeEvent, now: Now) -> Instructions:
        match event:
            case TriggerCheckpoint(barrier):
                self.activity += 1
                if barrier.final:
                    # What came behind it would be in no checkpoint.
                    self._final = barrier.checkpoint
                return self._barriers.trigger(barrier, now)
            case CheckpointCompleted(checkpoint):
                self._barriers.completed(checkpoint)
                return [*self._done_by(checkpoint), KeepFiles(checkpoint)]
            case CheckpointAborted(checkpoint, files_stay):
                self.activity += 1
                if checkpoint == self._final:
                    self._final = None
                drop = [] if files_stay else [DropFiles(checkpoint)]
                return [*self._barriers.aborted(checkpoint, now), *drop]
            case Readmit(uid, subtask):
                self.activity += 1
                return [RunTask((uid, subtask), event)]
            case LoopWaits(uid):
                seats = self._parts.seating.seats.values()
                return [RunTask(seat.key, event) for seat in seats if seat.uid == uid]
            case EndTasks():
                return self._barriers.end_sources()
            case SnapshotOver(key, checkpoint):
                return [ReleaseSnapshot(key, checkpoint)]
            case _:
                raise misplaced(event)

    # ------------------------------------------------------------ tasks

    def work(self, seat: Seat, work: ModeWork, now: Now) -> list[Action]:
        if not isinstance(work, SnapshotWork):
            raise misplaced(work)
        return self._barriers.take_snapshot(seat, work, now)

    def act(self, seat: Seat, action: ModeAction, now_ms: int) -> Instructions:
        match action:
            case DataEnded():
                return [TellCoordinator(action)]
            case _:
                raise misplaced(action)

    def ran(self, seat: Seat, event: TaskEvent | ModeWork, now: Now) -> Instructions:
        if not isinstance(event, SnapshotWork):
            return ()
        held = self._held.get(seat.key)
        if held is not None:
            held.snapshot(event.decision.barrier.checkpoint)
        return self._barriers.snapshot_taken(now)

    def read(self, seat: Seat, read: RowsRead, now_ms: int) -> Instructions:
        """See `SlotMode.read`: rows are a source's own once they are sent, those of a queue with a checkpoint."""
        told = self.worked(seat, read.rows.payload.num_rows, now_ms)
        held = self._held.get(seat.key)
        if held is None:
            return [*told, RunTask(seat.key, read.rows), RowsDone(seat.key, read.number)]
        held.read(read.number)
        return [*told, RunTask(seat.key, read.rows)]

    def _done_by(self, checkpoint: int) -> list[RowsDone]:
        return [
            RowsDone(key, number) for key, held in self._held.items() for number in held.completed(checkpoint)
        ]

    def source_ended(self, seat: Seat) -> Instructions:
        """Tell the coordinator: the job's last checkpoint waits for the end of all sources."""
        return [TellCoordinator(DataEnded(*seat.key))]

    # ------------------------------------------------------------ elements

    def arrived(self, channel: Channel, barrier: Barrier, size: int) -> None:
        self._barriers.arrived(channel, barrier, size)

    def takes(self, seat: Seat, channel: Channel, mark: Element, now: Now) -> Instructions | None:
        return self._barriers.took(seat, channel, mark, now)

    def worked(self, seat: Seat, size: int, now_ms: int) -> Instructions:
        """See `SlotMode.worked`; ``size`` is in rows for a source."""
        return () if self._debloating is None else self._debloating.worked(seat, size, now_ms)

    # ------------------------------------------------------------ time

    def on_time(self, now: Now) -> Instructions:
        """Let barriers that have waited long enough overtake records, and see who is idle."""
        told = () if self._debloating is None else self._debloating.look(now.mono_ms)
        return [*told, *self._barriers.on_time(now)]

    def rest(self, now_ms: int) -> Instructions:
        return ()

    @property
    def due_ms(self) -> int | None:
        return self._barriers.due_ms

    # ------------------------------------------------------------ peers

    def peers_gone(self, slots: Collection[int]) -> Instructions:
        return ()

    def peers_replaced(self, slots: Collection[int]) -> Instructions:
        return ()

    # ------------------------------------------------------------ what is known of it

    def may_read(self, seat: Seat) -> bool:
        return self._final is None

    def reads_early(self, seat: Seat) -> bool:
        """See `SlotMode.reads_early`: nothing would bound the number of batches."""
        return False

    def rows_wanted(self, key: TaskKey) -> int:
        return (
            self._parts.options.batch_rows if self._debloating is None else self._debloating.rows_wanted(key)
        )

    @property
    def is_open(self) -> bool:
        return self._parts.seating.is_reading

    @property
    def is_quiet(self) -> bool:
        """See `SlotMode.is_quiet`: snapshots are the coordinator's to wait for."""
        return True

    def counters(self) -> dict[str, int]:
        return self._barriers.counters()

    def exemplars(self) -> dict[str, Exemplar]:
        return {}

    def held_roots(self) -> list[U64Array]:
        return []

    def validate(self) -> None:
        self._barriers.validate()


def _is_queue(seat: Seat, graph: JobGraph) -> bool:
    source = graph.vertex(seat.uid).operators[0]
    return isinstance(source, Source) and isinstance(source.connector, QueueSource)


def _debloating(config: CheckpointConfig, parts: SlotParts) -> Debloating | None:
    if not config.debloating:
        return None
    return Debloating(parts.seating, parts.credit, config.debloat_target_ms, parts.options)
