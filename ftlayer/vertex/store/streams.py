"""Streams in a store: their options, the positions of their source, and their delivery log.

The log of a stream gives every row that was made deliverable an offset. Its bounds are kept beside it:
``next`` (offset of the next row), ``committed`` (all before it are decided) and ``floor`` (all before it
are removed), with floor <= committed <= next.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.errors import StoreDamagedError
from ftlayer.records.failures import Failure, from_columns, to_columns
from ftlayer.vertex.store.key_value import ReadTransaction, WriteTransaction
from ftlayer.vertex.store.rows import (
    I64,
    Payloads,
    RowInfo,
    StoredBatch,
    decode_info,
    encode_info,
    pack,
    take_rows,
    unpack,
)


def put_audit(txn: WriteTransaction, at_ms: int, values: list[object]) -> None:
    """Store an entry (plain values) behind those of the same moment."""
    start = at_ms.to_bytes(8, "big")
    last = next(txn.scan("audit", start, start + b"\xff" * 9, reverse=True), None)
    serial = 0 if last is None else int.from_bytes(last[0][8:], "big") + 1
    txn.put("audit", start + serial.to_bytes(8, "big"), pack(values))


def latest_audit(txn: ReadTransaction, before: bytes = b"") -> Iterator[tuple[bytes, list[Any]]]:
    for key, value in txn.scan("audit", b"", before or None, reverse=True):
        yield bytes(key), unpack(value)


def audit_time(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


def trim_audit(txn: WriteTransaction, before_ms: int, keep: int, most: int) -> None:
    """Delete up to ``most`` of the oldest entries: those from before ``before_ms``, and all beyond ``keep``."""
    surplus = txn.count("audit") - keep
    for key, _ in txn.scan("audit"):
        if not most or (surplus <= 0 and audit_time(bytes(key)) >= before_ms):
            return
        txn.delete("audit", key)
        surplus -= 1
        most -= 1


# Sealed batches: query (u32), batch (u64), part (u32) → the head (part 0), parts of failed rows, the report (the last).


_BATCH_FORMAT = 4

_REPORT = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class StoredEmit:
    """Rows of ``stream`` that were handed on: ``roots`` and ``values`` are uint64[n] as bytes.

    ``segment`` has their source rows; -1 where the delivery log has them. ``ids``, plain values that mean
    nothing to the store, are kept for a tracker that wants them.
    """

    stream: str
    segment: int
    roots: bytes
    values: bytes
    ids: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class BatchHead:
    """What is known of a sealed batch. ``said`` is a digest of what its seal said, ``parts`` counts its parts."""

    committed: bool
    said: bytes
    delivered: tuple[tuple[str, int, int], ...]
    redelivered: tuple[Failure, ...]
    resumed: tuple[Failure, ...]
    emitted: tuple[StoredEmit, ...]
    parts: int
    waiting: int
    dead: int


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Failed rows of a rewindable source, one failure a row."""

    stream: str
    rows: StoredBatch
    failures: tuple[Failure, ...]


def get_batch(txn: ReadTransaction, query: int, batch: int) -> BatchHead | None:
    value = txn.get("batches", _batch_key(query, batch, 0))
    if value is None:
        return None
    try:
        version, *fields = unpack(value)
        if version != _BATCH_FORMAT:
            raise ValueError(f"format {version}, and not {_BATCH_FORMAT}")
        committed, said, delivered, redelivered, resumed, emitted, parts, waiting, dead = fields
        return BatchHead(
            committed,
            said,
            tuple((stream, start, end) for stream, start, end in delivered),
            tuple(from_columns(redelivered)),
            tuple(from_columns(resumed)),
            tuple(StoredEmit(*emit) for emit in emitted),
            parts,
            waiting,
            dead,
        )
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"sealed batch {batch} cannot be read: {error}") from error


def put_batch(txn: WriteTransaction, query: int, batch: int, head: BatchHead) -> None:
    values = [
        _BATCH_FORMAT,
        head.committed,
        head.said,
        head.delivered,
        to_columns(head.redelivered),
        to_columns(head.resumed),
        [[emit.stream, emit.segment, emit.roots, emit.values, emit.ids] for emit in head.emitted],
        head.parts,
        head.waiting,
        head.dead,
    ]
    txn.put("batches", _batch_key(query, batch, 0), pack(values))


def put_batch_part(
    txn: WriteTransaction, query: int, batch: int, part: int, content: BatchPart, payloads: Payloads
) -> None:
    digest, body = payloads.write(txn, content.rows.payload)
    values = [
        _BATCH_FORMAT,
        content.stream,
        to_columns(content.failures),
        encode_info(content.rows.info),
        digest,
        body,
    ]
    txn.put("batches", _batch_key(query, batch, part), pack(values))


def batch_parts(
    txn: ReadTransaction, query: int, batch: int, count: int, payloads: Payloads
) -> Iterator[BatchPart]:
    for part in range(1, count + 1):
        value = txn.get("batches", _batch_key(query, batch, part))
        if value is None:
            raise StoreDamagedError(f"part {part} of sealed batch {batch} is missing from the store")
        try:
            _, stream, failures, info, digest, body = unpack(value)
            payload = payloads.read(txn, digest, body)
            yield BatchPart(stream, StoredBatch(decode_info(info), payload), tuple(from_columns(failures)))
        except (ValueError, TypeError) as error:
            raise StoreDamagedError(f"part {part} of sealed batch {batch} cannot be read: {error}") from error


def delete_batch_parts(txn: WriteTransaction, query: int, batch: int, count: int) -> None:
    for part in range(1, count + 1):
        txn.delete("batches", _batch_key(query, batch, part))


def delete_batch(txn: WriteTransaction, query: int, batch: int) -> None:
    txn.delete("batches", _batch_key(query, batch, 0))


def put_batch_report(txn: WriteTransaction, query: int, batch: int, values: list[Any]) -> None:
    txn.put("batches", _batch_key(query, batch, _REPORT), pack(values))


def get_batch_report(txn: ReadTransaction, query: int, batch: int) -> list[Any] | None:
    value = txn.get("batches", _batch_key(query, batch, _REPORT))
    if value is None:
        return None
    try:
        found: list[Any] = unpack(value)
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"the report of batch {batch} cannot be read: {error}") from error
    return found


def delete_batch_report(txn: WriteTransaction, query: int, batch: int) -> None:
    txn.delete("batches", _batch_key(query, batch, _REPORT))


def _batch_key(query: int, batch: int, part: int) -> bytes:
    return query.to_bytes(4, "big") + batch.to_bytes(8, "big") + part.to_bytes(4, "big")


# The table ``meta``: a query's run and progress, a topology's run, the replies to a client's latest calls.


_QUERY, _JOB, _CLIENT = b"query/", b"job/", b"client/"
_TAIL_BYTES = 9  # behind a client: a slash and the sequence, whatever the name contains


@dataclass(frozen=True, slots=True)
class QueryRecord:
    """A query. Batch ids are -1 where there was none yet; ``title`` is what people call it, "" if that is unknown."""

    number: int
    epoch: int
    run: str
    streams: tuple[str, ...]
    last_sealed: int = -1
    last_committed: int = -1
    title: str = ""


def get_query(txn: ReadTransaction, name: str) -> QueryRecord | None:
    value = txn.get("meta", _QUERY + name.encode())
    return None if value is None else _decode_query(value)


def put_query(txn: WriteTransaction, name: str, record: QueryRecord) -> None:
    values = [
        record.number,
        record.epoch,
        record.run,
        record.streams,
        record.last_sealed,
        record.last_committed,
        record.title,
    ]
    txn.put("meta", _QUERY + name.encode(), pack(values))


def all_queries(txn: ReadTransaction) -> Iterator[tuple[str, QueryRecord]]:
    for key, value in txn.scan("meta", _QUERY, b"query0"):  # "0" comes after "/"
        yield bytes(key)[len(_QUERY) :].decode(), _decode_query(value)


def _decode_query(value: bytes | memoryview) -> QueryRecord:
    try:
        number, epoch, run, streams, sealed, committed, title = unpack(value)
        return QueryRecord(number, epoch, run, tuple(streams), sealed, committed, title)
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"a query of the store cannot be read: {error}") from error


def put_job(txn: WriteTransaction, name: str, run: str) -> None:
    txn.put("meta", _JOB + name.encode(), run.encode())


def all_jobs(txn: ReadTransaction) -> Iterator[tuple[str, str]]:
    for key, value in txn.scan("meta", _JOB, b"job0"):  # "0" comes after "/"
        try:
            yield bytes(key)[len(_JOB) :].decode(), bytes(value).decode()
        except UnicodeDecodeError as error:
            raise StoreDamagedError(f"the run of a topology in the store cannot be read: {error}") from error


def put_reply(txn: WriteTransaction, client: str, sequence: int, reply: list[object]) -> None:
    txn.put("meta", _client_key(client, sequence), pack(reply))


def delete_reply(txn: WriteTransaction, client: str, sequence: int) -> None:
    txn.delete("meta", _client_key(client, sequence))


def all_replies(txn: ReadTransaction) -> Iterator[tuple[str, int, list[object]]]:
    for key, value in txn.scan("meta", _CLIENT, b"client0"):  # "0" comes after "/"
        name, sequence = bytes(key)[len(_CLIENT) : -_TAIL_BYTES], bytes(key)[1 - _TAIL_BYTES :]
        try:
            yield name.decode(), int.from_bytes(sequence, "big"), unpack(value)
        except UnicodeDecodeError as error:
            raise StoreDamagedError(f"key {bytes(key).hex()} of the store is no client's: {error}") from error


def _client_key(client: str, sequence: int) -> bytes:
    return _CLIENT + client.encode() + b"/" + sequence.to_bytes(8, "big")


# Segments: rows as they came in one call, under a sequence number, until the last of them is done.
#
# A segment is two entries, head and body (see `ftlayer.vertex.store.rows`), at neighbouring keys. Which rows are
# done is a bitmap beside it. Sequence numbers rise, so segments are appended.


Mask: TypeAlias = npt.NDArray[np.bool_]

_HEAD, _BODY = b"\0", b"\1"


class SegmentKind(IntEnum):
    TRACKED = 0  # each row that is not done is pending, or is to be replayed after a restart
    LOG = 1  # rows of a stream's delivery log
    SEALED = 2  # source rows of what a sealed batch emitted; they become TRACKED at its commit


@dataclass(frozen=True, slots=True)
class Head:
    kind: SegmentKind
    stream: int
    digest: bytes
    info: RowInfo

    def __len__(self) -> int:
        return len(self.info)


class Segments:
    def __init__(self, payloads: Payloads) -> None:
        self._payloads = payloads

    def append(
        self, txn: WriteTransaction, sequence: int, stream: int, kind: SegmentKind, rows: StoredBatch
    ) -> None:
        """Store rows as segment ``sequence``, which must be above all others."""
        digest, body = self._payloads.write(txn, rows.payload)
        head = pack([int(kind), stream, digest, encode_info(rows.info)])
        txn.put("segments", _key(sequence) + _HEAD, head, append=True)
        txn.put("segments", _key(sequence) + _BODY, body, append=True)

    def change_kind(self, txn: WriteTransaction, sequence: int, kind: SegmentKind) -> Head:
        """Make a segment's rows serve another purpose; return its new head."""
        head = replace(self.head(txn, sequence), kind=kind)
        packed = pack([int(kind), head.stream, head.digest, encode_info(head.info)])
        txn.put("segments", _key(sequence) + _HEAD, packed)
        return head

    def head(self, txn: ReadTransaction, sequence: int) -> Head:
        value = txn.get("segments", _key(sequence) + _HEAD)
        if value is None:
            raise StoreDamagedError(f"segment {sequence} is missing from the store")
        return _decode_head(value)

    def rows(self, txn: ReadTransaction, sequence: int, which: I64 | None = None) -> StoredBatch:
        head = self.head(txn, sequence)
        if which is None:
            return StoredBatch(head.info, self._whole_payload(txn, sequence, head))
        return StoredBatch(head.info.take(which), self.payload(txn, sequence, head, which))

    def payload(self, txn: ReadTransaction, sequence: int, head: Head, which: I64) -> pa.RecordBatch:
        return take_rows(self._whole_payload(txn, sequence, head), which)

    def body(self, txn: ReadTransaction, sequence: int) -> bytes:
        return bytes(self._body(txn, sequence))

    def _body(self, txn: ReadTransaction, sequence: int) -> bytes | memoryview:
        body = txn.get("segments", _key(sequence) + _BODY)
        if body is None:
            raise StoreDamagedError(f"the payload of segment {sequence} is missing from the store")
        return body

    def _whole_payload(self, txn: ReadTransaction, sequence: int, head: Head) -> pa.RecordBatch:
        payload = self._payloads.read(txn, head.digest, self._body(txn, sequence))
        if payload.num_rows != len(head):
            raise StoreDamagedError(f"segment {sequence} has {len(head)} ids for {payload.num_rows} rows")
        return payload

    def delete(self, txn: WriteTransaction, sequence: int) -> None:
        key = _key(sequence)
        txn.delete("segments", key + _HEAD)
        txn.delete("segments", key + _BODY)
        txn.delete("done", key)

    def put_done(self, txn: WriteTransaction, sequence: int, done: Mask) -> None:
        txn.put("done", _key(sequence), np.packbits(done, bitorder="little").tobytes())

    def done(self, txn: ReadTransaction, sequence: int, rows: int) -> Mask:
        value = txn.get("done", _key(sequence))
        if value is None:
            return np.zeros(rows, np.bool_)
        if len(value) != -(-rows // 8):
            raise StoreDamagedError(f"the bitmap of segment {sequence} does not fit its {rows} rows")
        bits = np.unpackbits(np.frombuffer(value, np.uint8), count=rows, bitorder="little")
        return bits.astype(np.bool_)

    def heads(self, txn: ReadTransaction) -> Iterator[tuple[int, Head]]:
        """Iterate over all segments in order, without reading payload."""
        sequence = -1
        while True:
            # A scan goes on to the body, so each head is found by a scan of its own.
            found = next(iter(txn.scan("segments", _key(sequence + 1))), None)
            if found is None:
                return
            key, value = found
            if len(key) != 9 or key[8:] != _HEAD:
                raise StoreDamagedError(f"key {key.hex()} of the store's segments is not that of a head")
            sequence = int.from_bytes(key[:8], "big")
            yield sequence, _decode_head(value)


def _key(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def _decode_head(value: bytes | memoryview) -> Head:
    try:
        kind, stream, digest, info = unpack(value)
        return Head(SegmentKind(kind), stream, digest, decode_info(info))
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"a segment's head cannot be read: {error}") from error


_STREAM, _BOUNDS, _POSITION, _CURSOR = b"stream/", b"bounds/", b"position/", b"cursor/"
_BOUNDS_FORMAT = struct.Struct(">QQQ")


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """A stream: its number, its options as plain values, and the query that owns it ("" if none does)."""

    number: int
    options: tuple[object, ...]
    query: str


@dataclass(frozen=True, slots=True)
class LogBounds:
    """How far a stream's delivery log has come, in offsets."""

    next: int = 0
    committed: int = 0
    floor: int = 0


@dataclass(frozen=True, slots=True)
class LogEntry:
    """The rows of a segment, which have the offsets from ``start`` on."""

    start: int
    segment: int
    rows: int

    @property
    def end(self) -> int:
        return self.start + self.rows


def put_stream(txn: WriteTransaction, name: str, record: StreamRecord) -> None:
    txn.put("meta", _STREAM + name.encode(), pack([record.number, record.options, record.query]))


def all_streams(txn: ReadTransaction) -> Iterator[tuple[str, StreamRecord]]:
    for key, value in txn.scan("meta", _STREAM, _after(_STREAM)):
        yield bytes(key)[len(_STREAM) :].decode(), _decode_stream(value)


def next_stream_number(txn: ReadTransaction) -> int:
    return 1 + max((record.number for _, record in all_streams(txn)), default=0)


def get_position(txn: ReadTransaction, stream: int, partition: str) -> tuple[bytes | None, bytes] | None:
    """Return (start, end) of the last rows accepted from a source partition, or None before the first."""
    value = txn.get("meta", _position_key(stream) + partition.encode())
    return None if value is None else _decode_position(value)


def put_position(txn: WriteTransaction, stream: int, partition: str, start: bytes | None, end: bytes) -> None:
    txn.put("meta", _position_key(stream) + partition.encode(), pack([start, end]))


def all_positions(txn: ReadTransaction, stream: int) -> dict[str, bytes]:
    prefix = _position_key(stream)
    return {
        bytes(key)[len(prefix) :].decode(): _decode_position(value)[1]
        for key, value in txn.scan("meta", prefix, _after(prefix))
    }


def get_bounds(txn: ReadTransaction, stream: int) -> LogBounds:
    value = txn.get("meta", _BOUNDS + stream.to_bytes(4, "big"))
    if value is None:
        return LogBounds()
    try:
        return LogBounds(*_BOUNDS_FORMAT.unpack(value))
    except struct.error as error:
        raise StoreDamagedError(f"the bounds of the log of stream {stream} cannot be read") from error


def put_bounds(txn: WriteTransaction, stream: int, bounds: LogBounds) -> None:
    packed = _BOUNDS_FORMAT.pack(bounds.next, bounds.committed, bounds.floor)
    txn.put("meta", _BOUNDS + stream.to_bytes(4, "big"), packed)


class StreamTime(StrEnum):
    ASKED_PAUSE = "pause/"  # the longest that a failure has ever asked for
    DIED = "died/"  # Unix, in the key of the last dead letter that is gone


def get_ms(txn: ReadTransaction, kind: StreamTime, stream: int) -> int:
    value = txn.get("meta", kind.encode() + stream.to_bytes(4, "big"))
    return 0 if value is None else int.from_bytes(value, "big")


def put_ms(txn: WriteTransaction, kind: StreamTime, stream: int, time_ms: int) -> None:
    txn.put("meta", kind.encode() + stream.to_bytes(4, "big"), time_ms.to_bytes(8, "big"))


def get_cursor(txn: ReadTransaction, stream: int, reader: str) -> bytes:
    """Return how far a reader has read a stream's dead letters, in its own words; b"" before the first."""
    value = txn.get("meta", _CURSOR + b"%08x/" % stream + reader.encode())
    return b"" if value is None else bytes(value)


def put_cursor(txn: WriteTransaction, stream: int, reader: str, position: bytes) -> None:
    txn.put("meta", _CURSOR + b"%08x/" % stream + reader.encode(), position)


def put_entry(txn: WriteTransaction, stream: int, entry: LogEntry) -> None:
    txn.put("delivery", _entry_key(stream, entry.start), pack([entry.segment, entry.rows]))


def delete_entry(txn: WriteTransaction, stream: int, entry: LogEntry) -> None:
    txn.delete("delivery", _entry_key(stream, entry.start))


def log_entries(txn: ReadTransaction, stream: int, start: int, end: int) -> Iterator[LogEntry]:
    """Iterate over the log's entries that have rows in [start, end), in order."""
    if end <= start:
        return
    first = _entry_key(stream, 0)
    before = next(iter(txn.scan("delivery", first, _entry_key(stream, start + 1), reverse=True)), None)
    if before is not None and (entry := _decode_entry(*before)).end > start:
        yield entry
    for key, value in txn.scan("delivery", _entry_key(stream, start + 1), _entry_key(stream, end)):
        yield _decode_entry(key, value)


def _after(prefix: bytes) -> bytes:
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _position_key(stream: int) -> bytes:
    # The slash ends the number, so that no stream's prefix is the beginning of another's.
    return _POSITION + b"%08x/" % stream


def _entry_key(stream: int, offset: int) -> bytes:
    return stream.to_bytes(4, "big") + offset.to_bytes(8, "big")


def _decode_stream(value: bytes | memoryview) -> StreamRecord:
    try:
        number, options, query = unpack(value)
        return StreamRecord(number, tuple(_tuples(options)), query)
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"a stream of the store cannot be read: {error}") from error


def _tuples(values: Sequence[Any]) -> Sequence[object]:
    return [tuple(value) if isinstance(value, list) else value for value in values]


def _decode_position(value: bytes | memoryview) -> tuple[bytes | None, bytes]:
    try:
        start, end = unpack(value)
        return start, end
    except ValueError as error:
        raise StoreDamagedError(f"a source position cannot be read: {error}") from error


def _decode_entry(key: bytes, value: bytes | memoryview) -> LogEntry:
    try:
        segment, rows = unpack(value)
        return LogEntry(int.from_bytes(key[4:], "big"), segment, rows)
    except ValueError as error:
        raise StoreDamagedError(f"an entry of a delivery log cannot be read: {error}") from error
