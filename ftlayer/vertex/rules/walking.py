"""Walks through the records of a state, in the order of their keys, from behind a key on.

A walk is lazy: what it comes to is read when it is asked for. So its reader bounds what it costs. Every record is in
one state; rows that are due after a restart wait.

Keys: of failed records those of their table, of rows of segments the segment (u64) and the row (u32), of rows of a
delivery log the stream (u32) and the offset (u64), big-endian. Keys of waiting records have a letter in front, since
rows of segments and records of the table wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from ftlayer.store import dead_index, failed
from ftlayer.store.failed import FailedTable
from ftlayer.store.kv import ReadTransaction
from ftlayer.store.rows import I64
from ftlayer.store.segments import Mask
from ftlayer.store.streams import get_bounds, log_entries
from ftlayer.vertex.rules.live import LiveSegment, by_segment
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import Stream
from ftlayer.vertex.rules.walked import FailedEntry, Record, RecordContents, SegmentRow, SegmentRows

_IN_SEGMENT, _IN_TABLE = b"s", b"w"
_KEY_OF_ROW_BYTES = 12
_LAST_ROW = (1 << 32) - 1
_NO_ROWS: I64 = np.zeros(0, np.int64)

PASSED_AT_ONCE = 128
"""So many segments without a record that is wanted take about as long as so many records."""

NEVER_MS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Span:
    """Which part of a walk is wanted: of which streams, and with times from ``since_ms`` on and before ``until_ms``.

    ``streams`` are in the order of their numbers. ``after`` is the key that the walk before came to. ``most`` rows of a
    segment are read at once.
    """

    streams: Sequence[Stream]
    after: bytes
    most: int
    since_ms: int = 0
    until_ms: int = NEVER_MS
    numbers: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", frozenset(stream.number for stream in self.streams))

    def behind(self, after: bytes) -> Span:
        """Return the same part from behind ``after`` on."""
        return replace(self, after=after)


@dataclass(frozen=True, slots=True)
class PassedRows:
    """A walk has passed `PASSED_AT_ONCE` segments that have no such record, and come to ``key``."""

    key: bytes


class Walks:
    """Walks through one snapshot of a shard."""

    def __init__(self, state: ShardState, txn: ReadTransaction) -> None:
        self._state = state
        self._txn = txn
        self._contents = RecordContents(state, txn)

    def records(self, state: str, span: Span) -> Iterator[Record | PassedRows]:
        """Return the records in a state, one of `ListRecords.state`."""
        match state:
            case "pending":
                return self._tracked(span, is_due=False)
            case "waiting":
                return self._waiting(span)
            case "dead":
                return self._failed(FailedTable.DEAD, span)
        return self._delivery(span)

    # ------------------------------------------------------------ failed records

    def newest_dead(self, span: Span) -> Iterator[Record]:
        """Return dead letters of all streams from the latest on."""
        entries = [self._backwards(stream, span) for stream in span.streams if stream.dead]
        # Behind the stream a key has the time, and a number that no other has.
        for key, value in heapq.merge(*entries, key=lambda entry: entry[0][4:], reverse=True):
            yield FailedEntry(self._contents, FailedTable.DEAD, key, failed.decode(value))

    def dead_of_group(self, span: Span, stream: Stream, group: int, *, newest: bool) -> Iterator[Record]:
        """Return the dead letters of a group, as far as they are indexed."""
        keys = dead_index.letters_of_group(
            self._txn, stream.number, group, span.since_ms, span.until_ms, span.after, reverse=newest
        )
        for key in keys:
            yield from self._failed_at(FailedTable.DEAD, key)

    def dead_of_root(self, root: int, after: bytes) -> Iterator[Record]:
        """Return the dead letters of all streams with a root or origin; they have to be indexed."""
        for key in dead_index.letters_of_root(self._txn, root, after):
            yield from self._failed_at(FailedTable.DEAD, key)

    def _failed_at(self, table: FailedTable, key: bytes, prefix: bytes = b"") -> Iterator[Record]:
        record = failed.get(self._txn, table, key)
        if record is not None and key not in self._state.cancelled:
            yield FailedEntry(self._contents, table, key, record, prefix)

    def _failed(self, table: FailedTable, span: Span, prefix: bytes = b"") -> Iterator[Record]:
        for stream in span.streams:
            if not (stream.dead if table is FailedTable.DEAD else stream.waiting):
                continue
            if stream.number.to_bytes(4, "big") < span.after[:4]:
                continue
            start = failed.key_of(stream.number, span.since_ms, 0)
            stop = failed.key_of(stream.number, span.until_ms, 0)
            for found, value in self._txn.scan(
                table, max(start, span.after + b"\0" * bool(span.after)), stop
            ):
                key = bytes(found)
                if key not in self._state.cancelled:
                    yield FailedEntry(self._contents, table, key, failed.decode(value), prefix)

    def _backwards(self, stream: Stream, span: Span) -> Iterator[tuple[bytes, memoryview | bytes]]:
        start = failed.key_of(stream.number, span.since_ms, 0)
        stop = failed.key_of(stream.number, span.until_ms, 0)
        if span.after:
            stop = min(stop, start[:4] + span.after[4:])
        for key, value in self._txn.scan(FailedTable.DEAD, start, stop, reverse=True):
            yield bytes(key), value

    # ------------------------------------------------------------ rows of segments

    def pending_root(self, root: int) -> Iterator[Record]:
        """Return the pending record that is tracked under ``root``, if there is one."""
        located = self._state.tracker.locate(np.array([root], np.uint64))
        for sequence, rows, _ in by_segment(located.locations[located.pending]):
            yield from self._tracked_at(sequence, rows, is_due=False)

    def _waiting(self, span: Span) -> Iterator[Record | PassedRows]:
        after = span.after
        if not after.startswith(_IN_TABLE):
            if not span.since_ms:
                yield from self._tracked(span.behind(after[1:]), is_due=True)
            after = b""
        yield from self._failed(FailedTable.WAITING, span.behind(after[1:]), _IN_TABLE)

    def _tracked(self, span: Span, *, is_due: bool) -> Iterator[Record | PassedRows]:
        """Return rows of tracked segments: those that are due, or those that are in flight."""
        first = int.from_bytes(span.after[:8], "big")
        if is_due:
            sequences = sorted(sequence for sequence in self._due if sequence >= first)
        else:
            sequences = self._state.live.sequences(first)
        passed = 0
        for sequence in sequences:
            live = self._state.live.get(sequence)
            if live is not None and live.source is not None:
                live = None  # the slot that holds its partition has its rows, not the store
            which = _NO_ROWS if live is None else self._rows_in(live, sequence, span, is_due=is_due)
            if live is None or not len(which):
                passed += 1
                if not passed % PASSED_AT_ONCE:
                    yield PassedRows((_IN_SEGMENT if is_due else b"") + _row_key(sequence, _LAST_ROW))
                continue
            for at in range(0, len(which), span.most):
                yield from self._rows(sequence, live, which[at : at + span.most], is_due=is_due)

    def _rows_in(self, live: LiveSegment, sequence: int, span: Span, *, is_due: bool) -> I64:
        """Return the rows of a segment that are in this state, and in this part of the walk."""
        since_ms = 0 if is_due else _registered_ms(live)
        if live.stream.number not in span.numbers or not span.since_ms <= since_ms < span.until_ms:
            return _NO_ROWS
        which = np.flatnonzero(_in_state(live, self._due.get(sequence, ()), is_due=is_due))
        if span.after[:8] == sequence.to_bytes(8, "big"):
            which = which[which > int.from_bytes(span.after[8:], "big")]
        return which

    def _tracked_at(self, sequence: int, which: I64, *, is_due: bool) -> Iterator[Record]:
        """Return some rows of a segment, those left out that are not in this state."""
        live = self._state.live.get(sequence)
        if live is None or live.source is not None:
            return
        which = which[which < len(live.done)]
        which = which[_in_state(live, self._due.get(sequence, ()), is_due=is_due)[which]]
        if len(which):
            yield from self._rows(sequence, live, which, is_due=is_due)

    @cached_property
    def _due(self) -> dict[int, list[I64]]:
        """Return the rows that are due, by segment."""
        due: dict[int, list[I64]] = {}
        for stream in self._state.streams.values():
            for sequence, rows in stream.due:
                due.setdefault(sequence, []).append(rows)
        return due

    def _rows(self, sequence: int, live: LiveSegment, which: I64, *, is_due: bool) -> Iterator[Record]:
        head = self._state.segments.head(self._txn, sequence)
        info = head.info.take(which)
        info = replace(info, roots=live.roots(which, info.roots))
        state, prefix = ("waiting", _IN_SEGMENT) if is_due else ("pending", b"")
        registered_ms = 0 if is_due else _registered_ms(live)
        rows = SegmentRows(self._contents, sequence, head, which, info, live.stream, state, registered_ms)
        for index, row in enumerate(which.tolist()):
            yield SegmentRow(rows, index, prefix + _row_key(sequence, row))

    # ------------------------------------------------------------ single records

    def at_keys(self, state: str, keys: Iterable[bytes]) -> Iterator[Record]:
        """Return the records that have one of ``keys`` and are in this state, in the order of their keys."""
        for start, group in groupby(sorted(keys), lambda key: key[:-4]):
            same_start = list(group)
            match state:
                case "dead":
                    for key in same_start:
                        yield from self._failed_at(FailedTable.DEAD, key)
                case "waiting" if start.startswith(_IN_TABLE):
                    for key in same_start:
                        yield from self._failed_at(FailedTable.WAITING, key[1:], _IN_TABLE)
                case "waiting" if start.startswith(_IN_SEGMENT):
                    yield from self._at_rows([key[1:] for key in same_start], is_due=True)
                case "pending":
                    yield from self._at_rows(same_start, is_due=False)
                case "delivery":
                    for key in same_start:
                        yield from self._delivered_at(key)

    def _at_rows(self, keys: Sequence[bytes], *, is_due: bool) -> Iterator[Record]:
        """Return rows of one segment by their keys."""
        if len(keys[0]) == _KEY_OF_ROW_BYTES:
            which = np.array([int.from_bytes(key[8:], "big") for key in keys], np.int64)
            yield from self._tracked_at(int.from_bytes(keys[0][:8], "big"), which, is_due=is_due)

    def _delivered_at(self, key: bytes) -> Iterator[Record]:
        stream = self._state.numbers.get(int.from_bytes(key[:4], "big"))
        if len(key) != _KEY_OF_ROW_BYTES or stream is None:
            return
        offset = int.from_bytes(key[4:], "big")
        after = key[:4] + (offset - 1).to_bytes(8, "big") if offset else b""
        for record in self._delivery(Span([stream], after, 1)):
            if record.key == key:
                yield record
            return

    # ------------------------------------------------------------ delivery logs

    def _delivery(self, span: Span) -> Iterator[Record]:
        if span.since_ms:
            return
        for stream in span.streams:
            bounds = get_bounds(self._txn, stream.number)
            prefix = stream.number.to_bytes(4, "big")
            start = bounds.committed
            if span.after[:4] == prefix:
                start = max(start, int.from_bytes(span.after[4:], "big") + 1)
            elif prefix < span.after[:4]:
                continue
            for entry in log_entries(self._txn, stream.number, start, bounds.next):
                head = self._state.segments.head(self._txn, entry.segment)
                first = max(start - entry.start, 0)
                for at in range(first, entry.rows, span.most):
                    which = np.arange(at, min(at + span.most, entry.rows))
                    rows = SegmentRows(
                        self._contents,
                        entry.segment,
                        head,
                        which,
                        head.info.take(which),
                        stream,
                        "delivery",
                        0,
                    )
                    for index in range(len(which)):
                        offset = entry.start + at + index
                        yield SegmentRow(rows, index, prefix + offset.to_bytes(8, "big"))


def _in_state(live: LiveSegment, due: Iterable[I64], *, is_due: bool) -> Mask:
    """Return which rows of a segment are due, or in flight, bool[n]; ``due`` are those that are not worked on."""
    mask = np.zeros(len(live.done), np.bool_)
    for rows in due:
        mask[rows] = True
    return ~live.done & (mask if is_due else ~mask)


def _row_key(sequence: int, row: int) -> bytes:
    return sequence.to_bytes(8, "big") + row.to_bytes(4, "big")


def _registered_ms(live: LiveSegment) -> int:
    return 0 if live.registered is None else live.registered.wall_ms
