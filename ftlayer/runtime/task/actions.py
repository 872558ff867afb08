"""A task's decisions, carried out by the slot in their order."""

from __future__ import annotations

import pyarrow as pa

from ftlayer.common.checks import fast_dataclass
from ftlayer.errors import ProtocolError
from ftlayer.records.ids import I64Array, U64Array
from ftlayer.runtime.protocol import messages
from ftlayer.runtime.protocol.messages import DataEnded as DataEnded
from ftlayer.runtime.protocol.messages import Element, Splits
from ftlayer.runtime.protocol.messages import ReplaysOut as ReplaysOut
from ftlayer.topology.job_graph import Channel
from ftlayer.vertex import calls


@fast_dataclass
class TaskStart:
    """Begin; comes once, before anything else."""


@fast_dataclass
class TimeCame:
    """Do what time brings (timers, idle sources, sinks that wait); it does no harm if it comes early."""


@fast_dataclass
class RowsPersisted:
    """The vertex has persisted, or registered, what `PersistRoots` with this ticket asked for.

    ``segment`` names a range that was registered.
    """

    ticket: int
    segment: int = -1


# ---------------------------------------------------------------- with inputs


@fast_dataclass
class ElementCame:
    """Take one element. Elements of one channel come in their order. Barriers never come."""

    channel: Channel
    element: Element


@fast_dataclass
class ChannelReset:
    """The sender is gone and another one will begin afresh: forget what the channel said of watermark and end."""

    channel: Channel


# ---------------------------------------------------------------- sources


@fast_dataclass
class SourceRows:
    """Rows of one split of a source, in their order, which its reader has read.

    ``partition`` names the split over restarts, ``number`` is a small number of it within this run, and
    ``first_ordinal`` counts the rows this run has read of it before: both go into the root ids.
    ``position`` None: the source cannot rewind. ``places``, int64[n], ascending, is what each row's ordinal is where
    they have gaps; None: they follow each other. ``ends``: the split ends behind them. ``splits``: those that are read
    now, this one among them, which is called ``split`` there; None: this one alone, by its number. ``left``: those that
    are behind these rows.
    ``misfit``: why the one row, whose ``payload`` says what it looks like, does not fit the source's schema; ``aside``:
    such rows that were read with these, without positions of their own.
    """

    partition: str
    number: int
    first_ordinal: int
    payload: pa.RecordBatch
    position: calls.SourcePosition | None
    places: I64Array | None = None
    ends: bool = False
    splits: Splits | None = None
    left: Splits | None = None
    split: int | None = None
    misfit: str = ""
    aside: tuple[SourceRows, ...] = ()

    @property
    def in_time(self) -> int:
        return self.number if self.split is None else self.split

    @property
    def span(self) -> int:
        """How many ordinals they take; the end of a split takes one."""
        rows: int = self.payload.num_rows
        if self.places is not None and rows:
            rows = int(self.places[-1]) + 1 - self.first_ordinal
        return rows + self.ends

    @property
    def taken(self) -> TakenRows:
        return TakenRows(self.number, self.first_ordinal, self.position)


@fast_dataclass
class TakenRows:
    """Which rows `SourceRows` were, without the rows: what is remembered until they need not be read again."""

    number: int
    first_ordinal: int
    position: calls.SourcePosition | None


@fast_dataclass
class SourceOver:
    """There are no more rows."""


@fast_dataclass
class RangesAnswered:
    number: int
    reply: calls.TakenOver | calls.RangesTold | calls.RowsStored


@fast_dataclass
class RangesLost:
    """The vertex of this incarnation has lost its memory: calls that named it are not answered any more."""

    incarnation: int


# ---------------------------------------------------------------- replays


@fast_dataclass
class Replayed:
    """The answer to `AskReplays`. ``held``: a circuit breaker holds what there may be beyond."""

    records: tuple[calls.Records, ...]
    held: bool = False


@fast_dataclass
class PeersAway:
    """A slot is away: ask for nothing until `PeersThere`. What is answered goes out."""


@fast_dataclass
class PeersThere:
    """All slots are there again."""


TaskEvent = (
    TaskStart
    | TimeCame
    | RowsPersisted
    | ElementCame
    | ChannelReset
    | SourceRows
    | SourceOver
    | RangesAnswered
    | RangesLost
    | Replayed
    | PeersAway
    | PeersThere
    | messages.ReplayNow
    | messages.PauseIntake
    | messages.ResumeIntake
    | messages.AllowReplays
    | messages.LetOut
    | messages.EndReplays
    | messages.EndTasks
    | messages.Readmit
    | messages.LoopWaits
)
"""The first three come to every task, the next two to those with inputs, and two to sources.

The others are of one mode: those from `Replayed` to `EndReplays` come to `ReplayTask`; in barrier mode `EndTasks` comes
to sources, `Readmit` to chains with a failure policy, `LoopWaits` to heads of loops. What the coordinator says is
explained in `ftlayer.runtime.protocol.messages`.
"""


def refused(uid: str, event: TaskEvent) -> ProtocolError:
    return ProtocolError(f"{uid!r} was given {type(event).__name__}, which does not come to such a task")


@fast_dataclass
class Send:
    channel: Channel
    element: Element


@fast_dataclass
class PersistRoots:
    """Have the vertex persist new roots, or register them, and tell the task when it has (`RowsPersisted`)."""

    ticket: int
    call: calls.Persist | calls.Register


@fast_dataclass
class CallRanges:
    number: int
    call: calls.TakeOver | calls.AskRanges | calls.StoreRows


@fast_dataclass
class Acknowledge:
    """XOR events: ``values[i]`` for ``roots[i]``, both uint64[m]; ``values`` None: those of the roots themselves."""

    roots: U64Array
    values: U64Array | None
    ids: calls.EventIds | None = None


@fast_dataclass
class FailRoots:
    failures: tuple[calls.Failure, ...]


@fast_dataclass
class AskReplays:
    """Take up to ``limit`` due replays of ``stream`` and hand them to the task (`replays(records)`)."""

    stream: str
    limit: int


@fast_dataclass
class WakeAt:
    """Call the task's `on_time` at this monotone time (ms), or soon after."""

    mono_ms: int


@fast_dataclass
class HoldInput:
    """Give the task nothing from its inputs before its `on_time`, which is to be called as `WakeAt` says."""

    mono_ms: int


@fast_dataclass
class TaskEnded:
    """The task has sent its last element and holds nothing."""


Action = (
    Send
    | PersistRoots
    | CallRanges
    | Acknowledge
    | FailRoots
    | AskReplays
    | ReplaysOut
    | WakeAt
    | HoldInput
    | DataEnded
    | TaskEnded
)
