"""What acker mode's rules in a slot want of the vertex; answers come back as events."""

from __future__ import annotations

from dataclasses import dataclass

from ftlayer.runtime.slot.instructions import ModeInstruction
from ftlayer.runtime.task.actions import Acknowledge, AskReplays
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.vertex.calls import Failure, Persist


@dataclass(frozen=True, slots=True)
class PersistCall(ModeInstruction):
    """Persist; `RootsAccepted` follows."""

    key: TaskKey
    ticket: int
    call: Persist


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
