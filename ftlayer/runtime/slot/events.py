"""The events of a slot: what its loop hears by its mailbox, and what it tells the rules."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from ftlayer.runtime.protocol.messages import ToSlot
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.runtime.task.events import SourceRows
from ftlayer.vertex.calls import RangesTold, Records, RowsStored, TakenOver


@dataclass(frozen=True, slots=True)
class FrameCame:
    """An instance of another slot has sent an element."""

    slot: int
    instance: str
    data: pa.Buffer


@dataclass(frozen=True, slots=True)
class CreditCame:
    """An instance of another slot has given credit back."""

    slot: int
    instance: str
    data: bytes


@dataclass(frozen=True, slots=True)
class LinkBroke:
    """The stream to an instance of another slot has ended, or (not ``reached``) it never answered."""

    slot: int
    instance: str
    reason: str
    reached: bool = True


@dataclass(frozen=True, slots=True)
class RootsAccepted:
    """The vertex has persisted, or registered as ``segment``, what a task asked for, ``took_s`` seconds ago."""

    key: TaskKey
    ticket: int
    took_s: float = field(default=0.0, compare=False)
    segment: int = -1


@dataclass(frozen=True, slots=True)
class ReplaysCame:
    """The vertex has answered a task's `AskReplays`. ``held``: there may be more, which a circuit breaker holds."""

    key: TaskKey
    records: tuple[Records, ...]
    held: bool = False


@dataclass(frozen=True, slots=True)
class RangesCame:
    """The answer to a task's `CallRanges` with this number."""

    key: TaskKey
    number: int
    reply: TakenOver | RangesTold | RowsStored


@dataclass(frozen=True, slots=True)
class RangesRefused:
    """The vertex has lost what it was told under this incarnation: calls of this task are not answered any more."""

    key: TaskKey
    incarnation: int


@dataclass(frozen=True, slots=True)
class PartFailed:
    """A thread that the slot cannot do without has failed: the vertex has refused a call, or does not answer."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Wake:
    """Something the loop looks at by itself has changed: a reader has rows, a call has its answer."""


@dataclass(frozen=True, slots=True)
class CoordinatorSaid:
    message: ToSlot


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    reason: str


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class SlotStarted:
    """The slot is deployed: all tasks begin."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Do what is due and what has become possible. Comes before each `Turn`, and does no harm if it comes early.

    ``cpu_ms`` is the CPU time that the loop's thread has taken so far.
    """

    cpu_ms: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Run the task whose turn it is; there is one (`SlotCore.can_run`)."""


@dataclass(frozen=True, slots=True)
class Rest:
    """There is nothing else to do: let no record wait for others, and let go what is due."""


@dataclass(frozen=True, slots=True)
class RowsRead:
    """A source has read rows; `RowsDone` with this number follows."""

    key: TaskKey
    number: int
    rows: SourceRows


@dataclass(frozen=True, slots=True)
class SourceEnded:
    """A source has no more rows."""

    key: TaskKey


@dataclass(frozen=True, slots=True)
class PeerReached:
    slot: int


@dataclass(frozen=True, slots=True)
class PeerBroke:
    """A slot cannot be reached: hold what is for it."""

    slot: int


@dataclass(frozen=True, slots=True)
class PeersGone:
    """Slots are gone, and other instances will take their place: forget what was for them and came of them."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PeersReplaced:
    slots: tuple[int, ...]
