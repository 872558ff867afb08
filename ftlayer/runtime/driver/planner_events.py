"""What the planner of a reader source is told, what it asks its reader, and what it wants done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from ftlayer.runtime.connectors.positions import RangeProgress
from ftlayer.runtime.driver.splits import PlannedRange
from ftlayer.runtime.protocol.messages import AssignSplits, SplitDone

# ---------------------------------------------------------------- what is asked, and what is answered


@dataclass(frozen=True, slots=True)
class AskProgress:
    """How far was the source accepted? Not a question for the reader: what outlives subtasks is asked."""


@dataclass(frozen=True, slots=True)
class ProgressIs:
    """As `ftlayer.runtime.connectors.positions.progress_of` returns it; (): nothing was accepted."""

    progress: tuple[RangeProgress, ...]


@dataclass(frozen=True, slots=True)
class AskInitial:
    """At which offset does the source begin?"""


@dataclass(frozen=True, slots=True)
class InitialIs:
    at: str


@dataclass(frozen=True, slots=True)
class FindEnd:
    """Have the reader end with what there is now; ``start`` is where it is read from."""

    start: str


@dataclass(frozen=True, slots=True)
class EndIs:
    """The source ends here; None: the reader itself goes no further than its end."""

    end: str | None


@dataclass(frozen=True, slots=True)
class AskLatest:
    """How far can the source be read from ``start`` now, within the reader's limit?"""

    start: str


@dataclass(frozen=True, slots=True)
class LatestIs:
    """It can be read up to here."""

    end: str


@dataclass(frozen=True, slots=True)
class AskSplits:
    """Which splits has the range from ``start`` to ``end``?

    ``digest`` is the one that they have to have, since rows of them are to be read again; b"" for any.
    """

    start: str
    end: str
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class SplitsAre:
    """The splits of the range.

    Attributes:
        digest: of the partition objects.
        payloads: the splits, sealed; () for a range without any.
        kept: the splits, sealed, without rows that were read ahead.
    """

    start: str
    end: str
    digest: bytes
    payloads: tuple[bytes, ...]
    kept: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class KeepRange:
    """Note durably that this range is opened; those below number ``first`` need not be noted any more.

    Not for the reader: what `AskProgress` asks is told.
    """

    planned: PlannedRange
    first: int


@dataclass(frozen=True, slots=True)
class RangeKept:
    """It is noted."""


@dataclass(frozen=True, slots=True)
class AskBacklog:
    """Could more than up to ``end`` be read from ``start`` now?"""

    start: str
    end: str


@dataclass(frozen=True, slots=True)
class BacklogIs:
    """Whether the reader's limit cuts what there is to read."""

    is_behind: bool


@dataclass(frozen=True, slots=True)
class AskLag:
    """How many records are there behind this offset?"""

    at: str


@dataclass(frozen=True, slots=True)
class LagIs:
    """So many records are there; None: the reader cannot tell."""

    records: int | None


@dataclass(frozen=True, slots=True)
class CommitOffset:
    """The reader is to commit up to here."""

    end: str


@dataclass(frozen=True, slots=True)
class OffsetCommitted:
    """The reader has committed up to here."""

    end: str


ReaderCall: TypeAlias = (
    AskProgress
    | AskInitial
    | FindEnd
    | AskLatest
    | AskSplits
    | KeepRange
    | AskBacklog
    | AskLag
    | CommitOffset
)
ReaderAnswer: TypeAlias = (
    ProgressIs | InitialIs | EndIs | LatestIs | SplitsAre | RangeKept | BacklogIs | LagIs | OffsetCommitted
)


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class ReaderAnswered:
    """A call has succeeded. ``generation`` is that of its `CallReader`."""

    generation: int
    answer: ReaderAnswer


@dataclass(frozen=True, slots=True)
class SubtaskUp:
    """A new instance runs this subtask: it knows of no splits yet."""

    subtask: int


@dataclass(frozen=True, slots=True)
class SubtaskDown:
    """The subtask is lost, with all splits it has not reported."""

    subtask: int


@dataclass(frozen=True, slots=True)
class DrainSource:
    """No further ranges are to be opened. One that is complete is committed still."""


@dataclass(frozen=True, slots=True)
class CloseSource:
    """The reader is to be stopped, behind what it is to commit by now."""


@dataclass(frozen=True, slots=True)
class KeeperEvent:
    """An event of the mode alone, for the `RangeKeeper`."""

    event: Any


@dataclass(frozen=True, slots=True)
class PollDue:
    """The time has come that the rules were to be told of (`PlannerRules.due_ms`)."""


PlannerEvent: TypeAlias = (
    ReaderAnswered | SubtaskUp | SubtaskDown | SplitDone | DrainSource | CloseSource | KeeperEvent | PollDue
)


# ---------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class CallReader:
    """Carry this call out, and no earlier one that is not begun; the answer is a `ReaderAnswered`."""

    generation: int
    call: ReaderCall


@dataclass(frozen=True, slots=True)
class TellBacklog:
    """Say whether the source works off a backlog."""

    is_behind: bool


@dataclass(frozen=True, slots=True)
class WarnReadAgain:
    """A range is planned otherwise than before: its rows that were accepted will come again."""

    progress: RangeProgress


@dataclass(frozen=True, slots=True)
class StopReader:
    """Stop the reader. There are no calls behind this."""


PlannerInstruction: TypeAlias = CallReader | AssignSplits | TellBacklog | WarnReadAgain | StopReader
