"""What a mode adds to the rules of a slot: `SlotCore` owns one. No I/O, no threads, no clock."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from ftlayer.clock import Now
from ftlayer.config import TopologyOptions
from ftlayer.errors import CodecError
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
    PauseIntake,
    ReplayNow,
    ResumeIntake,
    TriggerCheckpoint,
)
from ftlayer.runtime.slot.crediting import Crediting
from ftlayer.runtime.slot.events import ReplaysCame, RootsAccepted
from ftlayer.runtime.slot.outgoing import Outgoing
from ftlayer.runtime.slot.seat import Seat, Seating
from ftlayer.runtime.task.actions import (
    Acknowledge,
    Action,
    AskReplays,
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
    | ReplayNow
    | PauseIntake
    | ResumeIntake
    | AllowReplays
    | LetOut
    | EndReplays
    | TriggerCheckpoint
    | CheckpointCompleted
    | CheckpointAborted
    | EndTasks
)
"""What a mode alone understands."""

ModeAction = PersistRoots | Acknowledge | FailRoots | AskReplays | ReplaysOut | DataEnded
"""What a task decides that its mode carries out."""


class RunTask(Protocol):
    """Gives a task an event, and does what it decides."""

    def __call__(
        self,
        seat: Seat,
        event: TaskEvent,
        now: Now,
        roots: tuple[U64Array, ...] = (),
        *,
        counts: bool = True,
    ) -> None:
        """``roots`` are those of what it works on; ``counts``: it is activity."""


@dataclass(frozen=True)
class SlotParts:
    """What a mode is given of its slot.

    ``run`` gives a task an event, ``run_part`` has another part of a task's work done.
    """

    graph: JobGraph
    options: TopologyOptions
    seating: Seating
    codec: ElementCodec
    outgoing: Outgoing
    credit: Crediting
    run: RunTask
    run_part: Callable[[Seat, Callable[[], list[Action]], Now], None]


class SlotMode(Protocol):
    """One mode's rules in one slot."""

    activity: int
    """Grows with what happens here alone (see `Heartbeat`); any thread may read it."""

    def handle(self, event: ModeEvent, now: Now) -> None:
        """Take an event of the mode; `CodecError` for one of another mode."""

    def act(self, seat: Seat, action: ModeAction, now_ms: int) -> None:
        """Do what a task has decided."""

    # ------------------------------------------------------------ elements

    def arrived(self, channel: Channel, barrier: Barrier, size: int) -> None:
        """A barrier was put into the inbox of its receiver; ``size`` is the credit that it has used."""

    def takes(self, seat: Seat, channel: Channel, mark: Element, now: Now) -> bool:
        """A mark has come to its turn; whether it was for the mode, and not for the task."""

    def worked(self, seat: Seat, size: int, now_ms: int) -> None:
        """A task is given ``size`` bytes, or rows if it is a source's."""

    def source_ended(self, seat: Seat) -> None:
        """A source has no more rows, and its task knows."""

    # ------------------------------------------------------------ time

    def before_turn(self, now: Now) -> None:
        """A task is to be run next: do what is due."""

    def on_time(self, now: Now) -> None:
        """Do what time and room bring."""

    def rest(self, now_ms: int) -> None:
        """There is nothing else to do: let go what is due."""

    @property
    def due_ms(self) -> int | None:
        """When one of the three has something to do (monotone, ms); None: not until something happens."""

    # ------------------------------------------------------------ peers

    def peers_dropped(self, slots: Collection[int], now: Now) -> None:
        """These slots are gone, and others will take their place."""

    def peers_back(self, slots: Collection[int], now: Now) -> None:
        """These slots have new instances."""

    # ------------------------------------------------------------ what is known of it

    def may_read(self, seat: Seat) -> bool:
        """Whether a source should read on, as far as the mode is concerned."""

    def rows_wanted(self, key: TaskKey) -> int:
        """Return how many rows a source should read at a time."""

    def unaccepted(self, key: TaskKey) -> Collection[int]:
        """Return the tickets of a source's rows that are not persisted yet."""

    @property
    def is_open(self) -> bool:
        """Whether records may still come into the slot other than from other slots."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits here, or for the mode's own calls."""

    def counters(self) -> dict[str, int]:
        """Return totals by name; any thread."""

    def held_roots(self) -> list[U64Array]:
        """Return the roots of all that waits here. Any thread: what it reads is replaced, never changed."""


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
