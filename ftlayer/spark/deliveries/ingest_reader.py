"""A source that cannot rewind, behind the vertex's store: a reader of what was ingested, which can."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from ftlayer.common.checks import named_type, shown
from ftlayer.errors import (
    CodecError,
    MalformedRequestError,
    ProtocolError,
    SourceError,
    VertexUnavailableError,
)
from ftlayer.functions.conversion import to_batch
from ftlayer.functions.data_sources import DataSourceStreamReader, ReadLimit, ReadMaxRows, to_arrow_schema
from ftlayer.vertex import calls
from ftlayer.vertex.client.client import VertexClient

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


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
        end = self._deliverable(0, 1)
        # The first one's end, or, if there is none, where it will be.
        return {"next": end - _count(self._rows(end - 1, end)) if end else 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadMaxRows(RANGE_ROWS)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
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
        self._client.call(calls.Seal(self._owner, self._epoch, self._next_batch, delivered))
        # What is committed goes when a later batch begins.
        self._open_batch()
        self._removed = end["next"]

    def stop(self) -> None:
        self._client.close()

    def _deliverable(self, start: int, rows: int) -> int:
        self._own()
        return self._client.call(calls.Deliverable(self._stream, start, rows)).end

    def _own(self) -> None:
        if not self._epoch:
            opened = self._client.call(calls.OpenQuery(self._owner, self._client.client_id, (self._stream,)))
            self._epoch = opened.epoch
            self._next_batch = opened.last_committed + 1
        if not self._is_open:
            self._open_batch()

    def _open_batch(self) -> None:
        """Begin the next batch that can be sealed; one that is sealed is committed first, by this reader or one before.

        The epoch stays: a driver that another one has taken over from is told so here as well.
        """
        call = self._client.call
        while (
            state := call(calls.BeginBatch(self._owner, self._epoch, self._next_batch)).state
        ) is not calls.BatchState.NEW:
            if state is calls.BatchState.SEALED:
                call(calls.Commit(self._owner, self._epoch, self._next_batch))
            self._next_batch += 1
        self._is_open = True

    # ------------------------------------------------------------ in the slots

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Fetch the rows of a split. Raises `SourceError` if some of them are not there any more."""
        assert isinstance(partition, IngestedRows)
        rows = self._rows(partition.first, partition.end)
        if _count(rows) != partition.end - partition.first:
            raise SourceError(
                f"{self._stream!r}: records {partition.first} to {partition.end} of it are not all there any more: a "
                "checkpoint later than the one that is restored was complete, and they were removed behind it"
            )
        return iter(rows)

    def _rows(self, first: int, end: int) -> list[pa.RecordBatch]:
        reply = self._client.call(calls.ReadDeliveries(self._stream, first, end))
        return [records.payload for records in reply.batches]

    def __getstate__(self) -> dict[str, Any]:
        # A copy owns nothing: slots read, and each driver takes over by itself.
        return {**self.__dict__, "_epoch": 0, "_next_batch": 0, "_is_open": False, "_removed": 0}


def _count(batches: list[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batch in batches)


NO_FIT = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""Errors of converting a value that a column cannot hold."""


def stream_of_ingest(name: str) -> str:
    return f"ingest/{name}"


class IngestStream:
    """Accepts records from any thread. What `put` returned for is not lost any more.

    Calls of several threads travel together: the first one to come sends what has gathered while the
    one before was under way, so that one sync serves them all.
    """

    def __init__(self, name: str, schema: StructType, client: VertexClient) -> None:
        self.name = name
        self.schema = schema
        self._arrow = to_arrow_schema(schema)
        self._client = client
        self._gathering = _SharedCall()
        self._lock = threading.Lock()
        self._sending = threading.Lock()

    def __repr__(self) -> str:
        return f"IngestStream({self.name!r}, {self.schema.simpleString()})"

    def put(self, record: Mapping[str, Any]) -> None:
        """Accept one record (a mapping with the schema's columns); returns once it is durable.

        Raises `CodecError` if it does not fit the schema, `IntakeTimeoutError` if the vertex had no room for
        ``persist_timeout``, `VertexUnavailableError` if it did not answer (then the record may be in or not).
        """
        self.put_many([record])

    def put_many(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Accept records, all or none; returns once they are durable. Raises as `put`."""
        if not isinstance(records, Iterable) or isinstance(records, Mapping | str | bytes):
            raise CodecError(
                f"ingest {self.name!r}: expected mappings of columns to values, got {shown(records)}; for one record "
                "use put"
            )
        rows = list(records)
        known = set(self._arrow.names)
        for place, record in enumerate(rows):
            where = f"ingest {self.name!r}: record {place}"
            if not isinstance(record, Mapping):
                raise CodecError(f"{where} is {named_type(record)}, not a mapping")
            unknown = [name for name in record if name not in known]
            if unknown:
                raise CodecError(f"{where} has a column {unknown[0]!r}, the schema not")
        try:
            batch = to_batch(rows, self._arrow)
        except NO_FIT as error:
            raise CodecError(f"ingest {self.name!r}: {self._misfit(rows, error)}") from error
        self.put_batch(batch)

    def put_batch(self, batch: pa.RecordBatch) -> None:
        """Accept an Arrow batch of the schema's columns, all or none; returns once it is durable."""
        if not isinstance(batch, pa.RecordBatch):
            raise CodecError(f"ingest {self.name!r}: expected a pyarrow.RecordBatch, got {named_type(batch)}")
        if batch.schema.names != self._arrow.names or batch.schema.types != self._arrow.types:
            raise CodecError(f"ingest {self.name!r}: expected columns {self._arrow}, got {batch.schema}")
        if not batch.num_rows:
            return
        part = _ThreadBatch(batch.replace_schema_metadata(None))
        with self._lock:
            group = self._gathering
            group.parts.append(part)
        with self._sending:
            if not group.sent:
                with self._lock:
                    self._gathering = _SharedCall()
                group.sent = True
                _send(group.parts, self.name, self._client)
        if part.error is not None:
            raise part.error

    def _misfit(self, rows: list[Mapping[str, Any]], error: Exception) -> str:
        """Say which value it is that cannot be converted with the others, by what each of them says alone."""
        for place, record in enumerate(rows):
            for column in self._arrow:
                value = record.get(column.name)
                try:
                    to_batch([{column.name: value}], pa.schema([column]))
                except NO_FIT as misfit:
                    return (
                        f"record {place} does not fit the schema: column {column.name!r} is {column.type}, and the "
                        f"value {shown(value)} is not ({misfit})"
                    )
        return f"the records do not fit the schema: {error}"

    def reader(self, topology: str) -> IngestReader:
        """Return a source for a topology in barrier mode: a stream reader that can go back to any checkpoint.

        Records stay in the vertex until a checkpoint that has read them is complete. ``topology`` is its name, the
        same over restarts: the vertex gives these records to one topology, and not to a query as well. Raises
        `ConfigError` for what is no name.
        """
        from ftlayer.topology.job_graph import check_job_name

        check_job_name(topology)
        return IngestReader(self._client, stream_of_ingest(self.name), f"topology/{topology}")


class _ThreadBatch:
    """One thread's batch. It has failed until it is known to be in: its sender may be interrupted."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self.error: Exception | None = VertexUnavailableError(
            "the call that carried these records was interrupted: they may be in or not"
        )


@dataclass
class _SharedCall:
    parts: list[_ThreadBatch] = field(default_factory=list)
    sent: bool = False


def _send(parts: list[_ThreadBatch], name: str, client: VertexClient) -> None:
    """Send parts as one call; what is refused together (too many rows, too many bytes) goes part by part."""
    error: Exception | None = None
    try:
        whole = pa.concat_batches([part.batch for part in parts])
        client.call(calls.Ingest(stream_of_ingest(name), whole))
    except (MalformedRequestError, ProtocolError, pa.ArrowInvalid) as refused:
        if len(parts) > 1:
            for part in parts:
                _send([part], name, client)
            return
        error = refused
    except Exception as raised:  # noqa: BLE001 - raised to every thread whose records were in the call
        error = raised
    for part in parts:
        part.error = error
