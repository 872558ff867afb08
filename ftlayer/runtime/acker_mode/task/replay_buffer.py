"""The rows of a source's partition that are not done: kept until they are, and found again when they are read again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

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
            elif each.range.rows and each.range.begins < self._gathered_from:
                raise self._passed(each.range)
            elif each.range.rows:
                self.rereading.append(each)
        head_at = found.number, found.place
        for mine in self._ranges:
            is_behind = mine.facts.begins >= head_at
            if is_behind and (mine.facts.rows or mine.facts.end != found.position):
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
        offset = self._reread(rows)
        count = rows.payload.num_rows
        at = rows.number, rows.first_ordinal + offset
        if offset < count and at < self._head_at:
            offset += self._rows_before(at, count - offset, self._head_at)
        self._reached = rows.number, rows.first_ordinal + offset
        if not self._gathered:
            self._gathered_from = self._reached
        assert rows.position is not None, "a source that is read again tells its positions"
        ends = rows.number, rows.first_ordinal + count
        if offset == count and (ends < self._head_at or rows.position.end == self.head):
            return None
        if not offset:
            return rows
        return replace(rows, first_ordinal=rows.first_ordinal + offset, payload=rows.payload.slice(offset))

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
        while self.rereading and offset < count:
            facts = self.rereading[0].range
            at = rows.number, rows.first_ordinal + offset
            if at < facts.begins and not self._gathered:
                offset += self._rows_before(at, count - offset, facts.begins)
                continue
            if at != (facts.number, facts.first + self._gathered_rows):
                raise SourceChangedError(
                    f"{self._where(facts)} are not done, and the source passes over them now"
                )
            if not self._gathered:
                self._gathered_from = facts.begins
            size = min(count - offset, facts.rows - self._gathered_rows)
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
        kept = BufferedRange(found.range, payload)
        self._ranges.append(kept)
        self._name(kept, found.segment)
        self._begin_range()

    def _begin_range(self) -> None:
        self._gathered, self._gathered_rows = [], 0

    def _rows_before(self, at: tuple[int, int], rows: int, place: tuple[int, int]) -> int:
        """Return how many of ``rows`` from ``at`` on are before a place."""
        return rows if at[0] < place[0] else min(rows, place[1] - at[1])

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
