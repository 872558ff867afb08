"""``format("ftlayer")``: what the vertex has to deliver to one query and source, as a Python Data Source.

Replays that are due and ingested records, in delivery order. An offset is ``{"next": n}``: rows
delivered before it. The rows of a range stay the same until a later batch begins, so a batch that
Spark runs again reads the same ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from ftlayer.errors import ConfigError
from ftlayer.records.ids import pack_tries
from ftlayer.spark.deliveries.stored_rows import fit_rows
from ftlayer.spark.stages.pages import make_marks
from ftlayer.spark.stages.task import FT
from ftlayer.vertex.calls import (
    Deliverable,
    DeliverableUpTo,
    QueryStatus,
    QueryStatusCall,
    ReadDeliveries,
    RecordBatches,
    Records,
)
from ftlayer.vertex.client.client import VertexClient

FORMAT = "ftlayer"

ALL = 1 << 40
"""Rows asked for when Spark sets no limit."""

POLL_S = 0.2
"""How often a run that is drained asks whether it is."""


@dataclass(frozen=True)
class DeliveryOptions:
    """What the source needs to know; travels in the plan, with Spark's redaction for ``token``.

    ``query`` reads it. A run that is drained goes on until nothing of the query is pending or waits, or until
    ``drain_until_ms`` (Unix; 0: none is). ``required`` are the source's columns that may not be null. The delivered
    ones may all be: a record that does not fit the source any more has nothing else.
    """

    address: str
    token: str
    stream: str
    query: str
    root_certs: str = ""
    max_rows: int = 100_000
    partitions: int = 2
    drain_until_ms: int = 0
    required: tuple[str, ...] = ()
    client_pem: str = ""

    def to_spark(self) -> dict[str, str]:
        texts = {**vars(self), "required": json.dumps(self.required)}
        return {name: str(value) for name, value in texts.items() if value != ""}

    @classmethod
    def from_spark(cls, options: Any) -> DeliveryOptions:
        """Read them from a reader's options; `ConfigError` names what is missing or wrong."""
        for name in ("address", "token", "stream", "query"):
            if not options.get(name):
                raise ConfigError(f'format("{FORMAT}"): option {name!r} is missing')
        numbers = {}
        for name, default, least in (
            ("max_rows", 100_000, 1),
            ("partitions", 2, 1),
            ("drain_until_ms", 0, 0),
        ):
            text = str(options.get(name, default))
            if not text.isdecimal() or int(text) < least:
                raise ConfigError(
                    f'format("{FORMAT}"): option {name!r} must be a number from {least}, not {text!r}'
                )
            numbers[name] = int(text)
        return cls(
            options["address"],
            options["token"],
            options["stream"],
            options["query"],
            options.get("root_certs", ""),
            client_pem=options.get("client_pem", ""),
            required=tuple(json.loads(options.get("required", "[]"))),
            **numbers,
        )

    def client(self) -> VertexClient:
        return VertexClient(
            self.address,
            self.token,
            root_certs=self.root_certs.encode() or None,
            client_pem=self.client_pem.encode() or None,
            client_id="delivery-source",
        )


class DeliverySource(DataSource):
    """The Data Source; register it with ``spark.dataSource.register``."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        """Refuse to guess: the stored records have the wrapped source's schema."""
        raise ConfigError(f'format("{FORMAT}") needs .schema(…): the wrapped source\'s columns and {FT}')

    def streamReader(self, schema: StructType) -> DeliveryReader:  # noqa: N802 - Spark's name
        return DeliveryReader(DeliveryOptions.from_spark(self.options), schema)


@dataclass(frozen=True)
class DeliveryRange(InputPartition):
    """Offsets [first, last) for one task, of the range [start, end) that the batch was given."""

    first: int
    last: int
    start: int
    end: int


class DeliveryReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads deliveries. The vertex keeps what a batch was given until a later batch begins."""

    def __init__(self, options: DeliveryOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._client = options.client()
        self._until: int | None = None
        self._told: int | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {"next": 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadMaxRows(self._options.max_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix how far this run reads; what becomes due later is the next run's, save when draining."""
        if not self._options.drain_until_ms:
            self._until = self._deliverable(0, ALL)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else ALL
        end = self._deliverable(start["next"], rows)
        while self._options.drain_until_ms and end == start["next"] and self._wait_for_due():
            end = self._deliverable(start["next"], rows)
        if self._until is not None:
            end = min(end, max(self._until, start["next"]))
        self._told = end
        return {"next": end}

    def reportLatestOffset(self) -> dict[str, int] | None:  # noqa: N802 - Spark's name
        """Return how far deliveries go beyond what Spark was told of, for its progress. None before it asked.

        Replays that are due have no offset until they are read, and are not in it.
        """
        return None if self._told is None else {"next": self._told + self._status().deliverable}

    def _status(self) -> QueryStatus:
        status = self._client.call(QueryStatusCall(self._options.query))
        assert isinstance(status, QueryStatus)
        return status

    def _wait_for_due(self) -> bool:
        """Wait a moment while something is pending or waits for replay; False if nothing does, or time is up.

        An ``availableNow`` run ends with the first batch that would be empty, and another run would read on in
        the source, which a drain must not.
        """
        left = self._options.drain_until_ms / 1000 - time.time()
        status = self._status()
        if status.drained or left <= 0:
            return False
        due = status.next_due_in_ms / 1000 if status.next_due_in_ms >= 0 else POLL_S
        time.sleep(min(due, POLL_S, left))
        return True

    def _deliverable(self, start: int, rows: int) -> int:
        reply = self._client.call(Deliverable(self._options.stream, start, rows))
        assert isinstance(reply, DeliverableUpTo)
        return reply.end

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        first, last = start["next"], end["next"]
        count = min(self._options.partitions, last - first)
        edges = [first + (last - first) * i // count for i in range(count + 1)] if count else []
        return [DeliveryRange(a, b, first, last) for a, b in pairwise(edges)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, DeliveryRange)
        with self._options.client() as client:
            reply = client.call(ReadDeliveries(self._options.stream, partition.first, partition.last))
        assert isinstance(reply, RecordBatches)
        for records in reply.batches:
            yield delivered_rows(
                records,
                arrow_schema(self._schema),
                partition.start,
                partition.end,
                self._options.required,
            )

    def stop(self) -> None:
        self._client.close()


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return Spark's own Arrow schema for ``schema``; instants are in UTC, whatever the session's zone."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def delivered_rows(
    records: Records, schema: pa.Schema, start: int, end: int, required: Collection[str] = ()
) -> pa.RecordBatch:
    """Give stored records the shape of the source: its columns, then `FT`. Those of ``required`` may not be null.

    A column that the source has gained since is null. A record with a value that the source's type cannot hold is
    null, and its mark says what does not fit. Raises `CodecError` when no stored record can be read as the source has
    them today.
    """
    fields = [field for field in schema if field.name != FT]
    shape = pa.schema([field.with_nullable(field.name not in required) for field in fields])
    fitted = fit_rows(records.payload, shape)
    tries = pack_tries(records.attempts, records.first_failed_ms)
    marks = make_marks(records.roots, start, end, records.origins, tries, fitted.misfits)
    columns = dict(zip(shape.names, fitted.columns, strict=True))
    columns[FT] = marks.cast(schema.field(FT).type)
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
