"""Where a reader source has come to in a job without checkpoints: positions are in the vertex, or nowhere."""

from __future__ import annotations

from typing import NoReturn

from ftlayer.runtime.driver.splits import PlannedRange


class PositionKeeper:
    """`RangeKeeper` where it is asked how far the source was accepted.

    What an open range of an earlier run has left is read first. If the reader plans it as it did (equal digests), its
    splits go on where they were accepted; otherwise it is read again as a whole, and rows that were accepted before
    come again (at least once; a warning says so).

    The reader commits a range once all its rows are accepted. A range without splits is not committed by itself:
    nothing durable says that it was there, so after a restart the source is read from its start again.
    """

    outlives_subtasks = True
    reads_again = False

    def __init__(self) -> None:
        self._uncommitted = False

    def handle(self, event: NoReturn, first_unread: int) -> None:
        """See `RangeKeeper`: there are no events."""

    def begun(self, at: str, number: int) -> None:
        self._uncommitted = number > 0

    def opened(self, planned: PlannedRange) -> None:
        self._uncommitted = True

    def moved(self, end: str) -> None:
        """See `RangeKeeper`."""

    def passed(self, end: str) -> None:
        """See `RangeKeeper`: what is accepted is not read again."""

    def to_commit(self, complete: str | None) -> str | None:
        return complete if self._uncommitted else None

    def committed(self, end: str) -> None:
        self._uncommitted = False
