"""Where a reader source has come to whose rows are read again: up to its floors all rows are done, or stored."""

from __future__ import annotations

from typing import NoReturn

from ftlayer.runtime.driver.splits import PlannedRange


class FloorKeeper:
    """`RangeKeeper` of a reader source with ``replay="source"``.

    The vertex has the floors of its partitions, and the ranges from the first one on of which a row is not done. The
    reader commits a range once all of its rows are done or stored, and not when they are read: what is in flight has
    to be there still if a slot is lost.
    """

    outlives_subtasks = True
    reads_again = True

    def __init__(self) -> None:
        self._passed: str | None = None
        self._committed: str | None = None

    def handle(self, event: NoReturn, first_unread: int) -> None:
        """See `RangeKeeper`: there are no events."""

    def begun(self, at: str, number: int) -> None:
        """See `RangeKeeper`: where a source begins there is nothing to commit."""
        if not number:
            self._committed = at

    def opened(self, planned: PlannedRange) -> None:
        """See `RangeKeeper`."""

    def moved(self, end: str) -> None:
        """See `RangeKeeper`."""

    def passed(self, end: str) -> None:
        self._passed = end

    def to_commit(self, complete: str | None) -> str | None:
        """See `RangeKeeper`: what is read need not be done."""
        return None if self._passed == self._committed else self._passed

    def committed(self, end: str) -> None:
        self._committed = end
