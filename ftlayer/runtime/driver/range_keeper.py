"""What the planner of a reader source asks of the job's mode: where the source has come to, and what is durable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from ftlayer.runtime.connectors.positions import RangeProgress
from ftlayer.runtime.driver.splits import PlannedRange
from ftlayer.topology.operators import Source


@dataclass(frozen=True, slots=True)
class Beginning:
    """From where a source is read.

    Attributes:
        at: the offset behind all that follows; None: the reader's initial one.
        number: of the last range that was planned.
        unfinished: ranges up to ``at`` that are to be planned again, and read to their ends.
        restored: ranges up to ``at`` that are read with the splits they have, and how far each was read.
    """

    at: str | None
    number: int
    unfinished: tuple[RangeProgress, ...] = ()
    restored: tuple[tuple[PlannedRange, RangeProgress], ...] = ()


Own_contra = TypeVar("Own_contra", contravariant=True)
"""Events of the mode alone."""


class RangeKeeper(Protocol[Own_contra]):
    """The mode's part of a `PlannerRules`: knows where one reader source has come to."""

    @property
    def outlives_subtasks(self) -> bool:
        """Whether what a subtask has read stays read when it is lost.

        Then the rules ask how far a source was accepted, at first and whenever a subtask is back, and a split counts
        whose report comes behind the loss. Otherwise the source goes back to where an event of the mode leads it.
        """

    @property
    def reads_again(self) -> bool:
        """Whether rows that are lost are read again: ranges are kept, and noted, until all of their rows are done.

        Then the rules ask now and then how far a source was accepted, and tell the keeper (`passed`).
        """

    def handle(self, event: Own_contra, first_unread: int) -> Beginning | None:
        """Take an event of the mode; return from where the source is read from now on, if the event says that.

        ``first_unread`` is the number of the first range that is not known to be read to its end.
        """

    def begun(self, at: str, number: int) -> None:
        """The source is read from ``at``, behind the range of that number; 0: behind none."""

    def opened(self, planned: PlannedRange) -> None:
        """A new range is going to be read. Its payloads are what is kept of it: no rows that were read ahead."""

    def moved(self, end: str) -> None:
        """There is nothing to read up to ``end``."""

    def passed(self, end: str) -> None:
        """All rows up to here are done, where they are read again."""

    def to_commit(self, complete: str | None) -> str | None:
        """Return what the reader is to commit now; None for nothing.

        ``complete``: all ranges up to there are read; None while one is not.
        """

    def committed(self, end: str) -> None:
        """The reader has committed up to here."""


@dataclass(frozen=True, slots=True)
class KeptRanges:
    """What a mode has for one reader source.

    Attributes:
        keeper: belongs to the source's planner.
        progress: returns how far the source was accepted, as `progress_of` does; may block, and raise.
        note: notes a range durably that is about to be opened, and forgets those below a number; may block, and raise.
            None where ranges need not be noted.
    """

    keeper: RangeKeeper[Any]
    progress: Callable[[], tuple[RangeProgress, ...]] = tuple
    note: Callable[[PlannedRange, int], None] | None = None


OpenKeeper: TypeAlias = Callable[[Source, Callable[[Any], None]], KeptRanges]
"""Opens what a mode has for a source. What it gives the function has got to `RangeKeeper.handle` when it returns."""
