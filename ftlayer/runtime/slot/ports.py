"""What the rules of a slot need of the world, and what they tell it of what they do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ftlayer.handler.lineage import Lineage
from ftlayer.layer.calls import Failure, Persist
from ftlayer.records.ids import U64Array
from ftlayer.runtime.actions import Acknowledge, AskReplays
from ftlayer.runtime.slot.seat import AnyTask, TaskKey


class Links(Protocol):
    """The way to other slots. Nothing here waits."""

    def transmit(self, slot: int, frame: bytes) -> None:
        """Send an element."""

    def grant(self, slot: int, grants: bytes) -> None:
        """Give credit back."""


class VertexCalls(Protocol):
    """The way to the vertex. Nothing here waits; answers come as calls of `SlotCore`."""

    @property
    def may_persist(self) -> bool:
        """Whether more can be persisted without queueing here."""

    @property
    def is_quiet(self) -> bool:
        """Whether everything that changes something has its answer."""

    def persist(self, key: TaskKey, ticket: int, call: Persist) -> None:
        """Persist; `SlotCore.accepted` follows."""

    def xor(self, event: Acknowledge) -> None:
        """Tell of XOR events."""

    def fail(self, failures: tuple[Failure, ...]) -> None:
        """End attempts."""

    def take_replays(self, key: TaskKey, ask: AskReplays) -> None:
        """Ask for replays; `SlotCore.replays` follows."""


@dataclass(frozen=True, slots=True)
class Working:
    """What the loop is busy with: a chain, its task, the roots of its batch, and since when (monotone, ms).

    ``lineage`` says which of the batch's rows has which roots; None where there is no batch.
    """

    uid: str
    task: AnyTask
    roots: tuple[U64Array, ...]
    since_ms: int
    lineage: Lineage | None = None
