"""The boxes of a host that all processes of a world run on: what each has in hand, and how it ended itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftlayer.runtime.protocol.messages import Death


@dataclass(eq=False)
class StepBox:
    """`ftlayer.runtime.slot.black_box.BlackBox` of one instance."""

    boxes: Boxes
    process: Any
    slot: int
    instance: str
    in_hand: tuple[str, bytes] | None = None
    cause: str = ""

    def about_to(self, chain: str, digest: bytes) -> None:
        assert self.in_hand in (None, (chain, digest))
        self.in_hand = chain, digest

    def over(self) -> None:
        self.in_hand = None

    def close(self) -> None:
        self.boxes.all.remove(self)


class Boxes:
    """They outlive their processes, and are read once."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.all: list[StepBox] = []

    def open(self, directory: Path, slot: int, instance: str, chains: Sequence[str]) -> StepBox:
        box = StepBox(self, self._world.current, slot, instance)
        self.all.append(box)
        return box

    def ended(self, process: Any, cause: str) -> None:
        """A process ends itself."""
        for box in self.all:
            if box.process is process:
                box.cause = cause

    def deaths(self, parent: str | None, job: str, chains: Sequence[str]) -> tuple[Death, ...]:
        gone = [box for box in self.all if not box.process.alive]
        self.all = [box for box in self.all if box.process.alive]
        return tuple(
            Death(box.instance, box.slot, box.cause, *(box.in_hand or ())) for box in gone if box.cause
        )
