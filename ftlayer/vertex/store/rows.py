"""Stored rows: a record batch that the vertex does not look into, and what the vertex knows of each of its rows.

In a store, rows are a *head* (msgpack: ids, attempts, histories) and a *body* (Arrow IPC). They are kept apart, so that
reading ids never touches payload. The schema of a body is stored once, by digest; see `ftlayer.vertex.store.rows`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.common.checks import named_type
from ftlayer.common.printable import described
from ftlayer.errors import StoreDamagedError
from ftlayer.records.ids import RootRange
from ftlayer.records.ipc import as_message, has_dictionaries, may_share, row_alone, with_views, without_views
from ftlayer.vertex.store.key_value import ReadTransaction, WriteTransaction

U64: TypeAlias = npt.NDArray[np.uint64]
I64: TypeAlias = npt.NDArray[np.int64]
I32: TypeAlias = npt.NDArray[np.int32]


class StoredAttempt(NamedTuple):
    """A failed attempt: the ``number``-th failure of its record, at ``wall_ms``.

    Its traceback is the text of the digest ``frames`` (see `ftlayer.vertex.store.rows`; b"" is none), and then
    ``last_line``; None stands for the reason and a line's end, which it mostly is. ``requeued_ms`` and ``requeued_by``
    are there where its record died of it and was given its attempts back.
    """

    number: int
    wall_ms: int
    reason: str
    operator: str
    place: str = ""
    frames: bytes = b""
    last_line: str | None = ""
    requeued_ms: int = 0
    requeued_by: str = ""


History: TypeAlias = tuple[StoredAttempt, ...]
"""The failed attempts of a record that are kept, oldest first."""

Edit: TypeAlias = tuple[int, str]
"""When a payload was changed last (wall_ms), and by whom."""

NOT_EDITED: Edit = (0, "")

_FORMAT = 3


@dataclass(frozen=True, slots=True)
class RowInfo:
    """Facts about n rows beside their payload.

    ``roots`` and ``origins`` are uint64[n], ``attempts`` int32[n] (1 on the first run), ``key_hashes``
    int32[n] or int32[n, selectors]. ``histories`` has one history a row, or is empty when no row ever failed;
    ``edits`` one edit, or is empty when no row was edited. ``texts`` are those that histories name, and maybe more.
    """

    roots: U64
    origins: U64
    attempts: I32
    key_hashes: I32 | None = None
    histories: tuple[History, ...] = ()
    edits: tuple[Edit, ...] = ()
    texts: Mapping[bytes, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.roots)

    def take(self, rows: I64) -> RowInfo:
        return RowInfo(
            self.roots[rows],
            self.origins[rows],
            self.attempts[rows],
            None if self.key_hashes is None else self.key_hashes[rows],
            tuple(self.histories[row] for row in rows) if self.histories else (),
            tuple(self.edits[row] for row in rows) if self.edits else (),
            self.texts,
        )

    def history(self, row: int) -> History:
        return self.histories[row] if self.histories else ()

    def edit(self, row: int) -> Edit:
        return self.edits[row] if self.edits else NOT_EDITED


@dataclass(frozen=True, slots=True)
class StoredBatch:
    info: RowInfo
    payload: pa.RecordBatch

    def __len__(self) -> int:
        return len(self.info)

    def with_roots(self, roots: U64) -> StoredBatch:
        return StoredBatch(replace(self.info, roots=roots), self.payload)


def first_attempts(roots: U64, key_hashes: I32 | None) -> RowInfo:
    """Return what is known of rows on their first run: they are their own origins."""
    return RowInfo(roots, roots, np.ones(len(roots), np.int32), key_hashes)


def encode_info(info: RowInfo) -> list[object]:
    """Return ``info`` as plain values for msgpack; what is the same in all rows is not written row by row."""
    hashes = info.key_hashes
    values: list[object] = [
        _FORMAT,
        _encode_roots(info.roots),
        None if info.origins is info.roots else info.origins.tobytes(),
        None if (info.attempts == 1).all() else info.attempts.astype(np.int32).tobytes(),
        None if hashes is None else [list(hashes.shape[1:]), hashes.astype(np.int32).tobytes()],
        info.histories or None,
    ]
    if info.texts:
        return [*values, info.edits, dict(info.texts)]
    return [*values, info.edits] if info.edits else values


def decode_info(values: Sequence[Any]) -> RowInfo:
    """Return what `encode_info` was given; arrays are read-only. `StoreDamagedError` for another format."""
    try:
        version, roots, origins, attempts, hashes, histories, *more = values
        if version != _FORMAT:
            raise ValueError(f"format {version}, and not {_FORMAT}")
        edits = more[0] if more else ()
        texts = more[1] if len(more) > 1 else {}
        ids = _decode_roots(roots)
        return RowInfo(
            ids,
            ids if origins is None else np.frombuffer(origins, np.uint64),
            np.ones(len(ids), np.int32) if attempts is None else np.frombuffer(attempts, np.int32),
            None if hashes is None else _decode_hashes(hashes, len(ids)),
            () if histories is None else tuple(map(decode_history, histories)),
            tuple((int(wall), str(by)) for wall, by in edits),
            texts,
        )
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"stored rows that cannot be read: {error}") from error


def _encode_roots(roots: U64) -> bytes | list[int]:
    n = len(roots)
    if n > 1 and int(roots[-1]) - int(roots[0]) == n - 1 and (roots[1:] - roots[:-1] == 1).all():
        return [int(roots[0]), n]
    return roots.tobytes()


def _decode_roots(roots: bytes | list[int]) -> U64:
    if isinstance(roots, bytes):
        return np.frombuffer(roots, np.uint64)
    first, n = roots
    return RootRange(first, n).ids()


def _decode_hashes(hashes: Any, rows: int) -> I32:
    shape, data = hashes
    return np.frombuffer(data, np.int32).reshape(rows, *shape)


def decode_history(entries: Iterable[Sequence[Any]]) -> History:
    """Return a history from its plain form. ValueError or TypeError for what is none."""
    return tuple(StoredAttempt(*entry) for entry in entries)


def pack(values: object) -> bytes:
    packed: bytes = msgpack.packb(values)
    return packed


def unpack(data: bytes | memoryview) -> list[Any]:
    """Return the list packed in ``data``; `StoreDamagedError` when it is not one."""
    try:
        values = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise StoreDamagedError(f"an entry of the store is no msgpack: {described(error)}") from error
    if not isinstance(values, list):
        raise StoreDamagedError(f"an entry of the store is {named_type(values)}, expected a list")
    return values


# Long texts that failed records share, one traceback of 100,000 records: each is stored once, with their number.


SHARED_FROM = 256
"""Texts of fewer characters are not worth an entry of their own."""

_PREFIX = b"text/"
_DIGEST_BYTES = 16


class TextChanges:
    """References that the calls of one transaction hold and release, written down in one go by `write`."""

    def __init__(self) -> None:
        self._changes: dict[bytes, int] = {}
        self._texts: dict[bytes, str] = {}
        self._digests: dict[str, bytes] = {}

    def hold(self, text: str) -> bytes:
        """Count one more attempt that has ``text``; return the digest to `read` it by."""
        digest = self._digests.get(text)
        if digest is None:
            digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
            self._digests[text], self._texts[digest] = digest, text
        self._changes[digest] = self._changes.get(digest, 0) + 1
        return digest

    def hold_all(self, history: History, known: Mapping[bytes, str]) -> None:
        """Count the texts of a record's attempts again; ``known`` has them by their digests."""
        for attempt in history:
            if attempt.frames:
                self._texts[attempt.frames] = known[attempt.frames]
                self._changes[attempt.frames] = self._changes.get(attempt.frames, 0) + 1

    def release_all(self, history: History) -> None:
        """Count the texts of a record's attempts, which is no failed one any more, once less."""
        for attempt in history:
            if attempt.frames:
                self._changes[attempt.frames] = self._changes.get(attempt.frames, 0) - 1

    def of_all(self, txn: ReadTransaction, histories: Iterable[History]) -> dict[bytes, str]:
        """Return the texts of attempts by digest; those that are released in this transaction can still be read."""
        digests = {attempt.frames for history in histories for attempt in history} - {b""}
        return {
            digest: self._texts[digest] if digest in self._texts else read(txn, digest) for digest in digests
        }

    def write(self, txn: WriteTransaction) -> None:
        """Store the counts, delete texts that no record has any more; `StoreDamagedError` for one the store lacks."""
        for digest, change in self._changes.items():
            if not change:
                continue
            stored = txn.get("meta", _PREFIX + digest)
            count, text = (0, self._texts.get(digest)) if stored is None else _decode(digest, stored)
            if text is None or count + change < 0:
                raise _missing(digest)
            if count + change:
                txn.put("meta", _PREFIX + digest, pack([count + change, text]))
            else:
                txn.delete("meta", _PREFIX + digest)
        self._changes.clear()


def read(txn: ReadTransaction, digest: bytes) -> str:
    """Return the text of ``digest``, "" for b"". `StoreDamagedError` when the store lacks it."""
    if not digest:
        return ""
    stored = txn.get("meta", _PREFIX + digest)
    if stored is None:
        raise _missing(digest)
    return _decode(digest, stored)[1]


def _decode(digest: bytes, value: bytes | memoryview) -> tuple[int, str]:
    try:
        count, text = unpack(value)
        return int(count), str(text)
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"the text {digest.hex()} cannot be read: {error}") from error


def _missing(digest: bytes) -> StoreDamagedError:
    return StoreDamagedError(f"the store lacks the text {digest.hex()} of records it holds")


# Payload in a store: Arrow IPC bytes, whose schema is stored once under its digest.
#
# A record batch becomes one IPC message without its schema. One with dictionary columns becomes a whole IPC
# stream, since a message alone lacks the dictionaries.


_PAYLOAD_PREFIX = b"schema/"
_PAYLOAD_DIGEST_BYTES = 16


class _KnownSchema(NamedTuple):
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
    """Writes and reads payload, and remembers the schemas it met. Schemas are never removed: they are few and small."""

    def __init__(self) -> None:
        self._latest: tuple[pa.Schema, bytes] | None = None
        self._schemas: dict[bytes, _KnownSchema] = {}

    def write(self, txn: WriteTransaction, payload: pa.RecordBatch) -> tuple[bytes, memoryview]:
        """Return the digest of the payload's schema, which is stored if it is new, and the IPC bytes."""
        digest = self._stored_digest(txn, payload.schema)
        return digest, memoryview(as_message(payload, dictionaries=self._schemas[digest].dictionaries))

    def rows(self, txn: WriteTransaction, payload: pa.RecordBatch) -> SingleRows:
        digest = self._stored_digest(txn, payload.schema)
        known = self._schemas[digest]
        return SingleRows(payload, digest, dictionaries=known.dictionaries, shares=known.shares)

    def _stored_digest(self, txn: WriteTransaction, schema: pa.Schema) -> bytes:
        digest = self._digest(schema)
        if txn.get("meta", _PAYLOAD_PREFIX + digest) is None:
            txn.put("meta", _PAYLOAD_PREFIX + digest, memoryview(schema.serialize()))
        return digest

    def read(self, txn: ReadTransaction, digest: bytes, body: bytes | memoryview) -> pa.RecordBatch:
        """Return the batch written as ``body``; it owns its memory. `StoreDamagedError` for what is none."""
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
        digest = hashlib.blake2b(memoryview(schema.serialize()), digest_size=_PAYLOAD_DIGEST_BYTES).digest()
        self._schemas[digest] = _KnownSchema.of(schema)
        self._latest = schema, digest
        return digest

    def schema(self, txn: ReadTransaction, digest: bytes) -> pa.Schema:
        return self._schema(txn, digest).schema

    def _schema(self, txn: ReadTransaction, digest: bytes) -> _KnownSchema:
        if digest not in self._schemas:
            stored = txn.get("meta", _PAYLOAD_PREFIX + digest)
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
    if len(payloads) == 1:
        return payloads[0]
    batches = pa.Table.from_batches(payloads).combine_chunks().to_batches()
    return batches[0] if batches else payloads[0]
