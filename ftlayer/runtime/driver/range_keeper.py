"""What the planner of a reader source asks of the job's mode: where the source has come to, and what is durable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from ftlayer.runtime.connectors.positions import RangeProgress
from ftlayer.runtime.driver.splits import PlannedRange
from ftlayer.runtime.protocol.messages import AssignSplits
from ftlayer.topology.operators import Source


@dataclass(frozen=True, slots=True)
class Beginning:
    """From where a source is read.

    Attributes:
        at: the offset; None: the reader's initial one.
        number: of the last range that was planned.
        unfinished: a range up to ``at`` that is to be planned again, and read to its end; None for none.
    """

    at: str | None
    number: int
    unfinished: RangeProgress | None = None


@dataclass(frozen=True, slots=True)
class StartOver:
    """All that is planned is of no use any more: `RangeKeeper.beginning` says from where it goes on."""


@dataclass(frozen=True, slots=True)
class CommitOffset:
    """The reader is to commit up to here."""

    end: str


KeeperInstruction: TypeAlias = StartOver | CommitOffset

Own_contra = TypeVar("Own_contra", contravariant=True)
"""Events of the mode alone."""


class RangeKeeper(Protocol[Own_contra]):
    """Knows where one reader source has come to. Methods are of its planner's thread."""

    @property
    def is_current(self) -> bool:
        """Whether it is known where the source is read. Otherwise an event that says so is there, or will come."""

    @property
    def takes_from_lost(self) -> bool:
        """Whether what a lost subtask has read counts, when its report comes behind the loss."""

    def handle(self, event: Own_contra, open_range: int | None) -> Sequence[KeeperInstruction]:
        """Take an event of the mode. It comes again if an instruction failed.

        ``open_range`` is the number of the range that is being read; None if it is complete.
        """

    def beginning(self) -> Beginning:
        """Return from where the source is read; errors of what is asked go to the caller."""

    def begun(self, at: str) -> bool:
        """The source is read from ``at``. Returns False if it is to be read from elsewhere by now."""

    def next_restored(self) -> PlannedRange | None:
        """Return the next range to be read with the splits it had, which counts as opened; None for no further one."""

    def opened(self, planned: PlannedRange, splits: Sequence[Any]) -> None:
        """A new range is going to be read; ``splits`` are what its payloads were made of."""

    def moved(self, end: str) -> None:
        """There is nothing to read up to ``end``."""

    def progress(self, planned: PlannedRange) -> RangeProgress | None:
        """Return how far a range was read by instances that are gone; None if nothing is known of it."""

    def to_commit(self, at: str) -> str | None:
        """All ranges up to ``at`` are complete: return what the reader is to commit now; None for nothing."""

    def committed(self, end: str) -> None:
        """The reader has committed up to here."""

    def pass_on(self, messages: Sequence[AssignSplits], send: Callable[[AssignSplits], None]) -> None:
        """Send the messages, unless the source is to be read from elsewhere by now."""


OpenKeeper: TypeAlias = Callable[[Source, Callable[[Any], None]], RangeKeeper[Any]]
"""Opens the keeper of a source. What it gives the function gets to its `RangeKeeper.handle`; any thread may call it."""
