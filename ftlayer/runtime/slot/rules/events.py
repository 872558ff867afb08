"""The events of a slot: what its loop hears by its mailbox, and what it tells the rules."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from dataclasses import field
from typing import Generic, TypeVar

import pyarrow as pa

from ftlayer.common.checks import fast_dataclass
from ftlayer.records.ids import U64Array
from ftlayer.runtime.handler import RecordIds
from ftlayer.runtime.protocol.messages import FromSlot, ToSlot
from ftlayer.runtime.task.actions import SourceRows, TaskEvent
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.vertex.calls import RangesTold, Records, RowsStored, TakenOver


class ModeWork:
    """A part of a task's work that its mode alone understands; each mode has its own."""

    __slots__ = ()


class ModeInstruction:
    """What a mode alone understands, and its shell carries out; each mode has its own."""

    __slots__ = ()


@fast_dataclass
class RunTask:
    """Have a task work: give this back to the rules once all before it is carried out.

    What was decided before has left then, however long the user's function takes: frames, credit, XORs. No frame
    follows a run in a list.

    Attributes:
        key: which task.
        event: what it is given.
        roots: those of what it works on.
        lineage: which of the batch's rows has which roots; None where there is no batch.
        counts: it is activity (see `Heartbeat`).
    """

    key: TaskKey
    event: TaskEvent | ModeWork
    roots: tuple[U64Array, ...] = ()
    lineage: RecordIds | None = None
    counts: bool = True


@fast_dataclass
class Transmit:
    slot: int
    frame: bytes


@fast_dataclass
class Grant:
    slot: int
    grants: bytes


@fast_dataclass
class TellCoordinator:
    message: FromSlot


@fast_dataclass
class RowsDone:
    """What a source has read is the slot's own now (see `RowsRead`), and need not be read again."""

    key: TaskKey
    number: int


SlotInstruction = RunTask | Transmit | Grant | TellCoordinator | RowsDone | ModeInstruction


T = TypeVar("T")


def snapshot(items: deque[T]) -> list[T]:
    """Return what a deque holds at one moment, while its owner goes on changing it."""
    while True:
        try:
            return list(items)
        except RuntimeError:  # it changed while it was copied: look again
            continue


class Mailbox(Generic[T]):
    """Any thread puts, one thread gets; a `get` that waits wakes at once.

    Unlike `queue.SimpleQueue` it can be looked into, and putting costs no system call while the loop is busy.

    Attributes:
        items: what is in it; only to be looked at, by the thread that gets.
    """

    def __init__(self, is_urgent: Callable[[T], bool] = lambda _: False) -> None:
        self._is_urgent = is_urgent
        self._urgent: deque[None] = deque()  # as long as there are urgent items
        self.items: deque[T] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._asleep = False

    def put(self, item: T) -> None:
        if self._is_urgent(item):
            self._urgent.append(None)
        self.items.append(item)
        # The getter first says that it sleeps and then looks again, so one of the two sees the other.
        if self._asleep:
            self._wake.put(None)

    def take(self) -> T | None:
        if not self.items:
            return None
        item = self.items.popleft()
        if self._urgent and self._is_urgent(item):
            self._urgent.popleft()
        return item

    def has_urgent(self) -> bool:
        """Whether an urgent item is in the box; of the thread that gets."""
        return bool(self._urgent)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until there is an item, or the time has passed (None: no limit); may return early."""
        self._asleep = True
        try:
            if not self.items:
                self._wake.get(timeout=timeout_s)
        except queue.Empty:
            return
        finally:
            self._asleep = False

    def waiting(self) -> list[T]:
        return snapshot(self.items)


@fast_dataclass
class FrameCame:
    slot: int
    instance: str
    data: pa.Buffer


@fast_dataclass
class CreditCame:
    slot: int
    instance: str
    data: bytes


@fast_dataclass
class LinkBroke:
    """The stream to an instance of another slot has ended, or (not ``reached``) it never answered."""

    slot: int
    instance: str
    reason: str
    reached: bool = True


@fast_dataclass
class RootsAccepted:
    """The vertex has persisted, or registered as ``segment``, what a task asked for, ``took_s`` seconds ago."""

    key: TaskKey
    ticket: int
    took_s: float = field(default=0.0, compare=False)
    segment: int = -1


@fast_dataclass
class ReplaysCame:
    """The vertex has answered a task's `AskReplays`. ``held``: there may be more, which a circuit breaker holds."""

    key: TaskKey
    records: tuple[Records, ...]
    held: bool = False


@fast_dataclass
class RangesCame:
    key: TaskKey
    number: int
    reply: TakenOver | RangesTold | RowsStored


@fast_dataclass
class RangesRefused:
    """The vertex has lost what it was told under this incarnation: calls of this task are not answered any more."""

    key: TaskKey
    incarnation: int


@fast_dataclass
class PartFailed:
    """A thread that the slot cannot do without has failed: the vertex has refused a call, or does not answer."""

    error: BaseException


@fast_dataclass
class Wake:
    """Something the loop looks at by itself has changed: a reader has rows, a call has its answer."""


@fast_dataclass
class CoordinatorSaid:
    message: ToSlot


@fast_dataclass
class CoordinatorLost:
    reason: str


@fast_dataclass
class SnapshotOver:
    """Nothing of a task's snapshot is needed any more: it is written, or given up."""

    key: TaskKey
    checkpoint: int


Event = (
    FrameCame
    | CreditCame
    | LinkBroke
    | RootsAccepted
    | ReplaysCame
    | RangesCame
    | RangesRefused
    | PartFailed
    | Wake
    | CoordinatorSaid
    | CoordinatorLost
    | SnapshotOver
)
"""What other threads tell the loop."""


# ---------------------------------------------------------------- what the loop tells the rules


@fast_dataclass
class SlotStarted:
    """The slot is deployed: all tasks begin."""


@fast_dataclass
class TimePassed:
    """Do what is due and what has become possible. Comes before each `Turn`, and does no harm if it comes early.

    ``cpu_ms`` is the CPU time that the loop's thread has taken so far.
    """

    cpu_ms: int


@fast_dataclass
class Turn:
    """Run the task whose turn it is; there is one (`SlotCore.can_run`)."""


@fast_dataclass
class Rest:
    """There is nothing else to do: let no record wait for others, and let go what is due."""


TURN, REST = Turn(), Rest()


@fast_dataclass
class RowsRead:
    key: TaskKey
    number: int
    rows: SourceRows


@fast_dataclass
class SourceEnded:
    key: TaskKey


@fast_dataclass
class PeerReached:
    slot: int


@fast_dataclass
class PeerBroke:
    """A slot cannot be reached: hold what is for it."""

    slot: int


@fast_dataclass
class PeersGone:
    """Slots are gone, and other instances will take their place: forget what was for them and came of them."""

    slots: tuple[int, ...]


@fast_dataclass
class PeersReplaced:
    slots: tuple[int, ...]
