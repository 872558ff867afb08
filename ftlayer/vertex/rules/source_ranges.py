"""Where the rows of sources are that can be read again: ranges of positions, and which of their rows are done.

The vertex has no payload of these rows. A row is pending, done, or *wanted*: its attempt has ended (it failed, timed
out, or was recalled), and the slot that holds its partition is asked for it. The vertex stores its payload in the
transaction that writes down that the row has left its range.

Up to its *floor* all rows of a partition have left; beside it the places of floor and head are stored, and the ranges
between. Floors are written down by a tick, behind the rows: what is lost in between is read and done again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter

import numpy as np

from ftlayer.common.clock import Now
from ftlayer.errors import StoreDamagedError
from ftlayer.records.failures import Failure
from ftlayer.vertex.calls import RowRange
from ftlayer.vertex.rules.streams import Stream
from ftlayer.vertex.store.key_value import ReadTransaction, WriteTransaction
from ftlayer.vertex.store.rows import I64, U64, pack, unpack
from ftlayer.vertex.store.streams import Mask, Segments, get_position, put_position

_RANGES = b"ranges/"
_FORMAT = 2
_FACTS_OF = attrgetter("start", "end", "number", "first", "rows", "span", "digest")


@dataclass(frozen=True, slots=True)
class StoredPartition:
    """The place of a partition's floor, its ranges from there on, and a bit for each row, the lowest first."""

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
    """The rows of one call, which their holder has; ``done``, bool[n], is their live segment's, ``roots`` their first.

    None: an earlier incarnation knew them.
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
        return 0 if self._recalled is None else int(np.count_nonzero(self._recalled & ~self.done))

    def why(self, row: int) -> EndedRow | None:
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


# The rows of tracked segments that are not done: marked at array speed, written down later.
#
# A tracker's *location* is ``segment << 20 | row``.


ROW_BITS = 20
"""A segment has the rows of one call: at most `ftlayer.vertex.calls.MAX_ROWS`, which is 2 to the power of this."""

_ROW_MASK = np.uint64((1 << ROW_BITS) - 1)
_SHIFT = np.uint64(ROW_BITS)

_RUN_ROWS = 64
"""Runs of so many rows on average are grouped as runs: sorting each row takes 30 ns, ten times as long."""


@dataclass(slots=True)
class LiveSegment:
    """A segment with rows that are not done.

    ``fresh``, uint64[n], has the root id under which each row was handed out last in this incarnation; 0: its root
    is the stored one. None: none was.

    ``registered`` is when its rows were, None for those of an earlier incarnation that were not handed out since.
    ``oldest_ms`` (Unix) is when its first record was, or failed first: a replay's segment is younger than its records
    are; 0: not known.

    ``source`` is there for rows that are not stored: where they are in their source.
    """

    stream: Stream
    done: Mask
    left: int
    registered: Now | None = None
    oldest_ms: int = 0
    fresh: U64 | None = None
    source: SourceRange | None = None

    def hand_out(self, rows: I64, roots: U64) -> None:
        if self.fresh is None:
            self.fresh = np.zeros(len(self.done), np.uint64)
        self.fresh[rows] = roots

    def roots(self, rows: I64, stored: U64) -> U64:
        """Return the roots of ``rows`` now, whose stored ones are ``stored``."""
        if self.fresh is None:
            return stored
        return np.where(self.fresh[rows] != 0, self.fresh[rows], stored)


class LiveSegments:
    """All tracked segments in memory. What changes here is written by `write_segment` and `flush`."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._live: dict[int, LiveSegment] = {}
        self._is_sorted = True  # nearly always: a batch's rows become pending behind later ones
        self._last = -1
        self._dirty: set[int] = set()
        self._finished: set[int] = set()

    def __len__(self) -> int:
        return len(self._live)

    def add(
        self,
        sequence: int,
        stream: Stream,
        done: Mask,
        registered: Now | None = None,
        oldest_ms: int = 0,
        source: SourceRange | None = None,
    ) -> None:
        """Follow a segment's rows, those of ``done`` (bool[n]) left out. ``source``: they are not in the store."""
        left = len(done) - int(np.count_nonzero(done))
        if left:
            self._is_sorted = self._is_sorted and sequence > self._last
            self._last = max(self._last, sequence)
            self._live[sequence] = LiveSegment(stream, done, left, registered, oldest_ms, source=source)
        elif source is not None:
            source.changed()
        else:
            self._finished.add(sequence)

    def get(self, sequence: int) -> LiveSegment | None:
        return self._live.get(sequence)

    def oldest_ms(self) -> dict[int, int]:
        """Return since when (Unix, ms) the oldest row that is left of each stream has been there, as far as known."""
        found: dict[int, int] = {}
        for live in self._live.values():
            number, since_ms = live.stream.number, live.oldest_ms
            if since_ms and since_ms < found.get(number, since_ms + 1):
                found[number] = since_ms
        return found

    def sequences(self, first: int) -> list[int]:
        """Return the numbers of segments that have rows left, from ``first`` on, in order."""
        if not self._is_sorted:
            self._live = dict(sorted(self._live.items()))
            self._is_sorted = True
        sequences = list(self._live)
        return sequences[bisect_left(sequences, first) :]

    def finish(self, sequence: int, rows: I64) -> Mask:
        """Mark ``rows`` (int64[m], distinct) of a segment as done; return which were not before, bool[m]."""
        live = self._live.get(sequence)
        if live is None:
            return np.zeros(len(rows), np.bool_)
        new: Mask = ~live.done[rows]
        live.done[rows] = True
        live.left -= int(np.count_nonzero(new))
        if not live.left:
            del self._live[sequence]
        if live.source is not None:
            live.source.changed()
        elif live.left:
            self._dirty.add(sequence)
        else:
            self._dirty.discard(sequence)
            self._finished.add(sequence)
        return new

    def forget(self, sequence: int) -> None:
        self._live.pop(sequence, None)

    def write_segment(self, txn: WriteTransaction, sequence: int) -> None:
        """Write down what is done of one segment: rows that moved must leave in the transaction they move in."""
        if sequence in self._finished:
            self._finished.discard(sequence)
            self._segments.delete(txn, sequence)
        elif sequence in self._dirty:
            self._dirty.discard(sequence)
            self._segments.put_done(txn, sequence, self._live[sequence].done)

    def flush(self, txn: WriteTransaction) -> None:
        for sequence in sorted(self._finished | self._dirty):
            self.write_segment(txn, sequence)

    @property
    def unwritten(self) -> bool:
        return bool(self._finished or self._dirty)


def locations_of(sequence: int, rows: int) -> U64:
    """Return the locations of all rows of a segment, uint64[rows]."""
    first = sequence << ROW_BITS
    return np.arange(first, first + rows, dtype=np.uint64)


def locate(sequence: int, rows: I64) -> U64:
    """Return the locations of some rows (int64[m]) of a segment."""
    return rows.astype(np.uint64) | np.uint64(sequence << ROW_BITS)


def by_segment(locations: U64) -> Iterator[tuple[int, I64, I64]]:
    """Group locations: yield (segment, rows int64[m], positions int64[m] in ``locations``), both ascending."""
    if not len(locations):
        return
    segments = locations >> _SHIFT
    rows = (locations & _ROW_MASK).astype(np.int64)
    starts = np.concatenate([[0], np.flatnonzero(segments[1:] != segments[:-1]) + 1])
    if len(starts) * _RUN_ROWS <= len(rows) or len(starts) == 1:
        yield from _by_run(segments[starts].tolist(), [*starts.tolist(), len(rows)], rows)
        return
    first = segments.min()
    # NumPy sorts 16-bit numbers by radix, ten times as fast as the 64-bit ones.
    keys = (segments - first).astype(np.uint16) if int(segments.max() - first) < 1 << 16 else segments
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    cuts = [0, *(np.flatnonzero(sorted_keys[1:] != sorted_keys[:-1]) + 1).tolist(), len(order)]
    for start, stop in pairwise(cuts):
        positions = order[start:stop]
        yield int(segments[positions[0]]), rows[positions], positions


def _by_run(segments: list[int], bounds: list[int], rows: I64) -> Iterator[tuple[int, I64, I64]]:
    """Do the same for runs of rows of one segment each: run i ends where run i + 1 begins, at ``bounds[i + 1]``."""
    runs: dict[int, list[tuple[int, int]]] = {}
    for segment, run in zip(segments, pairwise(bounds), strict=True):
        runs.setdefault(segment, []).append(run)
    for segment in sorted(runs):
        of_it = runs[segment]
        if len(of_it) == 1:
            ((start, stop),) = of_it
            yield segment, rows[start:stop], np.arange(start, stop)
            continue
        positions = np.concatenate([np.arange(start, stop) for start, stop in of_it])
        yield segment, rows[positions], positions
