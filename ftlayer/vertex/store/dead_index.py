"""The index of dead letters: the tables ``groups``, ``by_group`` and ``by_root``, and how far it is built.

| table | key → value |
| --- | --- |
| ``groups`` | stream (u32), group (u32) → operator, kind of reason, one whole reason, count, times of first and last |
| ``by_group`` | stream (u32), group (u32), key of the letter behind its stream → nothing |
| ``by_root`` | root or origin (u64), key of the letter → nothing |

All numbers are big-endian; keys of letters are those of `ftlayer.vertex.store.dead_index`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from ftlayer.errors import StoreDamagedError
from ftlayer.vertex.store.key_value import ReadTransaction, WriteTransaction
from ftlayer.vertex.store.rows import NOT_EDITED, Edit, History, decode_history, pack, unpack

# Failed records: one entry each, waiting for a replay or dead.
#
# Keys order the records of a stream by time: stream (u32), Unix milliseconds (u64), serial (u64), big-endian.
# For a waiting record the time is the earliest one for its replay, for a dead one that of its death.


_FORMAT = 5
_NUMBER_BYTES = 4
KEY_BYTES = 20


class FailedTable(StrEnum):
    WAITING = "waiting"
    DEAD = "dead"


class KeptName(NamedTuple):
    """What a dead letter of a job in barrier mode goes by, and what else the job wants back with it."""

    letter: bytes
    facts: bytes


@dataclass(frozen=True, slots=True)
class FailedRecord:
    """A failed record. ``root`` is the id its failed attempt had, ``attempt`` the number of the one to come
    (of the last one, if dead). ``body`` is its payload as `Payloads` writes it. ``edit`` is the last change of its
    payload; ``key_hashes`` are those of the payload before. ``kept`` is there for a letter of a job in barrier mode: it
    goes back to that job, and is no replay.
    """

    root: int
    origin: int
    attempt: int
    key_hashes: tuple[int, ...] | None
    flat_hashes: bool
    history: History
    digest: bytes
    body: bytes
    edit: Edit = NOT_EDITED
    kept: KeptName | None = None

    @property
    def is_edited(self) -> bool:
        return self.edit != NOT_EDITED

    @property
    def shape(self) -> tuple[bytes, int, bool]:
        """What records must share to become rows of one batch: schema, number of key hashes, being edited or not."""
        if self.key_hashes is None:
            return self.digest, -1, self.is_edited
        return self.digest, 0 if self.flat_hashes else len(self.key_hashes) + 1, self.is_edited

    def hash_row(self) -> Any:
        """Return the key hashes as an item of an array: a number if the source had one selector as int32[n]."""
        assert self.key_hashes is not None
        return self.key_hashes[0] if self.flat_hashes else self.key_hashes


def hashes_of(
    key_hashes: np.ndarray[Any, np.dtype[np.int32]] | None, row: int
) -> tuple[tuple[int, ...] | None, bool]:
    if key_hashes is None:
        return None, False
    if key_hashes.ndim == 1:
        return (int(key_hashes[row]),), True
    return tuple(key_hashes[row].tolist()), False


def key_of(stream: int, time_ms: int, serial: int) -> bytes:
    """Return the key of a record of ``stream``; ``serial`` tells records of the same time apart."""
    return (
        stream.to_bytes(_NUMBER_BYTES, "big") + max(time_ms, 0).to_bytes(8, "big") + serial.to_bytes(8, "big")
    )


def stream_of(key: bytes) -> int:
    return int.from_bytes(key[:_NUMBER_BYTES], "big")


def time_of(key: bytes) -> int:
    return int.from_bytes(key[_NUMBER_BYTES : _NUMBER_BYTES + 8], "big")


def put(txn: WriteTransaction, table: FailedTable, key: bytes, record: FailedRecord) -> None:
    packed = pack(
        [
            _FORMAT,
            record.root,
            record.origin,
            record.attempt,
            record.key_hashes,
            record.flat_hashes,
            record.history,
            record.digest,
            record.body,
            *record.edit,
            record.kept,
        ]
    )
    txn.put(table, key, packed)


def get(txn: ReadTransaction, table: FailedTable, key: bytes) -> FailedRecord | None:
    value = txn.get(table, key) if len(key) == KEY_BYTES else None
    return None if value is None else decode(value)


def scan(
    txn: ReadTransaction, table: FailedTable, stream: int, start_ms: int = 0
) -> Iterator[tuple[bytes, memoryview | bytes]]:
    """Iterate over keys and values of a stream's records from ``start_ms`` on; `decode` reads a value."""
    return txn.scan(table, key_of(stream, start_ms, 0), _behind(stream))


def counts(txn: ReadTransaction, table: FailedTable) -> dict[int, int]:
    """Return how many records each stream has, by its number.

    Of one stream that has them all the store knows it; of several, the keys of all but the last are counted.
    """
    found: dict[int, int] = {}
    start = b""
    while (first := next(txn.keys(table, start), None)) is not None:
        found[stream_of(first)] = 0
        start = _behind(stream_of(first))
    others = list(found)[:-1]
    for stream in others:
        found[stream] = sum(1 for _ in txn.keys(table, key_of(stream, 0, 0), _behind(stream)))
    if found:
        found[next(reversed(found))] = txn.count(table) - sum(found[stream] for stream in others)
    return found


def last_ms(txn: ReadTransaction, table: FailedTable, stream: int) -> int:
    """Return the time of a stream's last record, Unix milliseconds; 0 if it has none."""
    last = next(txn.keys(table, key_of(stream, 0, 0), _behind(stream), reverse=True), None)
    return 0 if last is None else time_of(last)


def _behind(stream: int) -> bytes:
    """Return where the keys of a stream end. Streams are numbered from 1 up, and never so many that this overflows."""
    return (stream + 1).to_bytes(_NUMBER_BYTES, "big")


def decode(value: bytes | memoryview) -> FailedRecord:
    try:
        version, *fields = unpack(value)
        if version != _FORMAT:
            raise ValueError(f"format {version}, and not {_FORMAT}")
        root, origin, attempt, hashes, flat, entries, digest, body, edited_ms, edited_by, kept = fields
        return FailedRecord(
            root,
            origin,
            attempt,
            None if hashes is None else tuple(hashes),
            flat,
            decode_history(entries),
            digest,
            body,
            (edited_ms, edited_by),
            None if kept is None else KeptName(*kept),
        )
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"a failed record cannot be read: {error}") from error


_STATE = b"index/dead"
_STREAM_BYTES = 4
_GROUP_BYTES = 8  # a stream and a group


@dataclass(frozen=True, slots=True)
class IndexState:
    """By which ``rules`` the index is made, the next group's number, and the last key that is in it; None: all are."""

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
    """Iterate over the keys of a group's letters between these times, behind ``after``, or in ``reverse``."""
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
