"""What a mode adds to the rules of a slot: `SlotCore` owns one. No I/O, no threads, no clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ftlayer.clock import Now
from ftlayer.config import TopologyOptions
from ftlayer.errors import CodecError
from ftlayer.histogram import Exemplar
from ftlayer.records.ids import U64Array
from ftlayer.runtime.protocol.channel_frames import ElementCodec
from ftlayer.runtime.protocol.elements import Barrier, Element
from ftlayer.runtime.protocol.messages import (
    AllowReplays,
    CheckpointAborted,
    CheckpointCompleted,
    EndReplays,
    EndTasks,
    LetOut,
    LoopWaits,
    PauseIntake,
    Readmit,
    ReplayNow,
    ResumeIntake,
    TriggerCheckpoint,
)
from ftlayer.runtime.slot.crediting import Crediting
from ftlayer.runtime.slot.events import (
    RangesCame,
    RangesRefused,
    ReplaysCame,
    RootsAccepted,
    RowsRead,
    SnapshotOver,
)
from ftlayer.runtime.slot.instructions import ModeWork, SlotInstruction
from ftlayer.runtime.slot.outgoing import Outgoing
from ftlayer.runtime.slot.seat import Seat, Seating
from ftlayer.runtime.task.actions import (
    Acknowledge,
    Action,
    AskReplays,
    CallRanges,
    DataEnded,
    FailRoots,
    PersistRoots,
    ReplaysOut,
)
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.runtime.task.events import TaskEvent
from ftlayer.topology.job_graph import Channel, JobGraph
from ftlayer.vertex.calls import StreamOptions

ModeEvent = (
    RootsAccepted
    | ReplaysCame
    | RangesCame
    | RangesRefused
    | ReplayNow
    | PauseIntake
    | ResumeIntake
    | AllowReplays
    | LetOut
    | EndReplays
    | TriggerCheckpoint
    | CheckpointCompleted
    | CheckpointAborted
    | Readmit
    | LoopWaits
    | EndTasks
    | SnapshotOver
)
"""What a mode alone understands."""

ModeAction = PersistRoots | CallRanges | Acknowledge | FailRoots | AskReplays | ReplaysOut | DataEnded
"""What a task decides that its mode carries out."""


Instructions: TypeAlias = Sequence[SlotInstruction]


@dataclass(frozen=True)
class SlotParts:
    """What a mode is given of its slot."""

    graph: JobGraph
    options: TopologyOptions
    seating: Seating
    codec: ElementCodec
    outgoing: Outgoing
    credit: Crediting


class SlotMode(Protocol):
    activity: int
    """Grows with what happens here alone (see `Heartbeat`); any thread may read it."""

    def handle(self, event: ModeEvent, now: Now) -> Instructions:
        """Take an event of the mode; `CodecError` for one of another mode."""

    # ------------------------------------------------------------ tasks

    def work(self, seat: Seat, work: ModeWork, now: Now) -> list[Action]:
        """Do a part of a task's work (see `RunTask`); returns what is to be done for it."""

    def act(self, seat: Seat, action: ModeAction, now_ms: int) -> Instructions:
        """Carry out what a task has decided."""

    def ran(self, seat: Seat, event: TaskEvent | ModeWork, now: Now) -> Instructions:
        """A task has worked an event off, and what it decided is carried out."""

    def read(self, seat: Seat, read: RowsRead, now_ms: int) -> Instructions:
        """A source has read rows: have its task run, and say when they are done (`RowsDone`)."""

    def source_ended(self, seat: Seat) -> Instructions:
        """A source has no more rows; its task hears of it before this is carried out."""

    # ------------------------------------------------------------ elements

    def arrived(self, channel: Channel, barrier: Barrier, size: int) -> None:
        """A barrier was put into the inbox of its receiver; ``size`` is the credit that it has used."""

    def takes(self, seat: Seat, channel: Channel, mark: Element, now: Now) -> Instructions | None:
        """Take a mark that has come to its turn; None: it is the task's."""

    def worked(self, seat: Seat, size: int, now_ms: int) -> Instructions:
        """A task is given ``size`` bytes."""

    # ------------------------------------------------------------ time

    def on_time(self, now: Now) -> Instructions:
        """Do what is due, and what there is room for."""

    def rest(self, now_ms: int) -> Instructions:
        """There is nothing else to do: let go what is due."""

    @property
    def due_ms(self) -> int | None:
        """When one of the two has something to do (monotone, ms); None: not until something happens."""

    # ------------------------------------------------------------ peers

    def peers_gone(self, slots: Collection[int]) -> Instructions:
        """These slots are gone, and others will take their place."""

    def peers_replaced(self, slots: Collection[int]) -> Instructions:
        """These slots have new instances."""

    # ------------------------------------------------------------ what is known of it

    def may_read(self, seat: Seat) -> bool:
        """Whether a source should read on, as far as the mode is concerned."""

    def reads_early(self, seat: Seat) -> bool:
        """Whether a source's rows need not wait for others while the slot has nothing else to do."""

    def rows_wanted(self, key: TaskKey) -> int:
        """Return how many rows a source should read at a time."""

    @property
    def is_open(self) -> bool:
        """Whether records may still come into the slot other than from other slots."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits here, or for the mode's own calls."""

    def counters(self) -> dict[str, int]:
        """Return totals by name; any thread."""

    def exemplars(self) -> dict[str, Exemplar]:
        """Return exemplars of durations among `counters`, by name; any thread."""

    def held_roots(self) -> list[U64Array]:
        """Return the roots of all that waits here. Any thread: what it reads is replaced, never changed."""

    def validate(self) -> None:
        """Raise `AssertionError` if what is known does not fit together; for tests."""


OpenRules = Callable[[SlotParts], SlotMode]


def rows_of_sources(parts: SlotParts) -> dict[TaskKey, int]:
    """Return how many rows sources read at a time where nothing is measured: no more than may be pending."""
    options = dict(parts.graph.options)
    most = {
        key: options.get(parts.graph.stream_of(seat.uid), StreamOptions()).max_pending
        for key, seat in parts.seating.seats.items()
        if seat.is_source
    }
    return {key: min(parts.options.batch_rows, pending) for key, pending in most.items()}


def misplaced(what: object) -> CodecError:
    """Return the error for what belongs to another mode."""
    return CodecError(f"{type(what).__name__} came to a slot whose job runs in another mode")
