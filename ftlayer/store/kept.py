"""Files of letters that the store has taken in already, in the table ``meta``: so that none is taken in twice."""

from __future__ import annotations

from ftlayer.store.kv import ReadTransaction, WriteTransaction

_KEPT = b"kept/"
_PART_BYTES = 4


def is_kept(txn: ReadTransaction, job: str, file: str, part: int) -> bool:
    """Whether a part of a job's file was taken in."""
    return txn.get("meta", _prefix(job, file) + part.to_bytes(_PART_BYTES, "big")) is not None


def put_kept(txn: WriteTransaction, job: str, file: str, part: int) -> None:
    """Note that a part was taken in."""
    txn.put("meta", _prefix(job, file) + part.to_bytes(_PART_BYTES, "big"), b"1")


def forget_kept(txn: WriteTransaction, job: str, file: str) -> int:
    """Forget a job's file; returns how many parts of it were noted."""
    prefix = _prefix(job, file)
    keys = [bytes(key) for key, _ in txn.scan("meta", prefix, prefix + b"\xff" * (_PART_BYTES + 1))]
    for key in keys:
        txn.delete("meta", key)
    return len(keys)


def _prefix(job: str, file: str) -> bytes:
    # With lengths in front no pair of names is the beginning of another pair.
    parts = [text.encode() for text in (job, file)]
    return _KEPT + b"".join(len(each).to_bytes(2, "big") + each for each in parts)
