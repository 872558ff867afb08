"""The table ``audit`` of a store: who has changed what. Keys are Unix ms (u64) and a serial (u64), big-endian."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ftlayer.vertex.store.key_value import ReadTransaction, WriteTransaction
from ftlayer.vertex.store.rows import pack, unpack

_TABLE = "audit"
KEY_BYTES = 16


def put(txn: WriteTransaction, at_ms: int, values: list[object]) -> None:
    """Store an entry (plain values) behind those of the same moment."""
    start = at_ms.to_bytes(8, "big")
    last = next(txn.scan(_TABLE, start, start + b"\xff" * 9, reverse=True), None)
    serial = 0 if last is None else int.from_bytes(last[0][8:], "big") + 1
    txn.put(_TABLE, start + serial.to_bytes(8, "big"), pack(values))


def latest(txn: ReadTransaction, before: bytes = b"") -> Iterator[tuple[bytes, list[Any]]]:
    """Iterate over keys and entries from the latest one on, or from behind the key ``before``."""
    for key, value in txn.scan(_TABLE, b"", before or None, reverse=True):
        yield bytes(key), unpack(value)


def time_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


def trim(txn: WriteTransaction, before_ms: int, keep: int, most: int) -> None:
    """Delete up to ``most`` of the oldest entries: those from before ``before_ms``, and all beyond ``keep``."""
    surplus = txn.count(_TABLE) - keep
    for key, _ in txn.scan(_TABLE):
        if not most or (surplus <= 0 and time_of(bytes(key)) >= before_ms):
            return
        txn.delete(_TABLE, key)
        surplus -= 1
        most -= 1
