"""Payload in a store: Arrow IPC bytes, whose schema is stored once under its digest.

A record batch becomes one IPC message without its schema. One with dictionary columns becomes a whole IPC
stream, since a message alone lacks the dictionaries.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import pyarrow as pa

from ftlayer.errors import StoreDamagedError
from ftlayer.records.ipc import as_message, has_dictionaries, may_share, row_alone, with_views, without_views
from ftlayer.store.kept import ReadTransaction, WriteTransaction
from ftlayer.store.rows import I64

_PREFIX = b"schema/"
_DIGEST_BYTES = 16


class _KnownSchema(NamedTuple):
    """A schema, whether parts of it are coded by dictionaries, and whether its rows may share values."""

    schema: pa.Schema
    dictionaries: bool
    shares: bool

    @classmethod
    def of(cls, schema: pa.Schema) -> _KnownSchema:
        return cls(schema, has_dictionaries(schema), may_share(schema))


class SingleRows:
    """Writes rows of a payload each by itself, with nothing of the rows beside it. ``digest`` is that of the schema."""

    def __init__(self, payload: pa.RecordBatch, digest: bytes, *, dictionaries: bool, shares: bool) -> None:
        self.digest = digest
        self._payload = payload
        self._dictionaries = dictionaries
        self._shares = shares

    def body(self, row: int) -> bytes:
        own = row_alone(self._payload, row, shares=self._shares)
        return bytes(as_message(own, dictionaries=self._dictionaries))


class Payloads:
    """Writes and reads payload, and remembers the schemas it met. Schemas are never removed: they are few
    and small.
    """

    def __init__(self) -> None:
        self._latest: tuple[pa.Schema, bytes] | None = None
        self._schemas: dict[bytes, _KnownSchema] = {}

    def write(self, txn: WriteTransaction, payload: pa.RecordBatch) -> tuple[bytes, memoryview]:
        """Return the digest of the payload's schema, which is stored if it is new, and the IPC bytes."""
        digest = self._stored_digest(txn, payload.schema)
        return digest, memoryview(as_message(payload, dictionaries=self._schemas[digest].dictionaries))

    def rows(self, txn: WriteTransaction, payload: pa.RecordBatch) -> SingleRows:
        """Return what writes rows of a payload one by one; the schema is stored if it is new."""
        digest = self._stored_digest(txn, payload.schema)
        known = self._schemas[digest]
        return SingleRows(payload, digest, dictionaries=known.dictionaries, shares=known.shares)

    def _stored_digest(self, txn: WriteTransaction, schema: pa.Schema) -> bytes:
        digest = self._digest(schema)
        if txn.get("meta", _PREFIX + digest) is None:
            txn.put("meta", _PREFIX + digest, memoryview(schema.serialize()))
        return digest

    def read(self, txn: ReadTransaction, digest: bytes, body: bytes | memoryview) -> pa.RecordBatch:
        """Return the record batch written as ``body``; it owns its memory.

        Raises `StoreDamagedError` for an unknown schema or bytes that are not its record batch.
        """
        known = self._schema(txn, digest)
        owned = pa.py_buffer(body if isinstance(body, bytes) else bytes(body))
        try:
            if not known.dictionaries:
                return pa.ipc.read_record_batch(owned, known.schema)
            with pa.ipc.open_stream(owned) as reader:
                return reader.read_next_batch()
        except (pa.ArrowException, OSError) as error:
            raise StoreDamagedError(f"stored payload that is not a record batch: {error}") from error

    def _digest(self, schema: pa.Schema) -> bytes:
        if self._latest is not None and self._latest[0].equals(schema, check_metadata=True):
            return self._latest[1]
        digest = hashlib.blake2b(memoryview(schema.serialize()), digest_size=_DIGEST_BYTES).digest()
        self._schemas[digest] = _KnownSchema.of(schema)
        self._latest = schema, digest
        return digest

    def schema(self, txn: ReadTransaction, digest: bytes) -> pa.Schema:
        """Return the schema of this digest; `StoreDamagedError` if the store lacks it."""
        return self._schema(txn, digest).schema

    def _schema(self, txn: ReadTransaction, digest: bytes) -> _KnownSchema:
        if digest not in self._schemas:
            stored = txn.get("meta", _PREFIX + digest)
            if stored is None:
                raise StoreDamagedError(f"the store lacks the schema {digest.hex()} of rows it holds")
            schema = pa.ipc.read_schema(pa.py_buffer(bytes(stored)))
            self._schemas[digest] = _KnownSchema.of(schema)
        return self._schemas[digest]


def take_rows(payload: pa.RecordBatch, rows: I64) -> pa.RecordBatch:
    """Return ``rows`` (int64[m]) of a record batch, in that order; without a copy where they stand
    together. Rows of string or binary views are copied: a slice is written with all the text of its batch.
    """
    together = len(rows) > 0 and len(rows) == rows[-1] - rows[0] + 1 and bool((rows[1:] > rows[:-1]).all())
    if together and len(rows) == payload.num_rows:
        return payload
    first, end = (int(rows.min()), int(rows.max()) + 1) if len(rows) else (0, 0)
    part = payload.slice(first, end - first)
    plain = without_views(part)
    if plain is not part:
        return with_views(_taken(plain, rows - first), payload.schema)
    return part if together else _taken(part, rows - first)


def _taken(payload: pa.RecordBatch, rows: I64) -> pa.RecordBatch:
    try:
        return payload.take(pa.array(rows))
    except pa.ArrowNotImplementedError:  # some types have no kernel for `take`, but can be put together
        return concat([payload.slice(row, 1) for row in rows.tolist()] or [payload.slice(0, 0)])


def concat(payloads: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return record batches of one schema as one; at least one must be given."""
    if len(payloads) == 1:
        return payloads[0]
    batches = pa.Table.from_batches(payloads).combine_chunks().to_batches()
    return batches[0] if batches else payloads[0]
