"""A slot with fault tolerance off: nothing is asked of a vertex, and no barriers come."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

from ftlayer.clock import Now
from ftlayer.histogram import Exemplar
from ftlayer.records.ids import U64Array
from ftlayer.runtime.connectors.sinks import open_sink
from ftlayer.runtime.protocol.deaths import Death
from ftlayer.runtime.protocol.elements import Barrier, Element
from ftlayer.runtime.protocol.messages import Deploy
from ftlayer.runtime.slot.events import RowsRead
from ftlayer.runtime.slot.instructions import ModeInstruction, ModeWork, RowsDone, RunTask
from ftlayer.runtime.slot.mode import (
    Instructions,
    ModeAction,
    ModeEvent,
    SlotParts,
    misplaced,
    rows_of_sources,
)
from ftlayer.runtime.slot.seat import Seat
from ftlayer.runtime.slot.shell import SlotContext
from ftlayer.runtime.task.actions import Action
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.runtime.task.events import TaskEvent
from ftlayer.runtime.task.untracked import UntrackedTaskMode
from ftlayer.topology.job_graph import Channel


class UntrackedSlot:
    """`ftlayer.runtime.slot.mode.SlotMode` of ``FTStatus.OFF``."""

    activity = 0
    due_ms = None
    is_quiet = True

    def __init__(self, parts: SlotParts) -> None:
        self._seating = parts.seating
        self._rows = rows_of_sources(parts)

    def handle(self, event: ModeEvent, now: Now) -> Instructions:
        raise misplaced(event)

    def work(self, seat: Seat, work: ModeWork, now: Now) -> list[Action]:
        raise misplaced(work)

    def act(self, seat: Seat, action: ModeAction, now_ms: int) -> Instructions:
        raise misplaced(action)

    def ran(self, seat: Seat, event: TaskEvent | ModeWork, now: Now) -> Instructions:
        return ()

    def read(self, seat: Seat, read: RowsRead, now_ms: int) -> Instructions:
        """See `SlotMode.read`: rows are done once they are sent."""
        return RunTask(seat.key, read.rows), RowsDone(seat.key, read.number)

    def source_ended(self, seat: Seat) -> Instructions:
        """See `SlotMode.source_ended`: the coordinator sees the end by the slots."""
        return ()

    def arrived(self, channel: Channel, barrier: Barrier, size: int) -> None:
        raise misplaced(barrier)

    def takes(self, seat: Seat, channel: Channel, mark: Element, now: Now) -> None:
        """See `SlotMode.takes`."""

    def worked(self, seat: Seat, size: int, now_ms: int) -> Instructions:
        return ()

    def on_time(self, now: Now) -> Instructions:
        return ()

    def rest(self, now_ms: int) -> Instructions:
        return ()

    def peers_gone(self, slots: Collection[int]) -> Instructions:
        return ()

    def peers_replaced(self, slots: Collection[int]) -> Instructions:
        return ()

    def may_read(self, seat: Seat) -> bool:
        return True

    def reads_early(self, seat: Seat) -> bool:
        """See `SlotMode.reads_early`: nothing would bound the number of batches."""
        return False

    def rows_wanted(self, key: TaskKey) -> int:
        return self._rows[key]

    @property
    def is_open(self) -> bool:
        return self._seating.is_reading

    def counters(self) -> dict[str, int]:
        return {}

    def exemplars(self) -> dict[str, Exemplar]:
        return {}

    def held_roots(self) -> list[U64Array]:
        return []

    def validate(self) -> None:
        """See `SlotMode.validate`: there is nothing."""


@dataclass(frozen=True)
class UntrackedSlotFactory:
    """`ftlayer.runtime.slot.shell.SlotModeFactory` of ``FTStatus.OFF``."""

    restarts_in_place = False

    def instance(self, slot: SlotContext) -> UntrackedSlotShell:
        return UntrackedSlotShell(slot)


class UntrackedSlotShell:
    """`ftlayer.runtime.slot.shell.SlotModeShell` of ``FTStatus.OFF``: nothing is opened."""

    touch_timeout_ms = None
    tracer = None
    """See `SlotModeShell.tracer`: no record has a root."""

    def __init__(self, slot: SlotContext) -> None:
        self._slot = slot

    def open(self, deploy: Deploy) -> UntrackedTaskMode:
        return UntrackedTaskMode(partial(open_sink, run=self._slot.run_of(deploy)))

    def rules(self, parts: SlotParts) -> UntrackedSlot:
        return UntrackedSlot(parts)

    def positions(self, key: TaskKey) -> Mapping[str, bytes]:
        return {}

    def carry_out(self, instruction: ModeInstruction) -> None:
        """See `SlotModeShell.carry_out`: the rules have no instructions of their own."""
        raise misplaced(instruction)

    def touch(self, roots: list[U64Array]) -> None:
        """See `SlotModeShell.touch`: no record has roots."""

    def deaths(self) -> tuple[Death, ...]:
        return ()

    def damaged(self, error: BaseException) -> int:
        return 0

    def end(self, *, over: bool, stands: int) -> None:
        """See `SlotModeShell.end`."""

    def close(self) -> None:
        """See `SlotModeShell.close`."""
