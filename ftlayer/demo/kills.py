"""When the demo kills what: by the progress of the run, never by the clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kill(StrEnum):
    """What ``--kill`` can name."""

    NONE = "none"
    VERTEX = "vertex"
    DRIVER = "driver"
    ALL = "all"


class Victim(StrEnum):
    """What can be killed."""

    VERTEX = "vertex"
    DRIVER = "driver"


VERTEX_AT, DRIVER_AT = 0.35, 0.65
"""The shares of the batches after which they are killed."""


@dataclass
class KillPlan:
    """What is still to be killed, and at which batch: (victim, batch) in order."""

    left: list[tuple[Victim, int]]

    @classmethod
    def of(cls, kill: Kill, batches: int) -> KillPlan:
        """Plan for a run whose source has ``batches`` batches."""
        left = []
        if kill in (Kill.VERTEX, Kill.ALL):
            left.append((Victim.VERTEX, int(batches * VERTEX_AT)))
        if kill in (Kill.DRIVER, Kill.ALL):
            left.append((Victim.DRIVER, int(batches * DRIVER_AT)))
        return cls(left)

    def due(self, batch: int) -> Victim | None:
        """Return what is to be killed while ``batch`` is being written, once."""
        if self.left and batch >= self.left[0][1]:
            return self.left.pop(0)[0]
        return None
