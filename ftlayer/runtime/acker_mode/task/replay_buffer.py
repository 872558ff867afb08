"""The rows of a source's partition that are not done: kept until they are, and found again when they are read again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from ftlayer.errors import SourceChangedError, SourceError
from ftlayer.records.digests import digest_of
from ftlayer.records.ids import I32Array
from ftlayer.runtime.task.events import SourceRows
from ftlayer.vertex.calls import HeldPartition, OpenRange, RowRange

UNNAMED = -1
"""The segment of a range that the vertex has not accepted yet."""


@dataclass(slots=True)
class BufferedRange:
    """A range with its rows. ``key_hashes`` None: they are not known (yet), or there are none."""

    facts: RowRange
    payload: pa.RecordBatch
    key_hashes: I32Array | None = None
    segment: int = UNNAMED


class ReplayBuffer:
    """One partition's rows from its floor on, in their order.

    An instance that takes a partition over, and has nothing of it, is given the ranges that are open, and reads their
    rows again: `take` keeps these, and returns what is behind them. Rows that are done are left out.

    Attributes:
        head: the position up to which rows are registered, or asked to be.
        rereading: ranges that are still to be read again, in their order.
    """

    def __init__(self, source: str, partition: str) -> None:
        """``source`` is the uid, for errors."""
        self._source = source
        self._partition = partition
        self.head: bytes | None = None
        self._head_at = (-1, 0)
        # Up to which place rows were given to `take`, and from which on they are gathered.
        self._reached = self._gathered_from = (-1, 0)
        self.rereading: deque[OpenRange] = deque()
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_rows = 0
        self._ranges: deque[BufferedRange] = deque()
        self._by_segment: dict[int, BufferedRange] = {}

    def __len__(self) -> int:
        """How many ranges are kept."""
        return len(self._ranges)

    def taken_over(self, found: HeldPartition) -> list[BufferedRange]:
        """Take what the vertex knows of the partition; return what is kept and has to be registered anew.

        Raises `SourceError` if rows are wanted that are not here, and that the reader has passed: another instance
        will read them.
        """
        kept = {(each.facts.begins, each.facts.rows): each for each in self._ranges}
        self._by_segment = {}
        self.rereading = deque()
        beyond: list[BufferedRange] = []
        below: deque[BufferedRange] = deque()
        for each in found.ranges:
            mine = kept.get((each.range.begins, each.range.rows))
            if mine is not None:
                self._name(mine, each.segment)
                below.append(mine)
            elif each.range.begins < self._gathered_from:
                raise self._passed(each.range)
            else:
                self.rereading.append(each)
        head_at = found.number, found.place
        for mine in self._ranges:
            if mine.facts.begins >= head_at:
                mine.segment = UNNAMED
                beyond.append(mine)
        self.head, self._head_at = found.position, head_at
        self._ranges = below
        if self._gathered and (not self.rereading or self.rereading[0].range.begins != self._gathered_from):
            if head_at <= self._gathered_from:
                raise SourceError(
                    f"source {self._source!r}: the vertex was lost while partition {self._partition!r} was read again"
                )
            self._begin_range()
        return beyond

    def take(self, rows: SourceRows) -> SourceRows | None:
        """Keep rows that are read again; return those that are new, None if there are none.

        Raises `SourceChangedError` if these are other rows than were read at the same place before.
        """
        offset = max(self._reread(rows), _rows_before(rows, self._head_at))
        first = _place_from(rows, offset)
        ends = _ends_of(rows)
        is_new = ends > self._head_at
        if is_new and rows.number == self._head_at[0]:
            # A gap that rows which were registered end in is before the next row as well.
            first = max(first, self._head_at[1])
        self._reached = (rows.number, first) if is_new else ends
        if not self._gathered:
            self._gathered_from = self._reached
        if not is_new:
            return None
        places = None if rows.places is None else rows.places[offset:]
        return replace(rows, first_ordinal=first, payload=rows.payload.slice(offset), places=places)

    def add(self, added: BufferedRange) -> None:
        """Keep new rows, which begin at the head."""
        self._ranges.append(added)
        self.head, self._head_at = added.facts.end, added.facts.ends

    def named(self, kept: BufferedRange, segment: int) -> None:
        """The vertex has accepted a range."""
        self._name(kept, segment)

    def get(self, segment: int) -> BufferedRange | None:
        """Return a range; None if it was not read again yet, or is done."""
        return self._by_segment.get(segment)

    def forget_below(self, segment: int) -> None:
        """Keep nothing of ranges before this segment."""
        while self._ranges and UNNAMED < self._ranges[0].segment < segment:
            del self._by_segment[self._ranges.popleft().segment]

    def check_ended(self) -> None:
        """Raise `SourceChangedError` if the source has ended before all was read again."""
        if self.rereading:
            raise SourceChangedError(
                f"{self._where(self.rereading[0].range)} are not done, and now the source ends before them"
            )

    # ------------------------------------------------------------ reading again

    def _reread(self, rows: SourceRows) -> int:
        """Keep what belongs to open ranges; return how many of the rows are dealt with."""
        offset, count = 0, rows.payload.num_rows
        while self.rereading:
            facts = self.rereading[0].range
            if not facts.rows and facts.ends <= _ends_of(rows):
                self._keep(self.rereading.popleft(), rows.payload.slice(0, 0))
                continue
            if offset == count:
                break
            if not self._gathered:
                offset = max(offset, _rows_before(rows, facts.begins))
                if offset == count:
                    break
                self._gathered_from = facts.begins
            size = min(_rows_before(rows, facts.ends) - offset, facts.rows - self._gathered_rows)
            if size <= 0:
                raise SourceChangedError(
                    f"{self._where(facts)} are not done, and the source passes over them now"
                )
            self._gathered.append(rows.payload.slice(offset, size))
            self._gathered_rows += size
            offset += size
            if self._gathered_rows == facts.rows:
                self._keep_gathered()
        return offset

    def _keep_gathered(self) -> None:
        found = self.rereading.popleft()
        table = pa.Table.from_batches(self._gathered).combine_chunks()
        (payload,) = table.to_batches()
        if found.range.digest and digest_of(payload) != found.range.digest:
            raise SourceChangedError(
                f"{self._where(found.range)} are other rows now than those that were read before"
            )
        self._keep(found, payload)
        self._begin_range()

    def _keep(self, found: OpenRange, payload: pa.RecordBatch) -> None:
        kept = BufferedRange(found.range, payload)
        self._ranges.append(kept)
        self._name(kept, found.segment)

    def _begin_range(self) -> None:
        self._gathered, self._gathered_rows = [], 0

    def _passed(self, facts: RowRange) -> SourceError:
        return SourceError(
            f"{self._where(facts)} are not done, and this instance of the source has them no more"
        )

    def _name(self, kept: BufferedRange, segment: int) -> None:
        kept.segment = segment
        self._by_segment[segment] = kept

    def _where(self, facts: RowRange) -> str:
        first = f"{facts.rows} rows of partition {self._partition!r} from {facts.first} on"
        return f"source {self._source!r}: {first}"


def _rows_before(rows: SourceRows, place: tuple[int, int]) -> int:
    """Return how many rows are before a place."""
    count: int = rows.payload.num_rows
    if rows.number != place[0]:
        return count if rows.number < place[0] else 0
    if rows.places is not None:
        return int(np.searchsorted(rows.places, place[1]))
    return min(count, max(0, place[1] - rows.first_ordinal))


def _ends_of(rows: SourceRows) -> tuple[int, int]:
    """Return the place behind them."""
    return rows.number, rows.first_ordinal + rows.span


def _place_from(rows: SourceRows, offset: int) -> int:
    """Return from which place on the rows behind the first ``offset`` are: a gap is before its row."""
    if rows.places is None or not offset:
        return rows.first_ordinal + offset
    return int(rows.places[offset - 1]) + 1
