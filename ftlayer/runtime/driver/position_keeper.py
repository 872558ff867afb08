"""Where a reader source has come to in a job without checkpoints: positions are in the vertex, or nowhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ftlayer.runtime.connectors.positions import RangeProgress, progress_of
from ftlayer.runtime.driver.range_keeper import Beginning, KeeperInstruction
from ftlayer.runtime.driver.splits import PlannedRange
from ftlayer.runtime.protocol.messages import AssignSplits


class PositionKeeper:
    """`RangeKeeper` that asks for the positions that were accepted.

    What an open range of an earlier run has left is read first. If the reader plans it as it did (equal digests), its
    splits go on where they were accepted; otherwise it is read again as a whole, and rows that were accepted before
    come again (at least once; a warning says so).

    The reader commits a range once all its rows are accepted. A range without splits is not committed by itself:
    nothing durable says that it was there, so after a restart the source is read from its start again.
    """

    is_current = True
    takes_from_lost = True

    def __init__(self, source: str, positions: Callable[[], Mapping[str, bytes]]) -> None:
        """``positions`` returns the source's (`StreamOpened.positions`), {} where they are not kept; it may block."""
        self._source = source
        self._positions = positions
        self._uncommitted = False

    def handle(self, event: NoReturn, open_range: int | None) -> Sequence[KeeperInstruction]:
        """See `RangeKeeper`: there are no events."""
        return ()

    def beginning(self) -> Beginning:
        """See `RangeKeeper`."""
        progress = self._progress()
        self._uncommitted = progress is not None
        if progress is None:
            return Beginning(None, 0)
        return Beginning(progress.end, progress.number, None if progress.complete else progress)

    def begun(self, at: str) -> bool:
        """See `RangeKeeper`."""
        return True

    def next_restored(self) -> None:
        """See `RangeKeeper`: there is no restore."""

    def opened(self, planned: PlannedRange, splits: Sequence[Any]) -> None:
        """See `RangeKeeper`."""
        self._uncommitted = True

    def moved(self, end: str) -> None:
        """See `RangeKeeper`."""

    def progress(self, planned: PlannedRange) -> RangeProgress | None:
        """See `RangeKeeper`."""
        return self._progress()

    def to_commit(self, at: str) -> str | None:
        """See `RangeKeeper`."""
        return at if self._uncommitted else None

    def committed(self, end: str) -> None:
        """See `RangeKeeper`."""
        self._uncommitted = False

    def pass_on(self, messages: Sequence[AssignSplits], send: Callable[[AssignSplits], None]) -> None:
        """See `RangeKeeper`."""
        for message in messages:
            send(message)

    def _progress(self) -> RangeProgress | None:
        return progress_of(self._source, self._positions())
