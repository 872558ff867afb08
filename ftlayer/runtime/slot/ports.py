"""The way from a slot's rules to other slots, and what observers may see of the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ftlayer.handler.lineage import Lineage
from ftlayer.records.ids import U64Array
from ftlayer.runtime.task.contract import Task


class Links(Protocol):
    """The way to other slots. Nothing here waits."""

    def transmit(self, slot: int, frame: bytes) -> None:
        """Send an element."""

    def grant(self, slot: int, grants: bytes) -> None:
        """Give credit back."""


@dataclass(frozen=True, slots=True)
class Working:
    """What the loop is busy with: a chain, its task, the roots of its batch, and since when (monotone, ms).

    ``lineage`` says which of the batch's rows has which roots; None where there is no batch.
    """

    uid: str
    task: Task
    roots: tuple[U64Array, ...]
    since_ms: int
    lineage: Lineage | None = None
