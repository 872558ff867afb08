"""Rows of a queue's source that are not done before a checkpoint has them: their messages are pending until then."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class HeldRows:
    """What one source has read, by the numbers of `RowsRead`, until a checkpoint is complete that holds it.

    Where a checkpoint is given up, a later one holds its rows too.
    """

    _since: list[int] = field(default_factory=list)
    _before: deque[tuple[int, list[int]]] = field(default_factory=deque)

    def read(self, number: int) -> None:
        self._since.append(number)

    def snapshot(self, checkpoint: int) -> None:
        """The source has taken its snapshot for a checkpoint, behind all that it has read."""
        self._before.append((checkpoint, self._since))
        self._since = []

    def completed(self, checkpoint: int) -> list[int]:
        """A checkpoint is complete, and no restore goes behind it: return what is done now, in order."""
        done: list[int] = []
        while self._before and self._before[0][0] <= checkpoint:
            done += self._before.popleft()[1]
        return done
