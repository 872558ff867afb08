"""The events that reach a slot's loop through its mailbox."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from ftlayer.runtime.protocol.messages import ToSlot
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.vertex.calls import Records


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
    """The vertex has persisted what a task asked for."""

    key: TaskKey
    ticket: int


@dataclass(frozen=True, slots=True)
class ReplaysCame:
    """The vertex has answered a task's `AskReplays`. ``held``: there may be more, which a circuit breaker holds."""

    key: TaskKey
    records: tuple[Records, ...]
    held: bool = False


@dataclass(frozen=True, slots=True)
class PartFailed:
    """A thread that the slot cannot do without has failed: the vertex has refused a call, or does not answer."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Wake:
    """Something the loop looks at by itself has changed: a reader has rows, a call has its answer."""


@dataclass(frozen=True, slots=True)
class CoordinatorSaid:
    """A message of the coordinator."""

    message: ToSlot


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """The control stream has ended."""

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
    | PartFailed
    | Wake
    | CoordinatorSaid
    | CoordinatorLost
    | SnapshotOver
)
