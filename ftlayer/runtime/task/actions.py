"""A task's decisions, carried out by the slot in their order."""

from __future__ import annotations

from dataclasses import dataclass

from ftlayer.records.ids import U64Array
from ftlayer.runtime.protocol.elements import Element
from ftlayer.runtime.protocol.messages import DataEnded as DataEnded
from ftlayer.runtime.protocol.messages import ReplaysOut as ReplaysOut
from ftlayer.topology.job_graph import Channel
from ftlayer.vertex.calls import AskRanges, EventIds, Failure, Persist, Register, StoreRows, TakeOver


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``element`` on a channel."""

    channel: Channel
    element: Element


@dataclass(frozen=True, slots=True)
class PersistRoots:
    """Have the vertex persist new roots, or register them, and tell the task when it has (`RowsPersisted`)."""

    ticket: int
    call: Persist | Register


@dataclass(frozen=True, slots=True)
class CallRanges:
    """Call the vertex about ranges; `RangesAnswered` with this number follows, or `RangesLost`."""

    number: int
    call: TakeOver | AskRanges | StoreRows


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """XOR events: ``values[i]`` for ``roots[i]``, both uint64[m]; ``values`` None: those of the roots themselves."""

    roots: U64Array
    values: U64Array | None
    ids: EventIds | None = None


@dataclass(frozen=True, slots=True)
class FailRoots:
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class AskReplays:
    """Take up to ``limit`` due replays of ``stream`` and hand them to the task (`replays(records)`)."""

    stream: str
    limit: int


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Call the task's `on_time` at this monotone time (ms), or soon after."""

    mono_ms: int


@dataclass(frozen=True, slots=True)
class HoldInput:
    """Give the task nothing from its inputs before its `on_time`, which is to be called as `WakeAt` says."""

    mono_ms: int


@dataclass(frozen=True, slots=True)
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
