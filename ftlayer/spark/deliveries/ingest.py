"""Records that no source can give again (HTTP, MQTT, a socket), accepted once they are durable."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ftlayer.checks import shown
from ftlayer.errors import CodecError, MalformedRequestError, ProtocolError, VertexUnavailableError
from ftlayer.functions.conversion import to_batch
from ftlayer.spark.deliveries.source import arrow_schema
from ftlayer.vertex.calls import Ingest

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from ftlayer.spark.deliveries.ingest_reader import IngestReader
    from ftlayer.vertex.client.client import VertexClient


NO_FIT = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""Errors of converting a value that a column cannot hold."""


def stream_of_ingest(name: str) -> str:
    """Return the stream that the vertex files an ingest's records under."""
    return f"ingest/{name}"


class IngestStream:
    """Accepts records from any thread. What `put` returned for is not lost any more.

    Calls of several threads travel together: the first one to come sends what has gathered while the
    one before was under way, so that one sync serves them all.
    """

    def __init__(self, name: str, schema: StructType, client: VertexClient) -> None:
        self.name = name
        self.schema = schema
        self._arrow = arrow_schema(schema)
        self._client = client
        self._gathering = _SharedCall()
        self._lock = threading.Lock()
        self._sending = threading.Lock()

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
            if not isinstance(record, Mapping):
                raise CodecError(
                    f"ingest {self.name!r}: record {place} is a {type(record).__name__}, not a mapping"
                )
            unknown = [name for name in record if name not in known]
            if unknown:
                raise CodecError(
                    f"ingest {self.name!r}: record {place} has a column {unknown[0]!r}, the schema not"
                )
        try:
            batch = to_batch(rows, self._arrow)
        except NO_FIT as error:
            raise CodecError(f"ingest {self.name!r}: {self._misfit(rows, error)}") from error
        self.put_batch(batch)

    def put_batch(self, batch: pa.RecordBatch) -> None:
        """Accept an Arrow batch of the schema's columns, all or none; returns once it is durable."""
        if not isinstance(batch, pa.RecordBatch):
            raise CodecError(
                f"ingest {self.name!r}: expected a pyarrow.RecordBatch, got a {type(batch).__name__}"
            )
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
                group.send(self.name, self._client)
        if part.error is not None:
            raise part.error

    def _misfit(self, rows: list[Mapping[str, Any]], error: Exception) -> str:
        """Say which value it is that cannot be converted with the others, by what each of them says alone."""
        for place, record in enumerate(rows):
            for field in self._arrow:
                value = record.get(field.name)
                try:
                    to_batch([{field.name: value}], pa.schema([field]))
                except NO_FIT as misfit:
                    return (
                        f"record {place} does not fit the schema: column {field.name!r} is {field.type}, and the value "
                        f"{shown(value)} is not ({misfit})"
                    )
        return f"the records do not fit the schema: {error}"

    def reader(self, topology: str) -> IngestReader:
        """Return a source for a topology in barrier mode: a stream reader that can go back to any checkpoint.

        Records stay in the vertex until a checkpoint that has read them is complete. ``topology`` is its name, the
        same over restarts: the vertex gives these records to one topology, and not to a query as well. Raises
        `ConfigError` for what is no name.
        """
        from ftlayer.spark.deliveries.ingest_reader import IngestReader
        from ftlayer.topology.names import check_job_name

        check_job_name(topology)
        return IngestReader(self._client, stream_of_ingest(self.name), f"topology/{topology}")


class _ThreadBatch:
    """One thread's batch. It has failed until it is known to be in: its sender may be interrupted."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self.error: Exception | None = VertexUnavailableError(
            "the call that carried these records was interrupted: they may be in or not"
        )


class _SharedCall:
    """Batches that travel together."""

    def __init__(self) -> None:
        self.parts: list[_ThreadBatch] = []
        self.sent = False

    def send(self, name: str, client: VertexClient) -> None:
        self.sent = True
        _send(self.parts, name, client)


def _send(parts: list[_ThreadBatch], name: str, client: VertexClient) -> None:
    """Send parts as one call; what is refused together (too many rows, too many bytes) goes part by part."""
    error: Exception | None = None
    try:
        whole = pa.concat_batches([part.batch for part in parts])
        client.call(Ingest(stream_of_ingest(name), whole))
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
