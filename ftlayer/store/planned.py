"""The ranges of a source that its planner has opened, and of which rows are not done: kept until all are.

What a range is, is the planner's to say: bytes here.
"""

from __future__ import annotations

from ftlayer.store.kv import ReadTransaction, WriteTransaction

_PLANNED = b"planned/"


def put_planned(txn: WriteTransaction, stream: int, number: int, planned: bytes, *, first: int) -> None:
    """Store range ``number`` of a stream's source, and forget those below ``first``."""
    prefix = _prefix(stream)
    for key, _ in list(txn.scan("meta", prefix, _key(stream, first))):
        txn.delete("meta", bytes(key))
    txn.put("meta", _key(stream, number), planned)


def all_planned(txn: ReadTransaction, stream: int) -> tuple[bytes, ...]:
    """Return the ranges of a stream's source, in the order of their numbers."""
    return tuple(bytes(value) for _, value in txn.scan("meta", _prefix(stream), _key(stream, 1 << 63)))


def _prefix(stream: int) -> bytes:
    return _PLANNED + b"%08x/" % stream


def _key(stream: int, number: int) -> bytes:
    return _prefix(stream) + number.to_bytes(8, "big")
