"""A queue as a stream reader of a Python Data Source, for plain Structured Streaming and wrapped queries."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from ftlayer.checkpoint.storage.layout import normal
from ftlayer.sources.spool import Spool
from ftlayer.topology.lag import WAITING
from ftlayer.topology.queues import Fetched, Member, Queue, QueueReader

FILE_ROWS = 10_000
"""A file of the spool has this many rows at most: it is what one task reads."""

WAIT_S = 0.1
"""A fetch waits this long for messages."""

FETCH_S = 1.0
"""A batch begins about so long after its first messages at the latest, however many more come."""


def owner_of(spool: str) -> str:
    """Return the owner (see `Member`) that reads for a spool: one for each, the same over restarts."""
    return f"spark/{hashlib.sha256(normal(spool).encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class SpooledFile(InputPartition):
    number: int


class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Fetches in the driver, while Spark asks how far the source goes, and reads files of the `Spool` in the tasks.

    A message is acknowledged when its file is durable. Each enters the query once: where the driver was killed
    between the two, the position in the last file says so.
    """

    def __init__(self, queue: Queue, spool: str, max_rows: int) -> None:
        """``max_rows``: of a batch."""
        self._queue = queue
        self._url = spool
        self._max_rows = max_rows
        self._spool = Spool(spool)
        self._reader: QueueReader | None = None
        self._end = 0
        self._rows: dict[int, int] = {}  # of files that are not committed
        self._positions: dict[int, bytes] = {}
        self._ends = False

    # ------------------------------------------------------------ in the driver

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Begin with the first file that is there: a query with a new checkpoint takes over what another one left."""
        return {"next": self._spool.numbers().start}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """At most ``max_rows`` a batch."""
        return ReadMaxRows(self._max_rows)

    def reportLatestOffset(self) -> dict[str, int] | None:  # noqa: N802 - Spark's name
        """Return how many messages wait, for Spark's progress; None where the queue cannot say."""
        waiting = self._opened().waiting()
        return None if waiting is None else {"next": self._end, WAITING: waiting}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fetch what waits in the queue now, and no more in this run.

        Where the queue cannot say how much that is, this fetches until nothing comes for a moment.
        """
        reader = self._opened()
        self._fetch_all(reader)
        # A server that is away has more, perhaps: it is waited for, as long as the reader has patience.
        while reader.is_away:
            self._fetch_all(reader)
        self._ends = True

    def _fetch_all(self, reader: QueueReader) -> None:
        """Fetch what waits now; where the queue cannot say how much that is, until nothing comes for a moment."""
        waiting = reader.waiting()
        if waiting is None:
            while self._fetch(None, WAIT_S):
                pass
        while waiting and (fetched := self._fetch(waiting)):
            waiting -= fetched

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """Fetch what there is, up to the limit."""
        self._opened()
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        end, rows = self._up_to(start["next"], most)
        if not self._ends and end == self._end and (most is None or rows < most):
            self._fetch(None if most is None else most - rows)
            end, _ = self._up_to(start["next"], most)
        return {"next": end}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Return a file for each task."""
        return [SpooledFile(number) for number in range(start["next"], end["next"])]

    def commit(self, end: dict[str, int]) -> None:
        """Remove files that were processed."""
        self._spool.forget(end["next"])
        self._rows = {number: rows for number, rows in self._rows.items() if number >= end["next"]}

    def stop(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _opened(self) -> QueueReader:
        if self._reader is None:
            numbers = self._spool.numbers()
            self._end = numbers.stop
            self._positions = self._spool.positions(numbers[-1]) if numbers else {}
            self._reader = self._queue.open(Member(owner_of(self._url), 0, 1), self._positions, stored=True)
        return self._reader

    def _fetch(self, rows: int | None, wait_s: float = 0.0) -> int:
        """Fetch so many messages (None: all that there are), or what there is; return how many.

        The first are waited for. More than those that are there then are not, but for ``wait_s``.
        """
        reader = self._opened()
        late = time.monotonic() + FETCH_S
        count = 0
        while (rows is None or count < rows) and time.monotonic() < late:
            most = min(FILE_ROWS, self._max_rows)
            file = _fetched(reader, most if rows is None else min(most, rows - count), wait_s, late)
            if not file:
                break
            count += self._keep(reader, file)
        return count

    def _keep(self, reader: QueueReader, file: Sequence[Fetched]) -> int:
        """Make messages durable together, and acknowledge them; return how many they are."""
        positions = self._positions | {fetched.of: fetched.position for fetched in file}
        rows = pa.concat_batches([fetched.rows for fetched in file])
        self._spool.put(self._end, rows, positions)
        self._rows[self._end] = rows.num_rows
        self._end, self._positions = self._end + 1, positions
        reader.acknowledge([fetched.receipt for fetched in file])
        return int(rows.num_rows)

    def _up_to(self, start: int, most: int | None) -> tuple[int, int]:
        """Return where files end that have so many rows together (one file at least), and how many they have."""
        end, rows = start, 0
        while end < self._end:
            if end not in self._rows:
                self._rows[end] = self._spool.read(end).num_rows
            if most is not None and end > start and rows + self._rows[end] > most:
                break
            rows += self._rows[end]
            end += 1
        return end, rows

    # ------------------------------------------------------------ in the tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SpooledFile)
        yield from self._spool.read(partition.number).replace_schema_metadata(None).to_batches()

    def __getstate__(self) -> dict[str, Any]:
        # A copy in a task is connected to nothing.
        return {**self.__dict__, "_reader": None}


def _fetched(reader: QueueReader, rows: int, wait_s: float, late: float) -> list[Fetched]:
    """Fetch what goes into one file: ``rows`` at most, and nothing more behind the monotone time ``late`` (s)."""
    found: list[Fetched] = []
    while rows > 0 and (not found or time.monotonic() < late):
        fetched = reader.fetch(rows, wait_s if found else WAIT_S)
        if fetched is None:
            break
        found.append(fetched)
        rows -= fetched.rows.num_rows
    return found
