"""``format("ftlayer")``: what the vertex has to deliver to one query and source, as a Python Data Source.

Replays that are due and ingested records, in delivery order. An offset is ``{"next": n}``: rows
delivered before it. The rows of a range stay the same until a later batch begins, so a batch that
Spark runs again reads the same ones.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyarrow import types
from pyspark.sql.datasource import DataSource, InputPartition
from pyspark.sql.types import StructType

from ftlayer.errors import CodecError, ConfigError
from ftlayer.functions import data_sources
from ftlayer.functions.conversion import cast_by_value, kind_of, raw_type
from ftlayer.records.ids import pack_tries
from ftlayer.spark.stages.pages import make_marks
from ftlayer.spark.stages.task import FT
from ftlayer.vertex import calls
from ftlayer.vertex.client.client import VertexClient

# Stored rows in the shape that their source has today.
#
# The source may have gained columns: stored rows have null there. A column may have changed to a type that holds what
# the old one held; a value that it cannot hold fails its row, and no other. Everything else is refused.


def row_digests(batch: pa.RecordBatch) -> list[bytes]:
    """Return 16 bytes a row that stand for its content; equal rows have equal ones, NaN equals NaN.

    Text and times are taken as bytes and numbers: what Python cannot hold is what fails.
    """
    columns = [column.view(raw_type(column.type)).to_pylist() for column in batch.columns]
    return [
        hashlib.blake2b(repr(row).encode(), digest_size=16).digest() for row in zip(*columns, strict=True)
    ]


MAX_SHOWN = 100
"""Characters that a message shows of a value, and of what Arrow says about it."""

_WAY_OUT = (
    "read the source with its former schema until query.drain(timeout) returns True, and change it then (a stand-in "
    "will do for a column that the source has no more: withColumn(name, lit(None).cast(its former type)))"
)

_BECOMES = {
    "boolean": {"number", "text"},
    "number": {"text"},
    "text": {"number", "bytes", "date", "timestamp without a zone"},
    "bytes": {"text"},
    "date": {"text", "timestamp without a zone"},
    "timestamp": {"text"},
    "timestamp without a zone": {"text", "date"},
}
"""What a kind of type may become beside itself. What is not here would mean another thing (an int as a boolean, or
as a time), however well Arrow casts it."""


@dataclass(frozen=True)
class FittedRows:
    """``columns`` in the order of the schema; ``misfits`` says by row what does not fit: the row is null there."""

    columns: list[pa.Array]
    misfits: dict[int, str]


def fit_rows(stored: pa.RecordBatch, schema: pa.Schema) -> FittedRows:
    """Bring stored rows to ``schema``, the source's columns today.

    Raises `CodecError` when no row can be: a column is gone, one that has come may not be null, or a type has become
    one of another kind.
    """
    check_none_gone(stored.schema, schema)
    columns = []
    misfits: dict[int, str] = {}
    for field in schema:
        if field.name in stored.schema.names:
            fitted = _fit_column(stored.column(field.name), field, misfits)
            columns.append(_without_missing(stored.column(field.name), fitted, field, misfits))
        elif field.nullable:
            # As in Spark's own file formats: rows from before a column was there have none.
            columns.append(pa.nulls(stored.num_rows, field.type))
        else:
            raise _refused(stored.schema, field, "it may not be null, and they have no such column")
    return FittedRows(columns, misfits)


def check_none_gone(stored: pa.Schema, schema: pa.Schema) -> None:
    """Raise `CodecError` if stored rows have a column that the source has no more."""
    gone = [name for name in stored.names if name not in schema.names]
    if gone:
        raise CodecError(
            f"stored records have a column {gone[0]!r} ({stored.field(gone[0]).type}) and do not fit the source, "
            f"which has no such column now ({', '.join(schema.names)}); {_WAY_OUT}"
        )


def _fit_column(column: pa.Array, field: pa.Field, misfits: dict[int, str]) -> pa.Array:
    if column.type == field.type:
        return column
    if not may_become(column.type, field.type):
        raise CodecError(
            f"stored records do not fit column {field.name!r} of the source as it is now: {column.type} is not "
            f"read as {field.type}; {_WAY_OUT}"
        )
    try:
        fitted = cast_by_value(column, field.type)
    except pa.ArrowException:
        fitted = _cast_one_by_one(column, field, misfits)
    return _without_changed(column, fitted, field, misfits)


def _cast_one_by_one(column: pa.Array, field: pa.Field, misfits: dict[int, str]) -> pa.Array:
    parts = []
    for row in range(len(column)):
        # Not a slice: Arrow casts what is around it in a list too.
        value = column.take(pa.array([row]))
        try:
            parts.append(cast_by_value(value, field.type))
        except pa.ArrowException as error:
            misfits.setdefault(row, _misfit(value, field, str(error)))
            parts.append(pa.nulls(1, field.type))
    return pa.concat_arrays(parts)


def _without_changed(
    column: pa.Array, fitted: pa.Array, field: pa.Field, misfits: dict[int, str]
) -> pa.Array:
    """Take out values that the type does not hold as they were. Text is parsed: what it reads as is what it meant.

    Arrow reads hexadecimal digits too, which Spark does not, and takes a number that is too large for infinity.
    """
    if kind_of(column.type) == "text":
        compute, odd, text = pa.compute, None, column.cast(pa.large_string())
        if types.is_integer(field.type):
            odd = compute.match_substring(text, "x", ignore_case=True)
        elif types.is_floating(field.type):
            infinite = compute.is_inf(fitted.cast(pa.float64()))
            meant = compute.match_substring(text, "inf", ignore_case=True)
            odd = compute.and_(infinite, compute.invert(meant))
        if odd is None:
            return fitted
        return _without(odd, "it is no such number", column, fitted, field, misfits)
    back = row_digests(pa.record_batch([cast_by_value(fitted, column.type, safe=False)], ["value"]))
    was = row_digests(pa.record_batch([column], ["value"]))
    valid = fitted.is_valid().to_pylist()
    changed = [there and one != other for there, one, other in zip(valid, was, back, strict=True)]
    return _without(changed, "it would be changed", column, fitted, field, misfits)


def _without_missing(
    column: pa.Array, fitted: pa.Array, field: pa.Field, misfits: dict[int, str]
) -> pa.Array:
    """Take out rows with a null where the schema has none: Spark would read it as 0."""
    if not _has_missing(fitted, field):
        return fitted
    missing = [
        row not in misfits and _has_missing(fitted.take(pa.array([row])), field) for row in range(len(fitted))
    ]
    return _without(missing, "it may not be null", column, fitted, field, misfits)


def _has_missing(values: pa.Array, field: pa.Field) -> bool:
    if values.null_count and not field.nullable:
        return True
    kind, values = field.type, values.drop_null()
    if types.is_struct(kind):
        return any(_has_missing(values.field(at), each) for at, each in enumerate(kind))
    if types.is_map(kind):
        return _has_missing(values.items, kind.item_field)
    is_list = isinstance(kind, pa.ListType | pa.LargeListType)
    return is_list and _has_missing(values.flatten(), kind.value_field)


def _without(
    wrong: Sequence[bool] | pa.Array,
    why: str,
    column: pa.Array,
    fitted: pa.Array,
    field: pa.Field,
    misfits: dict[int, str],
) -> pa.Array:
    odd = pa.array(wrong, pa.bool_()).fill_null(False)
    if not odd.true_count:
        return fitted
    for row in pa.compute.indices_nonzero(odd).to_pylist():
        misfits.setdefault(row, _misfit(column.slice(row, 1), field, why))
    return pa.compute.if_else(odd, pa.scalar(None, field.type), fitted)


def may_become(old: pa.DataType, new: pa.DataType) -> bool:
    """Whether values of type ``old`` may be read as ``new``; single ones may still not fit."""
    if old == new:
        return True
    kind = kind_of(old)
    if kind:
        return kind_of(new) == kind or kind_of(new) in _BECOMES.get(kind, set())
    if types.is_struct(old) and types.is_struct(new):
        names = [field.name for field in old]
        return names == [field.name for field in new] and all(
            may_become(old.field(name).type, new.field(name).type) for name in names
        )
    if (types.is_list(old) or types.is_large_list(old)) and (types.is_list(new) or types.is_large_list(new)):
        return may_become(old.value_type, new.value_type)
    if types.is_map(old) and types.is_map(new):
        return may_become(old.key_type, new.key_type) and may_become(old.item_type, new.item_type)
    return False


def _refused(stored: pa.Schema, field: pa.Field, why: str) -> CodecError:
    return CodecError(
        f"stored records of {stored.names} do not fit column {field.name!r} ({field.type}) of the source as it is "
        f"now: {why}; {_WAY_OUT}"
    )


def _misfit(value: pa.Array, field: pa.Field, why: str) -> str:
    return (
        f"CodecError: column {field.name!r} of the source is {field.type} now, and the stored record has "
        f"{_cut(str(value[0]))!r} ({value.type}): {_cut(why)}; requeue it when a schema that it fits is read"
    )


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


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
        texts = ("address", "token", "stream", "query", "root_certs", "client_pem")
        read: dict[str, Any] = {name: options.get(name, "") for name in texts}
        read["required"] = tuple(json.loads(options.get("required", "[]")))
        for name, least in (("max_rows", 1), ("partitions", 1), ("drain_until_ms", 0)):
            text = str(options.get(name, getattr(cls, name)))
            if not text.isdecimal() or int(text) < least:
                raise ConfigError(
                    f'format("{FORMAT}"): option {name!r} must be a number from {least}, not {text!r}'
                )
            read[name] = int(text)
        return cls(**read)

    def client(self) -> VertexClient:
        return VertexClient(
            self.address,
            self.token,
            root_certs=self.root_certs.encode() or None,
            client_pem=self.client_pem.encode() or None,
            client_id="delivery-source",
        )


class DeliverySource(DataSource):
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


class DeliveryReader(data_sources.DataSourceStreamReader, data_sources.SupportsTriggerAvailableNow):
    """Plans and reads deliveries. The vertex keeps what a batch was given until a later batch begins."""

    def __init__(self, options: DeliveryOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._client = options.client()
        self._until: int | None = None
        self._told: int | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {"next": 0}

    def getDefaultReadLimit(self) -> data_sources.ReadLimit:  # noqa: N802 - Spark's name
        return data_sources.ReadMaxRows(self._options.max_rows)

    def unasked_limit(self) -> data_sources.ReadLimit:
        return self.getDefaultReadLimit()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix how far this run reads; what becomes due later is the next run's, save when draining."""
        if not self._options.drain_until_ms:
            self._until = self._deliverable(0, ALL)

    def latestOffset(self, start: dict[str, int], limit: data_sources.ReadLimit) -> dict[str, int]:  # noqa: N802
        rows = limit.max_rows if isinstance(limit, data_sources.ReadMaxRows) else ALL
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

    def _status(self) -> calls.QueryStatus:
        return self._client.call(calls.QueryStatusCall(self._options.query))

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
        return self._client.call(calls.Deliverable(self._options.stream, start, rows)).end

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        first, last = start["next"], end["next"]
        count = min(self._options.partitions, last - first)
        edges = [first + (last - first) * i // count for i in range(count + 1)] if count else []
        return [DeliveryRange(a, b, first, last) for a, b in pairwise(edges)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, DeliveryRange)
        with self._options.client() as client:
            reply = client.call(calls.ReadDeliveries(self._options.stream, partition.first, partition.last))
        schema, required = data_sources.to_arrow_schema(self._schema), self._options.required
        for records in reply.batches:
            yield delivered_rows(records, schema, partition.start, partition.end, required)

    def stop(self) -> None:
        self._client.close()


def delivered_rows(
    records: calls.Records, schema: pa.Schema, start: int, end: int, required: Collection[str] = ()
) -> pa.RecordBatch:
    """Give stored records the shape of the source: its columns, then `FT`. Those of ``required`` may not be null.

    A column that the source has gained since is null; so is a record with a value that the source's type cannot hold,
    and its mark says what does not fit. Raises `CodecError` when no stored record can be read as the source has them
    today.
    """
    fields = [field for field in schema if field.name != FT]
    shape = pa.schema([field.with_nullable(field.name not in required) for field in fields])
    fitted = fit_rows(records.payload, shape)
    tries = pack_tries(records.attempts, records.first_failed_ms)
    marks = make_marks(records.roots, start, end, records.origins, tries, fitted.misfits)
    columns = dict(zip(shape.names, fitted.columns, strict=True))
    columns[FT] = marks.cast(schema.field(FT).type)
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
