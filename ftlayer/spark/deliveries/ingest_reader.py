"""A source that cannot rewind, behind the vertex's store: a reader of what was ingested, which can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows

from ftlayer.errors import SourceError
from ftlayer.vertex.calls import (
    BatchBegun,
    BatchState,
    BeginBatch,
    Commit,
    Deliverable,
    DeliverableUpTo,
    OpenQuery,
    QueryOpened,
    ReadDeliveries,
    RecordBatches,
    Seal,
)
from ftlayer.vertex.client.client import VertexClient

RANGE_ROWS = 100_000
"""A range has this many rows at most, unless all there is is asked for …"""

SPLIT_ROWS = 10_000
"""… and a split of it this many: they are fetched at once."""

ALL = 1 << 40
"""More rows than there are."""


@dataclass(frozen=True)
class IngestedRows(InputPartition):
    """Rows [first, end) of the log."""

    first: int
    end: int


class IngestReader(DataSourceStreamReader):
    """Reads what an ingest (`IngestStream`) has accepted, in the order of its log, by offsets in it.

    What a completed checkpoint has read is removed from the vertex (`commit`). One topology reads a stream: the
    vertex refuses a second one (`StaleOwnerError`), and a driver that another one has taken over from. A topology
    that is started without a checkpoint reads all that is there still.
    """

    def __init__(self, client: VertexClient, stream: str, owner: str) -> None:
        """``stream`` is the ingest's (`stream_of_ingest`); ``owner`` names who reads it, the same over restarts."""
        self._client = client
        self._stream = stream
        self._owner = owner
        self._epoch = 0
        self._next_batch = 0
        # Whether that one is known to be open: a call that was not answered may have had its effect or not.
        self._is_open = False
        self._removed = 0

    # ------------------------------------------------------------ in the driver

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Begin with the first record that is there."""
        end = self._deliverable(0, 1)
        # The first one's end, or, if there is none, where it will be.
        return {"next": end - len(self._rows(end - 1, end)) if end else 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadMaxRows(RANGE_ROWS)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """Ask the vertex how far the log goes."""
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else ALL
        return {"next": self._deliverable(start["next"], rows)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Cut a range into splits; they are dealt out to the subtasks."""
        return [
            IngestedRows(first, min(first + SPLIT_ROWS, end["next"]))
            for first in range(start["next"], end["next"], SPLIT_ROWS)
        ]

    def commit(self, end: dict[str, int]) -> None:
        """Remove what comes before ``end``; again does no harm, also where it has failed."""
        self._own()
        if end["next"] <= self._removed:
            return
        self._is_open = False
        delivered = {self._stream: (0, end["next"])}
        self._client.call(Seal(self._owner, self._epoch, self._next_batch, delivered))
        # What is committed goes when a later batch begins.
        self._open_batch()
        self._removed = end["next"]

    def stop(self) -> None:
        self._client.close()

    def _deliverable(self, start: int, rows: int) -> int:
        self._own()
        reply = self._client.call(Deliverable(self._stream, start, rows))
        assert isinstance(reply, DeliverableUpTo)
        return reply.end

    def _own(self) -> None:
        """Take the stream over from its last reader for this owner."""
        if not self._epoch:
            opened = self._client.call(OpenQuery(self._owner, self._client.client_id, (self._stream,)))
            assert isinstance(opened, QueryOpened)
            self._epoch = opened.epoch
            self._next_batch = opened.last_committed + 1
        if not self._is_open:
            self._open_batch()

    def _open_batch(self) -> None:
        """Begin the next batch that can be sealed; one that is sealed is committed first, by this reader or one before.

        The epoch stays: a driver that another one has taken over from is told so here as well.
        """
        while (state := self._begin_batch()) is not BatchState.NEW:
            if state is BatchState.SEALED:
                self._client.call(Commit(self._owner, self._epoch, self._next_batch))
            self._next_batch += 1
        self._is_open = True

    def _begin_batch(self) -> BatchState:
        begun = self._client.call(BeginBatch(self._owner, self._epoch, self._next_batch))
        assert isinstance(begun, BatchBegun)
        return begun.state

    # ------------------------------------------------------------ in the slots

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Fetch the rows of a split. Raises `SourceError` if some of them are not there any more."""
        assert isinstance(partition, IngestedRows)
        rows = self._rows(partition.first, partition.end)
        if len(rows) != partition.end - partition.first:
            raise SourceError(
                f"{self._stream!r}: records {partition.first} to {partition.end} of it are not all there any more: a "
                "checkpoint later than the one that is restored was complete, and they were removed behind it"
            )
        return iter(rows.batches)

    def _rows(self, first: int, end: int) -> _Rows:
        reply = self._client.call(ReadDeliveries(self._stream, first, end))
        assert isinstance(reply, RecordBatches)
        return _Rows([records.payload for records in reply.batches])

    def __getstate__(self) -> dict[str, Any]:
        # A copy owns nothing: slots read, and each driver takes over by itself.
        return {**self.__dict__, "_epoch": 0, "_next_batch": 0, "_is_open": False, "_removed": 0}


@dataclass(frozen=True)
class _Rows:
    batches: list[pa.RecordBatch]

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self.batches)
