"""Calls of sources that can be read again: the vertex keeps where their rows are, and not the rows themselves.

A *range* is what one `Register` brings: rows of a partition from one position to the next. Its rows are pending until
they are done, or stored because their attempt has ended. One instance of a source's subtask holds a partition: it has
the rows in memory, or reads them again, and gives those to the vertex that it asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from ftlayer.vertex.calls.common import I32, U64, EventIds, RowRoots


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows of a source's ``partition`` from position ``start`` (None: its beginning) to ``end``.

    ``number`` and ``first`` say where the rows are, in an order in which a partition is read: ``rows`` of them behind
    place ``first`` of split ``number``. They take ``span`` places: as many as there are rows, or more where a log has
    gaps between its offsets. ``digest`` is one of their values: equal rows have equal digests. Zero rows only move the
    position on.
    """

    partition: str
    start: bytes | None
    end: bytes
    number: int
    first: int
    rows: int
    span: int
    digest: bytes = b""

    @property
    def begins(self) -> tuple[int, int]:
        return self.number, self.first

    @property
    def ends(self) -> tuple[int, int]:
        return self.number, self.first + self.span


@dataclass(frozen=True, slots=True)
class NoteRange:
    """Keep what a source is read by: range ``number``, which a planner is about to open, in ``planned``. Durable.

    Those below ``first`` are forgotten: all of their rows are done, or stored. `StreamOpened` has the others.
    """

    stream: str
    number: int
    planned: bytes
    first: int
    owner: str = ""


@dataclass(frozen=True, slots=True)
class RangeNoted:
    """Reply to `NoteRange`."""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Hold these partitions of a stream from here on, as ``holder``; others' calls about them are refused."""

    stream: str
    partitions: tuple[str, ...]
    holder: str
    owner: str = ""


@dataclass(frozen=True, slots=True)
class OpenRange:
    """A range with rows that are not done; ``segment`` is what calls name it by, in this incarnation."""

    segment: int
    range: RowRange


@dataclass(frozen=True, slots=True)
class HeldPartition:
    """A partition as its holder finds it.

    Attributes:
        partition: its name.
        position: up to which its rows are registered; None: none was.
        number, place: the same as a place, see `RowRange`; -1 and 0 where none was registered.
        ranges: those that have to be held, or read again, in their order; the last one ends at ``position``, and each
            begins where the one before ends.
    """

    partition: str
    position: bytes | None
    number: int
    place: int
    ranges: tuple[OpenRange, ...]


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Reply to `TakeOver`. Calls of the holder name ``incarnation``."""

    incarnation: int
    partitions: tuple[HeldPartition, ...]


@dataclass(frozen=True, slots=True)
class Register:
    """Register rows that their holder keeps: ``values[i]`` is the XOR of the ids of all copies of row i.

    ``values`` None: there is one copy of each, and its id is the root's.

    In memory only: a vertex that is lost knows nothing of them. ``wanted``: they were registered with one that is lost;
    they are to be stored, and go out as replays.
    """

    stream: str
    range: RowRange
    roots: RowRoots
    values: U64 | None
    holder: str
    incarnation: int
    ids: EventIds | None = None
    owner: str = ""
    wanted: bool = False


@dataclass(frozen=True, slots=True)
class Registered:
    """Reply to `Register`: what the range is named from here on."""

    segment: int


@dataclass(frozen=True, slots=True)
class AskRanges:
    """What need not be held any more, and which rows are wanted?"""

    stream: str
    holder: str
    incarnation: int
    owner: str = ""


@dataclass(frozen=True, slots=True)
class WantedRows:
    """Rows of a range, by their place in it (uint64[m], ascending), that are to be stored."""

    segment: int
    rows: U64


@dataclass(frozen=True, slots=True)
class RangesTold:
    """Reply to `AskRanges`.

    ``done_below`` has for each partition of the holder the segment of the first range that has to be held: what is
    before it is done, or stored, and that is durable. Of ``wanted`` rows there may be more than a reply has.
    """

    done_below: dict[str, int]
    wanted: tuple[WantedRows, ...]


@dataclass(frozen=True, slots=True)
class StoreRows:
    """Store rows of a range whose attempt has ended; ``rows`` (uint64[m], ascending) are their places in it.

    Those that are not wanted any more are left out. From here on they are as any stored record.
    """

    stream: str
    segment: int
    rows: U64
    payload: pa.RecordBatch
    holder: str
    incarnation: int
    key_hashes: I32 | None = None  # shape (n,) or (n, selectors)
    owner: str = ""


@dataclass(frozen=True, slots=True)
class RowsStored:
    """Reply to `StoreRows`: how many were stored."""

    rows: int
