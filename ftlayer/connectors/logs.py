"""Logs: systems whose records can be read again by their offsets, as a stream reader of a Python Data Source.

One reader serves all ways: plain Structured Streaming, wrapped queries, and topologies in both modes. They keep its
offsets with their own checkpoints, and tell it to `commit` what is durable. In Flink's words `ends` and `first_of` are
the split enumerator, `read_split` is the split reader.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from ftlayer.connectors.from_json import MessageReader
from ftlayer.errors import SourceChangedError
from ftlayer.functions.data_sources import ReadLimit, ReadMaxRows

Offsets = dict[str, int]
"""By split: the offset of the next record."""


@dataclass(frozen=True)
class LogRange(InputPartition):
    """Records [start, end) of a split."""

    split: str
    start: int
    end: int


class LogReader(MessageReader):
    """Reads all splits of a log, range by range. A connector says where they begin and end, and reads them.

    Attributes:
        schema: of its rows.
        offset_column: where a row has its offset. A topology counts offsets by it, and not rows, to know how far a
            range is read: when it is read again, some records may have been compacted away.
    """

    schema: pa.Schema
    offset_column: str = "offset"

    def __init__(self, max_rows: int) -> None:
        """``max_rows``: of a batch of a query, or a range of a topology, over all splits together."""
        self._max_rows = max_rows
        self._until: Offsets | None = None
        self._ends: Offsets = {}  # as they were asked for last

    @abstractmethod
    def starts(self) -> Offsets:
        """Return where a source begins that has never been read: all splits there are."""

    @abstractmethod
    def ends(self) -> Offsets:
        """Return the end of each split that there is now."""

    @abstractmethod
    def first_of(self, splits: Sequence[str]) -> Offsets:
        """Return the first offset that there is of these, which are new."""

    @abstractmethod
    def read_split(self, split: str, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Read records. Called in tasks, the same range again after a failure.

        It gives the same records then, save those that the log has compacted away meanwhile.
        """

    def is_missed(self, split: str) -> bool:
        """Whether a split that was read, and is not there any more, ought to be."""
        return False

    def committed(self, offsets: Mapping[str, int]) -> None:
        """Records up to these offsets are durable: a connector may tell its system."""

    def initialOffset(self) -> Offsets:  # noqa: N802 - Spark's name
        return self.starts()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadMaxRows(self._max_rows)

    def reportLatestOffset(self) -> Offsets:  # noqa: N802 - Spark's name
        """Return where the splits end now, for Spark's progress and `ftlayer.topology.checks`."""
        return self.ends()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._until = self.ends()

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:  # noqa: N802 - Spark's name
        """Return how far the next range goes; new splits are read from their first record.

        Raises `SourceChangedError` for a split that ends before the place up to which it was read.
        """
        ends = self.ends() if self._until is None else self._until
        self._check(start, ends)
        new = [split for split in ends if split not in start]
        begin = {**start, **self.first_of(new)} if new else start
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return limited(begin, ends, most)

    def _check(self, places: Offsets, ends: Offsets) -> None:
        check_not_cut(places, {split: 0 for split in places if self.is_missed(split)} | ends)
        self._ends = ends

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        """Return a range for each split that has records.

        Raises `SourceChangedError` as `latestOffset` does: a range may be of the run before, and waits to be read.
        """
        if not self._ends or any(offset > self._ends.get(split, offset) for split, offset in end.items()):
            self._check(end, self.ends())
        new = [split for split in end if split not in start]
        begin = {**start, **self.first_of(new)} if new else start
        return [
            LogRange(split, begin[split], offset) for split, offset in end.items() if begin[split] < offset
        ]

    def log_ranges(self, start: Offsets, end: Offsets) -> Sequence[InputPartition | None]:
        """Return what a topology reads: `partitions`, and None in the places of splits that have no records.

        So each split has the same place in every range, and stays with the subtask whose watermark it holds back.
        """
        ranges = {each.split: each for each in self.partitions(start, end) if isinstance(each, LogRange)}
        return [ranges.get(split) for split in end] if ranges else []

    def commit(self, end: Offsets) -> None:
        self.committed(end)

    def behind(self, partition: InputPartition, passed: int) -> InputPartition:
        """Return what is left of a range behind its first offsets."""
        assert isinstance(partition, LogRange)
        return replace(partition, start=min(partition.start + passed, partition.end))

    def read_messages(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, LogRange)
        return self.read_split(partition.split, partition.start, partition.end)


def check_not_cut(places: Mapping[str, int], ends: Mapping[str, int]) -> None:
    """Raise `SourceChangedError` for a split that ends before the place up to which it was read.

    Records that are written to it from now on would have offsets that were read already.
    """
    for split, place in places.items():
        end = ends.get(split, place)
        if end < place:
            raise SourceChangedError(
                f"{split} ends at offset {end}, and the source is at offset {place}: it was made anew, its last "
                "records are lost, or start is behind its end. A source with another uid, or a query with another "
                "checkpoint, begins where start says"
            )


def limited(start: Mapping[str, int], ends: Mapping[str, int], most: int | None) -> Offsets:
    """Return offsets that are at most so many records behind ``start``: each split's share is as its backlog is.

    A split with records gets one at least. Splits that have no end any more stay where they are.
    """
    backlog = {split: max(0, ends.get(split, offset) - offset) for split, offset in start.items()}
    total = sum(backlog.values())
    if most is None or total <= most:
        return {split: offset + backlog[split] for split, offset in start.items()}
    shares = {split: behind * most // total for split, behind in backlog.items()}
    return {split: offset + min(backlog[split], max(1, shares[split])) for split, offset in start.items()}
