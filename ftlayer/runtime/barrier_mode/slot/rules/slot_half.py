"""Barrier mode's rules in a slot: barriers go through its tasks, and slow ones are sent less at a time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.common.clock import Now
from ftlayer.config import TopologyOptions
from ftlayer.runtime.barrier_mode.slot.rules import barriers
from ftlayer.runtime.protocol import messages
from ftlayer.runtime.protocol.messages import Barrier, Element
from ftlayer.runtime.slot.rules import events, mode
from ftlayer.runtime.slot.rules.credit import Crediting
from ftlayer.runtime.slot.rules.outgoing import LIMIT_FRAMES
from ftlayer.runtime.slot.rules.subtask import Seat, Seating
from ftlayer.runtime.task.actions import Action, DataEnded, TaskEvent
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.topology.job_graph import Channel, JobGraph
from ftlayer.topology.operators import QueueSource, Source

# How much may be in flight towards a task: what it works off in a given time, as Flink's buffer debloating has it.
#
# The less is in flight, the sooner an aligned barrier is through. How fast a task is, is measured while it has
# something to do: what it was given, over the time until it asked for more.


WINDOW_MS = 1_000
"""A measurement is over no less than this."""

FIRST_WINDOW_MS = 200
"""But the first one: until then as little as possible is in flight, since a slow task would need long for more."""

_SMOOTHING = 0.5
_WORTH_TELLING = 0.25
"""A limit that is wrong by less than a quarter stays: telling the senders costs a message each."""


class Debloater:
    """Measures one task.

    The time that a unit (a byte, a row) takes is smoothed, not its inverse: a task that has become slow has too much
    in flight at once, one that has become fast is fed as before for some windows.

    Attributes:
        limit: how much is worked off within the target, between ``least``, where it begins, and ``most``.
    """

    def __init__(self, target_ms: float, least: int, most: int) -> None:
        self.limit = least = min(least, most)
        self._target_ms = target_ms
        self._least, self._most = least, most
        self._ms_a_unit: float | None = None
        self._began_ms: int | None = None  # when this window did
        self._busy_since_ms: int | None = None
        self._busy_ms = 0
        self._units = 0

    def taken(self, units: int, now_ms: int) -> bool:
        """The task is given so much, and is done with all before; whether ``limit`` has changed."""
        changed = self._look(now_ms)
        self._busy_since_ms = now_ms
        if self._began_ms is None:
            self._began_ms = now_ms
        self._units += units
        return changed

    def rested(self, now_ms: int) -> bool:
        """The task is done with what it was given, and there is nothing more; whether ``limit`` has changed."""
        if self._busy_since_ms is None:
            return False
        changed = self._look(now_ms)
        self._busy_since_ms = None
        return changed

    def stuck(self, now_ms: int) -> bool:
        """The task is not done with what it was given, and more waits for it; whether ``limit`` has changed.

        To be called now and then while that is so: who takes nothing for a window wants as little as possible.
        """
        if self._busy_since_ms is None:
            return False
        changed = self._look(now_ms)
        self._busy_since_ms = now_ms
        if self._began_ms is None:
            self._began_ms = now_ms
        return changed

    def _look(self, now_ms: int) -> bool:
        if self._busy_since_ms is not None:
            self._busy_ms += now_ms - self._busy_since_ms
        window_ms = FIRST_WINDOW_MS if self._ms_a_unit is None else WINDOW_MS
        if self._began_ms is None or now_ms - self._began_ms < window_ms:
            return False
        if self._units:
            # The clock counts milliseconds: less than one was one at most.
            measured = max(1, self._busy_ms) / self._units
            before = measured if self._ms_a_unit is None else self._ms_a_unit
            self._ms_a_unit = before + _SMOOTHING * (measured - before)
        elif self._busy_ms >= window_ms:
            # Nothing was taken: not the smoothed time, which nothing that is measured would ever bring down.
            self._ms_a_unit = max(self._ms_a_unit or 0.0, self._target_ms / self._least)
        else:
            return False
        self._began_ms, self._busy_ms, self._units = None, 0, 0
        return self._adjust(self._target_ms / self._ms_a_unit)

    def _adjust(self, wanted: float) -> bool:
        limit = int(min(max(wanted, self._least), self._most))
        at_an_end = limit in (self._least, self._most) and limit != self.limit
        if not at_an_end and abs(limit - self.limit) < _WORTH_TELLING * self.limit:
            return False
        self.limit = limit
        return True


LEAST_BYTES = 4 << 10
"""Less on a channel would make batches so small that the task is slow because of them."""

LEAST_ROWS = 64
"""And so would less from a source."""

SOURCE_PART = 8
"""A source reads what is worked off in this part of the target: all of it is in flight, on top of its channels."""


@dataclass(frozen=True, slots=True)
class _Measured:
    seat: Seat
    debloater: Debloater
    outside: tuple[Channel, ...]


class Debloating:
    """Measures every task: those with inputs by bytes for each channel, sources by rows."""

    def __init__(self, seating: Seating, credit: Crediting, target_ms: int, options: TopologyOptions) -> None:
        self._credit = credit
        self._tasks: dict[TaskKey, _Measured] = {}
        self._sources: dict[TaskKey, _Measured] = {}
        for key, seat in seating.seats.items():
            channels = seat.inbox.channels
            if channels:
                debloater = Debloater(target_ms / len(channels), LEAST_BYTES, options.channel_bytes)
                outside = [channel for channel in channels if seating.senders[channel] != seating.slot]
                self._tasks[key] = _Measured(seat, debloater, tuple(outside))
            else:
                debloater = Debloater(target_ms / SOURCE_PART, LEAST_ROWS, options.batch_rows)
                self._sources[key] = _Measured(seat, debloater, ())
        self._begin(seating)

    def worked(self, seat: Seat, size: int, now_ms: int) -> list[events.Grant]:
        """A task is given ``size`` bytes, or a source has emitted so many rows."""
        source = self._sources.get(seat.key)
        if source is not None:
            source.debloater.taken(size, now_ms)
            return []
        measured = self._tasks[seat.key]
        return self._tell(measured) if measured.debloater.taken(size, now_ms) else []

    def rows_wanted(self, key: TaskKey) -> int:
        return self._sources[key].debloater.limit

    def look(self, now_ms: int) -> list[events.Grant]:
        """No task is at work: those with nothing to do are idle from now on, and sources that are not held up.

        The others may be stuck: with no room for what they would send, or with state that waits for the disk.
        """
        told: list[events.Grant] = []
        for measured in self._tasks.values():
            debloater = measured.debloater
            changed = debloater.stuck(now_ms) if measured.seat.inbox.turns else debloater.rested(now_ms)
            if changed:
                told += self._tell(measured)
        for measured in self._sources.values():
            if measured.seat.has_room:
                measured.debloater.rested(now_ms)
            else:
                measured.debloater.stuck(now_ms)
        return told

    def _begin(self, seating: Seating) -> None:
        """Let little be in flight until something is known; receivers in other slots begin so by themselves."""
        for measured in self._tasks.values():
            limit = measured.debloater.limit
            measured.seat.inbox.limit(limit, limit // LIMIT_FRAMES)
        for output in seating.remote.values():
            output.limit(LEAST_BYTES)

    def _tell(self, measured: _Measured) -> list[events.Grant]:
        limit = measured.debloater.limit
        measured.seat.inbox.limit(limit, limit // LIMIT_FRAMES)
        return self._credit.limit(dict.fromkeys(measured.outside, limit))


@dataclass(slots=True)
class HeldRows:
    """What one source has read, by the numbers of `RowsRead`, until a checkpoint is complete that holds it.

    Where a checkpoint is given up, a later one holds its rows too.
    """

    _since: list[int] = field(default_factory=list)
    _before: deque[tuple[int, list[int]]] = field(default_factory=deque)

    def read(self, number: int) -> None:
        self._since.append(number)

    def snapshot(self, checkpoint: int) -> None:
        """The source has taken its snapshot for a checkpoint, behind all that it has read."""
        self._before.append((checkpoint, self._since))
        self._since = []

    def completed(self, checkpoint: int) -> list[int]:
        """A checkpoint is complete, and no restore goes behind it: return what is done now, in order."""
        done: list[int] = []
        while self._before and self._before[0][0] <= checkpoint:
            done += self._before.popleft()[1]
        return done


class BarrierSlot(mode.SlotMode):
    def __init__(self, checkpoints: barriers.CheckpointParts, parts: mode.SlotParts) -> None:
        self.activity = 0
        self._parts = parts
        self._barriers = barriers.Barriers(checkpoints, parts)
        self._debloating = _debloating(checkpoints.config, parts)
        self._held = {
            key: HeldRows() for key, seat in parts.seating.seats.items() if _is_queue(seat, parts.graph)
        }
        self._final: int | None = None  # the checkpoint that the job ends with

    def handle(self, event: mode.ModeEvent, now: Now) -> mode.Instructions:
        match event:
            case messages.TriggerCheckpoint(barrier):
                self.activity += 1
                if barrier.final:
                    # What came behind it would be in no checkpoint.
                    self._final = barrier.checkpoint
                return self._barriers.trigger(barrier, now)
            case messages.CheckpointCompleted(checkpoint, read):
                self._barriers.completed(checkpoint, read)
                return [*self._done_by(checkpoint), barriers.KeepFiles(checkpoint)]
            case messages.CheckpointAborted(checkpoint, files_stay):
                self.activity += 1
                if checkpoint == self._final:
                    self._final = None
                drop = [] if files_stay else [barriers.DropFiles(checkpoint)]
                return [*self._barriers.aborted(checkpoint, now), *drop]
            case messages.Readmit(uid, subtask):
                self.activity += 1
                return [events.RunTask((uid, subtask), event)]
            case messages.LoopWaits(uid):
                seats = self._parts.seating.seats.values()
                return [events.RunTask(seat.key, event) for seat in seats if seat.uid == uid]
            case messages.EndTasks():
                return self._barriers.end_sources()
            case events.SnapshotOver(key, checkpoint):
                return [barriers.ReleaseSnapshot(key, checkpoint)]
            case _:
                raise mode.misplaced(event)

    # ------------------------------------------------------------ tasks

    def work(self, seat: Seat, work: events.ModeWork, now: Now) -> list[Action]:
        if not isinstance(work, barriers.SnapshotWork):
            raise mode.misplaced(work)
        return self._barriers.take_snapshot(seat, work, now)

    def act(self, seat: Seat, action: mode.ModeAction, now_ms: int) -> mode.Instructions:
        match action:
            case DataEnded():
                return [events.TellCoordinator(action)]
            case _:
                raise mode.misplaced(action)

    def ran(self, seat: Seat, event: TaskEvent | events.ModeWork, now: Now) -> mode.Instructions:
        if not isinstance(event, barriers.SnapshotWork):
            return ()
        held = self._held.get(seat.key)
        if held is not None:
            held.snapshot(event.decision.barrier.checkpoint)
        return self._barriers.snapshot_taken(now)

    def read(self, seat: Seat, read: events.RowsRead, now_ms: int) -> mode.Instructions:
        """See `SlotMode.read`: rows are a source's own once they are sent, those of a queue with a checkpoint."""
        told = self.worked(seat, read.rows.payload.num_rows, now_ms)
        held = self._held.get(seat.key)
        if held is None:
            return [*told, events.RunTask(seat.key, read.rows), events.RowsDone(seat.key, read.number)]
        held.read(read.number)
        return [*told, events.RunTask(seat.key, read.rows)]

    def _done_by(self, checkpoint: int) -> list[events.RowsDone]:
        return [
            events.RowsDone(key, number)
            for key, held in self._held.items()
            for number in held.completed(checkpoint)
        ]

    def source_ended(self, seat: Seat) -> mode.Instructions:
        """Tell the coordinator: the job's last checkpoint waits for the end of all sources."""
        return [events.TellCoordinator(DataEnded(*seat.key))]

    # ------------------------------------------------------------ elements

    def arrived(self, channel: Channel, barrier: Barrier, size: int) -> None:
        self._barriers.arrived(channel, barrier, size)

    def takes(self, seat: Seat, channel: Channel, mark: Element, now: Now) -> mode.Instructions | None:
        return self._barriers.took(seat, channel, mark, now)

    def worked(self, seat: Seat, size: int, now_ms: int) -> mode.Instructions:
        return () if self._debloating is None else self._debloating.worked(seat, size, now_ms)

    # ------------------------------------------------------------ time

    def on_time(self, now: Now) -> mode.Instructions:
        told = () if self._debloating is None else self._debloating.look(now.mono_ms)
        return [*told, *self._barriers.on_time(now)]

    def is_due(self, now_ms: int) -> bool:
        return self._debloating is not None or self._barriers.is_due(now_ms)

    def interrupts(self, barrier_waits: bool, now_ms: int) -> bool:
        """Whether timers that fire are to wait: a barrier has come meanwhile, or one that has waited may overtake."""
        due_ms = self.due_ms
        return barrier_waits or (due_ms is not None and due_ms <= now_ms)

    @property
    def due_ms(self) -> int | None:
        return self._barriers.due_ms

    # ------------------------------------------------------------ what is known of it

    def may_read(self, seat: Seat) -> bool:
        return self._final is None

    def rows_wanted(self, key: TaskKey) -> int:
        return (
            self._parts.options.batch_rows if self._debloating is None else self._debloating.rows_wanted(key)
        )

    @property
    def is_open(self) -> bool:
        return self._parts.seating.is_reading

    def counters(self) -> dict[str, int]:
        return self._barriers.counters()

    def validate(self) -> None:
        self._barriers.validate()


def _is_queue(seat: Seat, graph: JobGraph) -> bool:
    source = graph.vertex(seat.uid).operators[0]
    return isinstance(source, Source) and isinstance(source.connector, QueueSource)


def _debloating(config: CheckpointConfig, parts: mode.SlotParts) -> Debloating | None:
    if not config.debloating:
        return None
    return Debloating(parts.seating, parts.credit, config.debloat_target_ms, parts.options)
