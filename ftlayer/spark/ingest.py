"""Records that no source can give again (HTTP, MQTT, a socket), accepted once they are durable."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ftlayer.errors import CodecError
from ftlayer.layer.calls import Ingest as IngestCall
from ftlayer.spark.delivery_source import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from ftlayer.service.client import VertexClient


class Ingest:
    """Accepts records from any thread. What `put` returned for is not lost any more.

    Calls of several threads travel together: the first one to come sends what has gathered while the
    one before was under way, so that one sync serves them all.
    """

    def __init__(self, name: str, schema: StructType, client: VertexClient) -> None:
        self.name = name
        self.schema = schema
        self._arrow = arrow_schema(schema)
        self._client = client
        self._gathering = _Group()
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
        rows = list(records)
        for place, record in enumerate(rows):
            unknown = set(record) - set(self._arrow.names)
            if unknown:
                raise CodecError(
                    f"ingest {self.name!r}: record {place} has a column {min(unknown)!r}, the schema not"
                )
        try:
            batch = pa.RecordBatch.from_pylist(rows, schema=self._arrow)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise CodecError(f"ingest {self.name!r}: a record does not fit the schema: {error}") from error
        self.put_batch(batch)

    def put_batch(self, batch: pa.RecordBatch) -> None:
        """Accept an Arrow batch of the schema's columns, all or none; returns once it is durable."""
        if batch.schema.names != self._arrow.names or batch.schema.types != self._arrow.types:
            raise CodecError(f"ingest {self.name!r}: expected columns {self._arrow}, got {batch.schema}")
        if not batch.num_rows:
            return
        with self._lock:
            group = self._gathering
            group.batches.append(batch.replace_schema_metadata(None))
        with self._sending:
            if not group.sent:
                with self._lock:
                    self._gathering = _Group()
                group.send(self.name, self._client)
        if group.error is not None:
            raise group.error


class _Group:
    """Batches that travel together."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.sent = False
        self.error: Exception | None = None

    def send(self, name: str, client: VertexClient) -> None:
        self.sent = True
        whole = pa.Table.from_batches(self.batches).combine_chunks().to_batches()[0]
        try:
            client.call(IngestCall(f"ingest/{name}", whole))
        except Exception as error:  # noqa: BLE001 - raised to every thread whose records were in the group
            self.error = error
