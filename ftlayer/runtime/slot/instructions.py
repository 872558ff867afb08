"""What a slot's rules want done: the loop carries it out, in order."""

from __future__ import annotations

from dataclasses import dataclass

from ftlayer.handler.record_ids import RecordIds
from ftlayer.records.ids import U64Array
from ftlayer.runtime.protocol.messages import FromSlot
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.runtime.task.events import TaskEvent


class ModeWork:
    """A part of a task's work that its mode alone understands; each mode has its own."""

    __slots__ = ()


class ModeInstruction:
    """What a mode alone understands, and its shell carries out; each mode has its own."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Transmit:
    slot: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class Grant:
    """Give credit back to another slot, or say how much is wanted in flight."""

    slot: int
    grants: bytes


@dataclass(frozen=True, slots=True)
class TellCoordinator:
    message: FromSlot


@dataclass(frozen=True, slots=True)
class RowsDone:
    """What a source has read is the slot's own now (see `RowsRead`), and need not be read again."""

    key: TaskKey
    number: int


SlotInstruction = RunTask | Transmit | Grant | TellCoordinator | RowsDone | ModeInstruction
