"""When the demo kills what: by the progress of the run, never by the clock."""

from __future__ import annotations

from dataclasses import dataclass

from ftlayer.demo.choices import Kill, Kind, Victim, doomed


@dataclass
class KillPlan:
    """Kills that are still to come, and at which progress: (victim, batch or line) in order."""

    left: list[tuple[Victim, int]]

    @classmethod
    def of(cls, kind: Kind, kill: Kill, total: int) -> KillPlan:
        """Plan for a run of ``total`` batches or lines. Raises `ConfigError` as `doomed` does."""
        return cls([(victim, int(total * share)) for victim, share in doomed(kind, kill)])

    def due(self, progress: int) -> Victim | None:
        """Return what is to be killed now, once."""
        if self.left and progress >= self.left[0][1]:
            return self.left.pop(0)[0]
        return None
