"""The index of dead letters: the tables ``groups``, ``by_group`` and ``by_root``, and how far it is built.

| table | key → value |
| --- | --- |
| ``groups`` | stream (u32), group (u32) → operator, kind of reason, one whole reason, count, times of first and last |
| ``by_group`` | stream (u32), group (u32), key of the letter behind its stream → nothing |
| ``by_root`` | root or origin (u64), key of the letter → nothing |

All numbers are big-endian; keys of letters are those of `ftlayer.store.failed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ftlayer.errors import StoreDamagedError
from ftlayer.store.failed import KEY_BYTES, FailedRecord
from ftlayer.store.kept import ReadTransaction, WriteTransaction
from ftlayer.store.rows import pack, unpack

_STATE = b"index/dead"
_STREAM_BYTES = 4
_GROUP_BYTES = 8  # a stream and a group


@dataclass(frozen=True, slots=True)
class IndexState:
    """By which ``rules`` the index is made, the number of the next group, and how far it is built.

    Letters up to the key ``built`` are in it, None: all are.
    """

    rules: int
    next_group: int
    built: bytes | None


@dataclass(slots=True)
class GroupRecord:
    """A group of dead letters. Times are Unix ms, those of the keys of its first and last letter."""

    stream: int
    number: int
    operator: str
    kind: str
    example: str
    count: int = 0
    first_ms: int = 0
    last_ms: int = 0


def get_state(txn: ReadTransaction) -> IndexState | None:
    """Return how far the index is; None where it was never begun."""
    value = txn.get("meta", _STATE)
    if value is None:
        return None
    try:
        rules, next_group, built = unpack(value)
        return IndexState(int(rules), int(next_group), built)
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"the index of dead letters cannot be read: {error}") from error


def put_state(txn: WriteTransaction, state: IndexState) -> None:
    txn.put("meta", _STATE, pack([state.rules, state.next_group, state.built]))


def put_group(txn: WriteTransaction, group: GroupRecord) -> None:
    values = [group.operator, group.kind, group.example, group.count, group.first_ms, group.last_ms]
    txn.put("groups", _group_key(group.stream, group.number), pack(values))


def delete_group(txn: WriteTransaction, stream: int, number: int) -> None:
    txn.delete("groups", _group_key(stream, number))


def all_groups(txn: ReadTransaction) -> Iterator[GroupRecord]:
    for key, value in txn.scan("groups"):
        try:
            operator, kind, example, count, first_ms, last_ms = unpack(value)
        except ValueError as error:
            raise StoreDamagedError(f"a group of dead letters cannot be read: {error}") from error
        stream, number = key[:_STREAM_BYTES], key[_STREAM_BYTES:]
        yield GroupRecord(
            int.from_bytes(stream, "big"),
            int.from_bytes(number, "big"),
            operator,
            kind,
            example,
            count,
            first_ms,
            last_ms,
        )


class NewLetters:
    """Letters that are put into the index all at once: most of what one costs is the way to its place."""

    def __init__(self) -> None:
        self._by_group: list[bytes] = []
        self._by_root: list[bytes] = []

    def add(self, stream: int, group: int, key: bytes, record: FailedRecord) -> None:
        """Put a letter into the index with the next `write`."""
        self._by_group.append(_group_key(stream, group) + key[_STREAM_BYTES:])
        self._by_root.append(record.root.to_bytes(8, "big") + key)
        if record.origin != record.root:
            self._by_root.append(record.origin.to_bytes(8, "big") + key)

    def write(self, txn: WriteTransaction) -> None:
        if self._by_group:
            txn.put_keys("by_group", sorted(self._by_group))
            txn.put_keys("by_root", sorted(self._by_root))
            self._by_group, self._by_root = [], []


def delete_letter(txn: WriteTransaction, stream: int, group: int, key: bytes, record: FailedRecord) -> bool:
    """Take a letter out of the index; False where it is not in this group, and then it stays."""
    if not txn.delete("by_group", _group_key(stream, group) + key[_STREAM_BYTES:]):
        return False
    for root in {record.root, record.origin}:
        txn.delete("by_root", root.to_bytes(8, "big") + key)
    return True


def letters_of_group(
    txn: ReadTransaction,
    stream: int,
    group: int,
    since_ms: int = 0,
    until_ms: int = (1 << 63) - 1,
    after: bytes = b"",
    *,
    reverse: bool = False,
) -> Iterator[bytes]:
    """Iterate over the keys of a group's letters with times from ``since_ms`` on and before ``until_ms``.

    They come behind the letter ``after``, with ``reverse`` from the last one on.
    """
    prefix = _group_key(stream, group)
    start, stop = prefix + since_ms.to_bytes(8, "big"), prefix + until_ms.to_bytes(8, "big")
    if after and reverse:
        stop = min(stop, prefix + after[_STREAM_BYTES:])
    elif after:
        start = max(start, prefix + after[_STREAM_BYTES:] + b"\0")
    for key, _ in txn.scan("by_group", start, stop, reverse=reverse):
        yield key[:_STREAM_BYTES] + key[_GROUP_BYTES:]


def letters_of_root(txn: ReadTransaction, root: int, after: bytes = b"") -> Iterator[bytes]:
    """Iterate over the keys of letters with this root or origin, behind the letter ``after``."""
    prefix = root.to_bytes(8, "big")
    for key, _ in txn.scan(
        "by_root", prefix + after + (b"\0" if after else b""), prefix + b"\xff" * (KEY_BYTES + 1)
    ):
        yield key[len(prefix) :]


def clear(txn: WriteTransaction, most: int) -> bool:
    """Delete up to ``most`` entries of the index; return whether it is empty."""
    for table in ("groups", "by_group", "by_root"):
        for key, _ in txn.scan(table):
            if not most:
                return False
            txn.delete(table, key)
            most -= 1
    return True


def _group_key(stream: int, group: int) -> bytes:
    return stream.to_bytes(_STREAM_BYTES, "big") + group.to_bytes(_GROUP_BYTES - _STREAM_BYTES, "big")
