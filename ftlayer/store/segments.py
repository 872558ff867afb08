"""Segments: rows as they came in one call, under a sequence number, until the last of them is done.

A segment is two entries, head and body (see `ftlayer.store.rows`), at neighbouring keys. Which rows are
done is a bitmap beside it. Sequence numbers rise, so segments are appended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.errors import StoreDamagedError
from ftlayer.store.kept import ReadTransaction, WriteTransaction
from ftlayer.store.payloads import Payloads, take_rows
from ftlayer.store.rows import I64, RowInfo, StoredBatch, decode_info, encode_info, pack, unpack

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
        """Return a segment's head; `StoreDamagedError` if it is missing."""
        value = txn.get("segments", _key(sequence) + _HEAD)
        if value is None:
            raise StoreDamagedError(f"segment {sequence} is missing from the store")
        return _decode_head(value)

    def rows(self, txn: ReadTransaction, sequence: int, which: I64 | None = None) -> StoredBatch:
        """Return a segment's rows, or ``which`` (int64[m]) of them."""
        head = self.head(txn, sequence)
        if which is None:
            return StoredBatch(head.info, self._whole_payload(txn, sequence, head))
        return StoredBatch(head.info.take(which), self.payload(txn, sequence, head, which))

    def payload(self, txn: ReadTransaction, sequence: int, head: Head, which: I64) -> pa.RecordBatch:
        """Return the payload of ``which`` rows (int64[m]) of the segment that has this head."""
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
        """Return which rows of a segment are stored as done, bool[rows]."""
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
