"""The table ``board`` of a store: jobs as they were announced last, orders to them, and their checkpoints.

Keys begin with what it is and the owner of the job; the owner ends with a NUL, which names do not have. Of a checkpoint
Unix milliseconds of its end (u64) and its number (u64) follow, big-endian, so that they are in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ftlayer.errors import StoreDamagedError
from ftlayer.store.kept import ReadTransaction, WriteTransaction
from ftlayer.store.rows import pack, unpack

_TABLE = "board"
_JOB, _ORDER, _CHECKPOINT = b"job/", b"order/", b"checkpoint/"
_TIME_BYTES = 8


def put_job(txn: WriteTransaction, owner: str, values: list[object]) -> None:
    txn.put(_TABLE, _prefix(_JOB, owner), pack(values))


def get_job(txn: ReadTransaction, owner: str) -> list[Any] | None:
    value = txn.get(_TABLE, _prefix(_JOB, owner))
    return None if value is None else unpack(value)


def all_jobs(txn: ReadTransaction) -> Iterator[tuple[str, list[Any]]]:
    for key, value in txn.scan(_TABLE, _JOB, _after(_JOB)):
        yield _owner_of(key, _JOB), unpack(value)


def put_order(txn: WriteTransaction, owner: str, order: str, values: list[object]) -> None:
    txn.put(_TABLE, _prefix(_ORDER, owner) + order.encode(), pack(values))


def all_orders(txn: ReadTransaction) -> Iterator[tuple[str, list[Any]]]:
    for key, value in txn.scan(_TABLE, _ORDER, _after(_ORDER)):
        yield _owner_of(key, _ORDER), unpack(value)


def delete_order(txn: WriteTransaction, owner: str, order: str) -> None:
    txn.delete(_TABLE, _prefix(_ORDER, owner) + order.encode())


def checkpoint_key(owner: str, ended_ms: int, number: int) -> bytes:
    tail = ended_ms.to_bytes(_TIME_BYTES, "big") + number.to_bytes(_TIME_BYTES, "big")
    return _prefix(_CHECKPOINT, owner) + tail


def put_checkpoint(txn: WriteTransaction, key: bytes, values: list[object]) -> None:
    txn.put(_TABLE, key, pack(values))


def checkpoint_keys(txn: ReadTransaction) -> Iterator[tuple[str, bytes]]:
    """Iterate over the owners and keys of all checkpoints, of one owner by the time of their end."""
    for key, _ in txn.scan(_TABLE, _CHECKPOINT, _after(_CHECKPOINT)):
        yield _owner_of(key, _CHECKPOINT), bytes(key)


def checkpoints(txn: ReadTransaction, owner: str, since_ms: int) -> Iterator[list[Any]]:
    """Iterate over the checkpoints of a job that ended at ``since_ms`` or later, by the time of their end."""
    prefix = _prefix(_CHECKPOINT, owner)
    for _, value in txn.scan(_TABLE, prefix + since_ms.to_bytes(_TIME_BYTES, "big"), _after(prefix)):
        yield unpack(value)


def delete_checkpoint(txn: WriteTransaction, key: bytes) -> None:
    txn.delete(_TABLE, key)


def forget(txn: WriteTransaction, owner: str) -> None:
    for kind in (_JOB, _ORDER, _CHECKPOINT):
        prefix = _prefix(kind, owner)
        for key, _ in txn.scan(_TABLE, prefix, _after(prefix)):
            txn.delete(_TABLE, key)


def _prefix(kind: bytes, owner: str) -> bytes:
    return kind + owner.encode() + b"\0"


def _owner_of(key: bytes, kind: bytes) -> str:
    try:
        return key[len(kind) : key.index(b"\0", len(kind))].decode()
    except ValueError as error:
        raise StoreDamagedError(f"key {key.hex()} of the store is no job's: {error}") from error


def _after(prefix: bytes) -> bytes:
    """Return the end of the keys that begin with ``prefix``, whose last byte is below 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
