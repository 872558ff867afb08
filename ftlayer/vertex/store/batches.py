"""Sealed batches in a store: a head, a part for each group of failed source rows, and what the batch reports.

Keys are query (u32), batch (u64), part (u32), big-endian; part 0 is the head, the highest one the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ftlayer.errors import StoreDamagedError
from ftlayer.records.failures import Failure, from_columns, to_columns
from ftlayer.vertex.store.key_value import ReadTransaction, WriteTransaction
from ftlayer.vertex.store.rows import Payloads, StoredBatch, decode_info, encode_info, pack, unpack

FORMAT = 4

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
    """What is known of a sealed batch. ``said`` is a digest of what its seal said, ``parts`` counts its
    parts.
    """

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


def get_head(txn: ReadTransaction, query: int, batch: int) -> BatchHead | None:
    """Return the head of a batch; None if it is not sealed."""
    value = txn.get("batches", _key(query, batch, 0))
    if value is None:
        return None
    try:
        version, *fields = unpack(value)
        if version != FORMAT:
            raise ValueError(f"format {version}, and not {FORMAT}")
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


def put_head(txn: WriteTransaction, query: int, batch: int, head: BatchHead) -> None:
    values = [
        FORMAT,
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
    txn.put("batches", _key(query, batch, 0), pack(values))


def put_part(
    txn: WriteTransaction, query: int, batch: int, part: int, content: BatchPart, payloads: Payloads
) -> None:
    digest, body = payloads.write(txn, content.rows.payload)
    values = [
        FORMAT,
        content.stream,
        to_columns(content.failures),
        encode_info(content.rows.info),
        digest,
        body,
    ]
    txn.put("batches", _key(query, batch, part), pack(values))


def parts(
    txn: ReadTransaction, query: int, batch: int, count: int, payloads: Payloads
) -> Iterator[BatchPart]:
    for part in range(1, count + 1):
        value = txn.get("batches", _key(query, batch, part))
        if value is None:
            raise StoreDamagedError(f"part {part} of sealed batch {batch} is missing from the store")
        try:
            _, stream, failures, info, digest, body = unpack(value)
            payload = payloads.read(txn, digest, body)
            yield BatchPart(stream, StoredBatch(decode_info(info), payload), tuple(from_columns(failures)))
        except (ValueError, TypeError) as error:
            raise StoreDamagedError(f"part {part} of sealed batch {batch} cannot be read: {error}") from error


def delete_parts(txn: WriteTransaction, query: int, batch: int, count: int) -> None:
    for part in range(1, count + 1):
        txn.delete("batches", _key(query, batch, part))


def delete_head(txn: WriteTransaction, query: int, batch: int) -> None:
    txn.delete("batches", _key(query, batch, 0))


def put_report(txn: WriteTransaction, query: int, batch: int, values: list[Any]) -> None:
    """Store what a batch reports, as plain values that mean nothing to the store."""
    txn.put("batches", _key(query, batch, _REPORT), pack(values))


def get_report(txn: ReadTransaction, query: int, batch: int) -> list[Any] | None:
    value = txn.get("batches", _key(query, batch, _REPORT))
    if value is None:
        return None
    try:
        found: list[Any] = unpack(value)
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"the report of batch {batch} cannot be read: {error}") from error
    return found


def delete_report(txn: WriteTransaction, query: int, batch: int) -> None:
    txn.delete("batches", _key(query, batch, _REPORT))


def _key(query: int, batch: int, part: int) -> bytes:
    return query.to_bytes(4, "big") + batch.to_bytes(8, "big") + part.to_bytes(4, "big")
