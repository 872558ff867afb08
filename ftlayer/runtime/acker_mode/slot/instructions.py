"""What acker mode's rules in a slot want of the vertex; answers come back as events."""

from __future__ import annotations

from dataclasses import dataclass

from ftlayer.runtime.slot.instructions import ModeInstruction
from ftlayer.runtime.task.actions import Acknowledge, AskReplays
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.vertex.calls import AskRanges, Failure, Persist, Register, StoreRows, TakeOver


@dataclass(frozen=True, slots=True)
class PersistCall(ModeInstruction):
    """Persist, or register; `RootsAccepted` follows, or for what is registered `RangesRefused`."""

    key: TaskKey
    ticket: int
    call: Persist | Register


@dataclass(frozen=True, slots=True)
class RangesCall(ModeInstruction):
    """Make this call; `RangesCame` follows, or `RangesRefused`."""

    key: TaskKey
    number: int
    call: TakeOver | AskRanges | StoreRows


@dataclass(frozen=True, slots=True)
class XorCall(ModeInstruction):
    """Tell of XOR events."""

    event: Acknowledge


@dataclass(frozen=True, slots=True)
class FailCall(ModeInstruction):
    """End attempts."""

    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class TakeReplaysCall(ModeInstruction):
    """Ask for replays; `ReplaysCame` follows."""

    key: TaskKey
    ask: AskReplays
