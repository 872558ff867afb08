"""Where the rows of sources are that can be read again: ranges of positions, and which of their rows are done.

The vertex has no payload of these rows. A row is pending, done, or *wanted*: its attempt has ended (it failed, timed
out, or was recalled), and the slot that holds its partition is asked for it. The vertex stores its payload in the
transaction that writes down that the row has left its range.

Up to its *floor* all rows of a partition have left. Floors are written down by a tick, behind the rows: what is lost
in between is read again, and done again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from ftlayer.errors import StoreDamagedError
from ftlayer.records.failures import Failure
from ftlayer.vertex.calls import RowRange
from ftlayer.vertex.rules.streams import Stream
from ftlayer.vertex.store.key_value import ReadTransaction, WriteTransaction
from ftlayer.vertex.store.rows import I64, U64, pack, unpack
from ftlayer.vertex.store.streams import Mask, get_position, put_position

# How far the partitions of a source that can be read again are done, and what is done beyond that.
#
# Up to the *floor* of a partition all rows are done or stored. It is the position that `ftlayer.vertex.store.streams`
# keeps. Beside it are the places of floor and head, and the ranges from the floor up to the last one of which something
# is done.


_RANGES = b"ranges/"
_FORMAT = 2
_FACTS_OF = attrgetter("start", "end", "number", "first", "rows", "span", "digest")


@dataclass(frozen=True, slots=True)
class StoredPartition:
    """A partition: the place of its floor, and its ranges from there on, each with a bit for each row that is done.

    The first row's bit is the lowest; b"" where none is done.
    """

    number: int
    place: int
    ranges: tuple[tuple[RowRange, bytes], ...] = ()


def put_ranges(txn: WriteTransaction, stream: int, partition: str, stored: StoredPartition) -> None:
    ranges = [[*_FACTS_OF(facts), done] for facts, done in stored.ranges]
    packed = pack([_FORMAT, stored.number, stored.place, ranges])
    txn.put("meta", _prefix(stream) + partition.encode(), packed)


def delete_ranges(txn: WriteTransaction, stream: int, partition: str) -> None:
    txn.delete("meta", _prefix(stream) + partition.encode())


def all_ranges(txn: ReadTransaction) -> Iterator[tuple[int, str, StoredPartition]]:
    """Iterate over all partitions: (number of the stream, partition, what is stored of it)."""
    for key, value in txn.scan("meta", _RANGES, b"ranges0"):  # "0" comes after "/"
        text = bytes(key)[len(_RANGES) :]
        try:
            name = text[9:].decode()
            yield int(text[:8], 16), name, _decode(name, value)
        except ValueError as error:
            raise StoreDamagedError(
                f"key {bytes(key).hex()} of the store is no partition's: {error}"
            ) from error


def _prefix(stream: int) -> bytes:
    # The slash ends the number, so that no stream's prefix is the beginning of another's.
    return _RANGES + b"%08x/" % stream


def _decode(partition: str, value: bytes | memoryview) -> StoredPartition:
    try:
        version, number, place, packed = unpack(value)
        if version != _FORMAT:
            raise ValueError(f"format {version}, and not {_FORMAT}")
        ranges = tuple((RowRange(partition, *facts), done) for *facts, done in packed)
        return StoredPartition(number, place, ranges)
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"the ranges of a partition cannot be read: {error}") from error


NOWHERE = (-1, 0)
"""The place before all rows."""


@dataclass(frozen=True, slots=True)
class EndedRow:
    """Why a row's attempt ended, and the root it had. ``timed_out``: late events may still complete that."""

    root: int
    cause: Failure
    timed_out: bool = False


class SourceRange:
    """The rows of one call, which their holder has. ``done``, bool[n], is shared with their live segment.

    ``roots`` are those of their first attempt; None: an earlier incarnation knew them.
    """

    def __init__(
        self, partition: SourcePartition, segment: int, facts: RowRange, done: Mask, roots: U64 | None
    ) -> None:
        self.partition = partition
        self.segment = segment
        self.facts = facts
        self.done = done
        self.roots = roots
        self._recalled: Mask | None = None
        self._ended: dict[int, EndedRow] = {}

    def changed(self) -> None:
        self.partition.is_changed = True

    def end(self, row: int, why: EndedRow) -> bool:
        """Want a row whose attempt has ended; False if it is done, or was wanted before."""
        if self.done[row] or self.is_wanted(row):
            return False
        self._ended[row] = why
        return True

    def fail_timed_out(self, row: int) -> None:
        """A root that had timed out has failed: it can be completed no more."""
        why = self._ended.get(row)
        if why is not None and why.timed_out:
            self._ended[row] = EndedRow(why.root, why.cause)

    def recall(self, rows: I64) -> int:
        """Want these rows (int64[m], distinct) without an end of their attempt; return how many were not wanted yet."""
        if self._recalled is None:
            self._recalled = np.zeros(len(self.done), np.bool_)
        mask = ~self.done[rows] & ~self.wanted_of(rows)
        self._recalled[rows[mask]] = True
        return int(np.count_nonzero(mask))

    def is_wanted(self, row: int) -> bool:
        return row in self._ended or (self._recalled is not None and bool(self._recalled[row]))

    def wanted_of(self, rows: I64) -> Mask:
        """Return which of these rows (int64[m]) are wanted, bool[m]."""
        mask = np.zeros(len(rows), np.bool_)
        if self._recalled is not None:
            mask |= self._recalled[rows]
        if self._ended:
            mask |= np.isin(rows, np.fromiter(self._ended, np.int64, len(self._ended)))
        return mask

    def wanted(self) -> I64:
        """Return the rows that are to be stored, in their order."""
        ended = np.fromiter(self._ended, np.int64, len(self._ended))
        recalled = np.zeros(0, np.int64) if self._recalled is None else np.flatnonzero(self._recalled)
        rows = np.union1d(ended, recalled)
        return rows[~self.done[rows]]

    @property
    def recalled_left(self) -> int:
        """How many rows were recalled and are not stored."""
        return 0 if self._recalled is None else int(np.count_nonzero(self._recalled & ~self.done))

    def why(self, row: int) -> EndedRow | None:
        """Return why a wanted row's attempt has ended; None if it was recalled."""
        return self._ended.get(row)


@dataclass(slots=True)
class SourcePartition:
    """A partition of a source, from its floor on.

    ``floor`` is the position up to which all is done or stored, ``head`` the one up to which rows are registered; both
    with their places. ``ranges`` are those between, by segment, ascending. The holder may forget what is before
    segment ``done_below``; ``written_below`` will be that, once the transaction is known to be committed.
    """

    stream: Stream
    name: str
    floor: bytes | None = None
    floor_at: tuple[int, int] = NOWHERE
    head: bytes | None = None
    head_at: tuple[int, int] = NOWHERE
    holder: str = ""
    ranges: dict[int, SourceRange] = field(default_factory=dict)
    is_changed: bool = False
    done_below: int = 0
    written_below: int | None = None

    def add(self, added: SourceRange) -> None:
        self.ranges[added.segment] = added
        self.head, self.head_at = added.facts.end, added.facts.ends

    def known(self, facts: RowRange) -> SourceRange | None:
        for each in reversed(self.ranges.values()):
            if each.facts == facts:
                return each
        return None

    def write(self, txn: WriteTransaction, next_segment: int) -> None:
        """Write down what is done; a range of which all is leaves. ``next_segment`` is above all there are."""
        self.is_changed = False
        while self.ranges:
            first = next(iter(self.ranges.values()))
            if not first.done.all():
                break
            self.floor, self.floor_at = first.facts.end, first.facts.ends
            del self.ranges[first.segment]
        if self.floor is not None:
            put_position(txn, self.stream.number, self.name, None, self.floor)
        put_ranges(txn, self.stream.number, self.name, StoredPartition(*self.floor_at, self._begun()))
        self.written_below = next(iter(self.ranges), next_segment)

    def _begun(self) -> tuple[tuple[RowRange, bytes], ...]:
        found: list[tuple[RowRange, bytes]] = []
        begun = 0
        for each in self.ranges.values():
            bits = np.packbits(each.done, bitorder="little").tobytes() if each.done.any() else b""
            found.append((each.facts, bits))
            if bits:
                begun = len(found)
        return tuple(found[:begun])


class SourceRanges:
    """All partitions of a shard that are read again where rows are lost."""

    def __init__(self) -> None:
        self._partitions: dict[tuple[int, str], SourcePartition] = {}

    def __iter__(self) -> Iterator[SourcePartition]:
        return iter(self._partitions.values())

    def of_stream(self, stream: Stream) -> list[SourcePartition]:
        return [each for (number, _), each in self._partitions.items() if number == stream.number]

    def get(self, stream: Stream, name: str) -> SourcePartition | None:
        return self._partitions.get((stream.number, name))

    def opened(self, txn: ReadTransaction, stream: Stream, name: str) -> SourcePartition:
        """Return a partition, which begins where its rows were accepted up to, if it is new."""
        found = self.get(stream, name)
        if found is None:
            last = get_position(txn, stream.number, name)
            at = None if last is None else last[1]
            found = SourcePartition(stream, name, floor=at, head=at)
            self._partitions[stream.number, name] = found
        return found

    def recovered(self, txn: ReadTransaction) -> Iterator[tuple[int, str, StoredPartition, bytes | None]]:
        """Iterate over what is stored: number of the stream, partition, its ranges, and its floor."""
        for number, name, stored in all_ranges(txn):
            last = get_position(txn, number, name)
            yield number, name, stored, None if last is None else last[1]

    def put(self, partition: SourcePartition) -> None:
        self._partitions[partition.stream.number, partition.name] = partition

    def forget(self, txn: WriteTransaction, partition: SourcePartition) -> None:
        del self._partitions[partition.stream.number, partition.name]
        delete_ranges(txn, partition.stream.number, partition.name)

    @property
    def unwritten(self) -> bool:
        """Whether `write` or `confirm` has something to do."""
        return any(each.is_changed or each.written_below is not None for each in self)

    def confirm(self) -> None:
        """What was written is durable: the transaction has been followed by another one."""
        for each in self:
            if each.written_below is not None:
                each.done_below, each.written_below = each.written_below, None

    def write(self, txn: WriteTransaction, next_segment: int) -> None:
        for each in self:
            if each.is_changed:
                each.write(txn, next_segment)
