"""What a source's planner asks its reader, and what the reader answers: each call is followed by its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ftlayer.runtime.connectors.positions import RangeProgress


@dataclass(frozen=True, slots=True)
class AskProgress:
    """How far was the source accepted? Not a question for the reader: what outlives subtasks is asked."""


@dataclass(frozen=True, slots=True)
class ProgressIs:
    """None: nothing was accepted."""

    progress: RangeProgress | None


@dataclass(frozen=True, slots=True)
class AskInitial:
    """At which offset does the source begin?"""


@dataclass(frozen=True, slots=True)
class InitialIs:
    """The source begins here."""

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
    """Which splits has the range from ``start`` to ``end``?"""

    start: str
    end: str


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
class AskBacklog:
    """Could more than up to ``end`` be read from ``start`` now?"""

    start: str
    end: str


@dataclass(frozen=True, slots=True)
class BacklogIs:
    """Whether the reader's limit cuts what there is to read."""

    is_behind: bool


@dataclass(frozen=True, slots=True)
class CommitOffset:
    """The reader is to commit up to here."""

    end: str


@dataclass(frozen=True, slots=True)
class OffsetCommitted:
    """The reader has committed up to here."""

    end: str


ReaderCall: TypeAlias = AskProgress | AskInitial | FindEnd | AskLatest | AskSplits | AskBacklog | CommitOffset
ReaderAnswer: TypeAlias = ProgressIs | InitialIs | EndIs | LatestIs | SplitsAre | BacklogIs | OffsetCommitted
