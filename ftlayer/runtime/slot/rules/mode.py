"""What a mode adds to the rules of a slot: `SlotCore` owns one. No I/O, no threads, no clock."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from ftlayer.common.clock import Now
from ftlayer.common.rules.histogram import Exemplar
from ftlayer.config import TopologyOptions
from ftlayer.errors import CodecError
from ftlayer.records.ids import U64Array
from ftlayer.runtime.connectors.sinks import open_sink
from ftlayer.runtime.protocol import messages
from ftlayer.runtime.protocol.channel_frames import ElementCodec
from ftlayer.runtime.protocol.messages import Barrier, Element, SlotOrder
from ftlayer.runtime.slot.rules import events
from ftlayer.runtime.slot.rules.credit import Crediting
from ftlayer.runtime.slot.rules.outgoing import Outgoing
from ftlayer.runtime.slot.rules.subtask import Seat, Seating
from ftlayer.runtime.task.actions import (
    Acknowledge,
    Action,
    AskReplays,
    CallRanges,
    DataEnded,
    FailRoots,
    PersistRoots,
    ReplaysOut,
    TaskEvent,
)
from ftlayer.runtime.task.chain_plan import TaskMode
from ftlayer.runtime.task.contract import RecordNotes, TaskKey
from ftlayer.runtime.task.untracked import UntrackedTaskMode
from ftlayer.topology.job_graph import Channel, JobGraph
from ftlayer.vertex.calls import StreamOptions


class RunTracer(Protocol):
    """Makes spans of runs. Called by the loop, behind each."""

    def ran(
        self, run: events.RunTask, decided: Sequence[events.SlotInstruction], start_ns: int, end_ns: int
    ) -> None:
        """A task has run from ``start_ns`` to ``end_ns`` (Unix), and this was decided in its course."""


ModeEvent = (
    events.RootsAccepted
    | events.ReplaysCame
    | events.RangesCame
    | events.RangesRefused
    | messages.ReplayNow
    | messages.PauseIntake
    | messages.ResumeIntake
    | messages.AllowReplays
    | messages.LetOut
    | messages.EndReplays
    | messages.TriggerCheckpoint
    | messages.CheckpointCompleted
    | messages.CheckpointAborted
    | messages.Readmit
    | messages.LoopWaits
    | messages.EndTasks
    | events.SnapshotOver
)
"""What a mode alone understands."""

ModeAction = PersistRoots | CallRanges | Acknowledge | FailRoots | AskReplays | ReplaysOut | DataEnded
"""What a task decides that its mode carries out."""


Instructions: TypeAlias = Sequence[events.SlotInstruction]


@dataclass(frozen=True)
class SlotParts:
    graph: JobGraph
    options: TopologyOptions
    seating: Seating
    codec: ElementCodec
    outgoing: Outgoing
    credit: Crediting


class SlotMode:
    """By default a mode does nothing, and waits for nothing."""

    activity: int
    """Grows with what happens here alone (see `Heartbeat`); any thread may read it."""

    @abstractmethod
    def handle(self, event: ModeEvent, now: Now) -> Instructions:
        """Take an event of the mode; `CodecError` for one of another mode."""

    # ------------------------------------------------------------ tasks

    def work(self, seat: Seat, work: events.ModeWork, now: Now) -> list[Action]:
        """Do a part of a task's work (see `RunTask`); returns what is to be done for it."""
        raise misplaced(work)

    @abstractmethod
    def act(self, seat: Seat, action: ModeAction, now_ms: int) -> Instructions:
        """Carry out what a task has decided."""

    def ran(self, seat: Seat, event: TaskEvent | events.ModeWork, now: Now) -> Instructions:
        """A task has worked an event off, and what it decided is carried out."""
        return ()

    @abstractmethod
    def read(self, seat: Seat, read: events.RowsRead, now_ms: int) -> Instructions:
        """A source has read rows: have its task run, and say when they are done (`RowsDone`)."""

    def source_ended(self, seat: Seat) -> Instructions:
        """A source has no more rows; its task hears of it before this is carried out."""
        return ()

    # ------------------------------------------------------------ elements

    def arrived(self, channel: Channel, barrier: Barrier, size: int) -> None:
        """A barrier was put into the inbox of its receiver; ``size`` is the credit that it has used."""
        raise misplaced(barrier)

    def takes(self, seat: Seat, channel: Channel, mark: Element, now: Now) -> Instructions | None:
        """Take a mark that has come to its turn; None: it is the task's."""
        return None

    def worked(self, seat: Seat, size: int, now_ms: int) -> Instructions:
        return ()

    # ------------------------------------------------------------ time

    def on_time(self, now: Now) -> Instructions:
        return ()

    def is_due(self, now_ms: int) -> bool:
        return False

    def rest(self, now_ms: int) -> Instructions:
        """There is nothing else to do: let go what is due."""
        return ()

    @property
    def due_ms(self) -> int | None:
        """When `on_time` or `rest` has something to do (monotone, ms); None: not until something happens."""
        return None

    # ------------------------------------------------------------ peers

    def peers_gone(self, slots: Collection[int]) -> Instructions:
        return ()

    def peers_replaced(self, slots: Collection[int]) -> Instructions:
        return ()

    # ------------------------------------------------------------ what is known of it

    def may_read(self, seat: Seat) -> bool:
        """Whether a source should read on, as far as the mode is concerned."""
        return True

    def reads_early(self, seat: Seat) -> bool:
        """Whether a source's rows need not wait for others while the slot has nothing else to do."""
        return False

    @abstractmethod
    def rows_wanted(self, key: TaskKey) -> int:
        """Return how many rows a source should read at a time."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether records may still come into the slot other than from other slots."""

    @property
    def is_quiet(self) -> bool:
        return True

    def counters(self) -> dict[str, int]:
        """Return totals by name; any thread."""
        return {}

    def exemplars(self) -> dict[str, Exemplar]:
        """Return exemplars of durations among `counters`, by name; any thread."""
        return {}

    def held_roots(self) -> list[U64Array]:
        """Return the roots of all that waits here. Any thread: what it reads is replaced, never changed."""
        return []

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
    return CodecError(f"{type(what).__name__} came to a slot whose job runs in another mode")


@dataclass(frozen=True)
class SlotContext:
    """What a mode is given of one instance of a slot.

    Attributes:
        order: what the slot was started with.
        instance: names this instance.
        post: puts an event into the loop's mailbox; any thread.
        tell: reaches the coordinator; any thread.
        barrier_waits: whether the loop has yet to look at a barrier, or at the order to send one.
    """

    order: Order
    instance: str
    post: Callable[[events.Event], None]
    tell: Callable[[messages.FromSlot], None]
    barrier_waits: Callable[[], bool]

    def run_of(self, deploy: messages.Deploy) -> str:
        """Name this instance's part in this run of the job: no other instance has the same."""
        return f"{deploy.run}/{self.instance}"


class SlotModeShell:
    """One mode's half in one instance of a slot. Methods are of the loop's thread, save what says otherwise.

    `open` comes first, then `rules`; `touch`, `end` and `close` may come before both.
    """

    @property
    def touch_timeout_ms(self) -> int | None:
        """The shortest time after which a root that is not touched times out; None: nothing is to be touched."""
        return None

    @abstractmethod
    def open(self, deploy: messages.Deploy) -> TaskMode:
        """Open what the slot needs; return what its tasks are made by."""

    @abstractmethod
    def rules(self, parts: SlotParts) -> SlotMode:
        """Return the mode's part in the rules, with all that is restored beside the tasks' state."""

    @property
    def tracer(self) -> RunTracer | None:
        """What is told of each run; None where nothing is traced. Behind `open`."""
        return None

    @property
    def notes(self) -> RecordNotes | None:
        """Where the loop notes which chain runs while a record is looked for; None: it does not. Behind `open`."""
        return None

    def positions(self, key: TaskKey) -> Mapping[str, bytes]:
        return {}

    def carry_out(self, instruction: events.ModeInstruction) -> None:
        """Do what the mode's rules want done; waits for nothing."""
        raise misplaced(instruction)

    def touch(self, roots: list[U64Array]) -> None:
        """Start the time of roots again; any thread."""

    def deaths(self) -> tuple[messages.Death, ...]:
        """Return how earlier processes of the job on this host have ended themselves; before `open`, once."""
        return ()

    def damaged(self, error: BaseException) -> int:
        """Return the checkpoint that has turned out to be damaged with an error; 0 for none."""
        return 0

    def end(self, *, over: bool, stands: int) -> None:
        """The tasks run no more; streams and heartbeats go on.

        ``over``: no other instance follows here. ``stands`` is the latest checkpoint that may stand.
        """

    def close(self) -> None:
        """All else of the instance is closed."""


class SlotModeFactory(Protocol):
    """What a slot's order says of its mode; travels pickled, and holds nothing that is open."""

    @property
    def restarts_in_place(self) -> bool:
        """Whether another instance follows in the same process when a task has failed, or when it is told to."""

    def instance(self, slot: SlotContext) -> SlotModeShell:
        """Return the mode's half of a new instance; nothing is open yet."""


Order: TypeAlias = SlotOrder[SlotModeFactory]


class UntrackedSlot(SlotMode):
    activity = 0
    due_ms = None
    is_quiet = True

    def __init__(self, parts: SlotParts) -> None:
        self._seating = parts.seating
        self._rows = rows_of_sources(parts)

    def handle(self, event: ModeEvent, now: Now) -> Instructions:
        raise misplaced(event)

    def act(self, seat: Seat, action: ModeAction, now_ms: int) -> Instructions:
        raise misplaced(action)

    def read(self, seat: Seat, read: events.RowsRead, now_ms: int) -> Instructions:
        return events.RunTask(seat.key, read.rows), events.RowsDone(seat.key, read.number)

    def rows_wanted(self, key: TaskKey) -> int:
        return self._rows[key]

    @property
    def is_open(self) -> bool:
        return self._seating.is_reading


@dataclass(frozen=True)
class UntrackedSlotFactory:
    restarts_in_place = False

    def instance(self, slot: SlotContext) -> UntrackedSlotShell:
        return UntrackedSlotShell(slot)


class UntrackedSlotShell(SlotModeShell):
    def __init__(self, slot: SlotContext) -> None:
        self._slot = slot

    def open(self, deploy: messages.Deploy) -> UntrackedTaskMode:
        return UntrackedTaskMode(partial(open_sink, run=self._slot.run_of(deploy)))

    def rules(self, parts: SlotParts) -> UntrackedSlot:
        return UntrackedSlot(parts)
