"""What operators ask for: records page by page, dead letters sent back to work or deleted, cursors of their readers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from ftlayer.clock import Now
from ftlayer.errors import MalformedRequestError
from ftlayer.store import failed, texts
from ftlayer.store.failed import FailedRecord, FailedTable
from ftlayer.store.kv import ReadTransaction, WriteTransaction
from ftlayer.store.rows import I64, StoredBatch
from ftlayer.store.segments import Mask
from ftlayer.store.streams import get_bounds, get_cursor, log_entries, put_cursor, put_died_ms
from ftlayer.vertex.calls import (
    Changed,
    Cursor,
    GetCursor,
    ListRecords,
    Purge,
    PutCursor,
    RecordInfo,
    RecordList,
    Requeue,
)
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import Stream

# Keys of waiting records: due rows of segments come first, then those of the table.
_IN_SEGMENT, _IN_TABLE = b"s", b"w"


class Listing:
    """`ListRecords`. Every record is in one state; rows due after a restart are listed as waiting."""

    def __init__(self, state: ShardState) -> None:
        self._state = state

    def records(self, txn: ReadTransaction, call: ListRecords) -> RecordList:
        """Return a page of records."""
        stream = None
        if call.stream:
            stream = self._state.find_stream(call.stream)
            if stream is None:
                return RecordList((), b"")
        found: list[RecordInfo] = []
        for record in self._from(txn, call.state, stream, call.after, call.limit + 1):
            if len(found) == call.limit:
                return RecordList(tuple(found), found[-1].key)
            found.append(record)
        return RecordList(tuple(found), b"")

    def _from(
        self, txn: ReadTransaction, state: str, stream: Stream | None, after: bytes, most: int
    ) -> Iterator[RecordInfo]:
        match state:
            case "pending":
                return self._tracked(txn, state, stream, after, b"", most)
            case "waiting":
                return self._waiting(txn, stream, after, most)
            case "dead":
                return self._failed(txn, FailedTable.DEAD, stream, after, b"")
            case "delivery":
                return self._delivery(txn, stream, after, most)
        raise MalformedRequestError(
            f'state: expected "pending", "waiting", "delivery" or "dead", got {state!r}'
        )

    def _waiting(
        self, txn: ReadTransaction, stream: Stream | None, after: bytes, most: int
    ) -> Iterator[RecordInfo]:
        if not after.startswith(_IN_TABLE):
            yield from self._tracked(txn, "waiting", stream, after[1:], _IN_SEGMENT, most)
            after = b""
        yield from self._failed(txn, FailedTable.WAITING, stream, after[1:], _IN_TABLE)

    def _tracked(
        self,
        txn: ReadTransaction,
        state: str,
        stream: Stream | None,
        after: bytes,
        prefix: bytes,
        most: int,
    ) -> Iterator[RecordInfo]:
        """List rows of tracked segments: those that are due, or those that are in flight.

        Of a segment it takes ``most`` rows, and it reads none that has no such rows.
        """
        due = self._due()
        for sequence, live in self._state.live.items():
            start = sequence.to_bytes(8, "big")
            if (stream is not None and live.stream is not stream) or start < after[:8]:
                continue
            if state == "waiting" and sequence not in due:
                continue
            is_due = _mask(due.get(sequence, ()), len(live.done))
            which = np.flatnonzero(~live.done & (is_due if state == "waiting" else ~is_due))
            if start == after[:8]:
                which = which[which > int.from_bytes(after[8:], "big")]
            which = which[:most]
            if not len(which):
                continue
            rows = self._state.segments.rows(txn, sequence, which)
            rows = rows.with_roots(live.roots(which, rows.info.roots))
            for index, row in enumerate(which.tolist()):
                yield _info(prefix + start + row.to_bytes(4, "big"), live.stream.name, state, rows, index)

    def _due(self) -> dict[int, list[I64]]:
        """Return the rows that are due, by segment."""
        due: dict[int, list[I64]] = {}
        for stream in self._state.streams.values():
            for sequence, rows in stream.due:
                due.setdefault(sequence, []).append(rows)
        return due

    def _failed(
        self, txn: ReadTransaction, table: FailedTable, stream: Stream | None, after: bytes, prefix: bytes
    ) -> Iterator[RecordInfo]:
        start, stop = b"", None
        if stream is not None:
            start, stop = stream.number.to_bytes(4, "big"), (stream.number + 1).to_bytes(4, "big")
        for key, value in txn.scan(table, max(start, after + b"\0" if after else b""), stop):
            key = bytes(key)
            if key in self._state.cancelled:
                continue
            record = failed.decode(value)
            _, reason, operator = record.history[-1] if record.history else (0, "", "")
            yield RecordInfo(
                key=prefix + key,
                stream=self._state.numbers[failed.stream_of(key)].name,
                state=str(table),
                root=record.root,
                origin=record.origin,
                attempt=record.attempt,
                not_before_ms=failed.time_of(key) if table is FailedTable.WAITING else 0,
                reason=reason,
                operator=operator,
                traceback=texts.read(txn, record.frames) + record.last_line,
                history=record.history,
                payload=self._state.payloads.read(txn, record.digest, record.body),
            )

    def _delivery(
        self, txn: ReadTransaction, stream: Stream | None, after: bytes, most: int
    ) -> Iterator[RecordInfo]:
        streams = (
            sorted(self._state.streams.values(), key=lambda each: each.number) if stream is None else [stream]
        )
        for each in streams:
            bounds = get_bounds(txn, each.number)
            prefix = each.number.to_bytes(4, "big")
            start = bounds.committed
            if after[:4] == prefix:
                start = max(start, int.from_bytes(after[4:], "big") + 1)
            elif prefix < after[:4]:
                continue
            for entry in log_entries(txn, each.number, start, bounds.next):
                which = np.arange(max(start - entry.start, 0), entry.rows)[:most]
                rows = self._state.segments.rows(txn, entry.segment, which)
                for index, row in enumerate(which.tolist()):
                    yield _info(
                        prefix + (entry.start + row).to_bytes(8, "big"), each.name, "delivery", rows, index
                    )


def _mask(parts: Iterable[I64], rows: int) -> Mask:
    """Return which of ``rows`` are in one of ``parts``, bool[rows]."""
    mask = np.zeros(rows, np.bool_)
    for part in parts:
        mask[part] = True
    return mask


def _info(key: bytes, stream: str, state: str, rows: StoredBatch, row: int) -> RecordInfo:
    info = rows.info
    history = info.history(row)
    _, reason, operator = history[-1] if history else (0, "", "")
    return RecordInfo(
        key=key,
        stream=stream,
        state=state,
        root=int(info.roots[row]),
        origin=int(info.origins[row]),
        attempt=int(info.attempts[row]),
        not_before_ms=0,
        reason=reason,
        operator=operator,
        traceback="",
        history=history,
        payload=rows.payload.slice(row, 1),
    )


class DeadLetters:
    """`Requeue`, `Purge`, `PutCursor` and `GetCursor`. Keys that are gone are passed over: another call was faster."""

    def __init__(self, state: ShardState) -> None:
        self._state = state

    def requeue(self, txn: WriteTransaction, call: Requeue, now: Now) -> Changed:
        """Give dead letters their attempts back; they are due at once and keep their history."""
        taken = [self._take(txn, key) for key in call.keys]
        for stream, record in filter(None, taken):
            key = failed.key_of(stream.number, now.wall_ms, self._state.new_serial())
            failed.put(txn, FailedTable.WAITING, key, replace(record, attempt=1))
            stream.waiting += 1
            stream.counters.requeued += 1
        return Changed(sum(item is not None for item in taken))

    def purge(self, txn: WriteTransaction, call: Purge) -> Changed:
        """Delete dead letters permanently."""
        purged = [taken for taken in (self._take(txn, key) for key in call.keys) if taken is not None]
        for stream, record in purged:
            self._state.group.texts.release(record.frames)
            stream.counters.purged += 1
        return Changed(len(purged))

    def put_cursor(self, txn: WriteTransaction, call: PutCursor) -> Cursor:
        """Note how far a reader of dead letters has come."""
        put_cursor(txn, self._state.stream(call.stream).number, call.reader, call.position)
        return Cursor(call.position)

    def cursor(self, txn: ReadTransaction, call: GetCursor) -> Cursor:
        """Return how far a reader has come; of a stream that is not declared, to nothing."""
        stream = self._state.find_stream(call.stream)
        return Cursor(b"" if stream is None else get_cursor(txn, stream.number, call.reader))

    def _take(self, txn: WriteTransaction, key: bytes) -> tuple[Stream, FailedRecord] | None:
        record = failed.get(txn, FailedTable.DEAD, key)
        if record is None:
            return None
        txn.delete(FailedTable.DEAD, key)
        stream = self._state.numbers[failed.stream_of(key)]
        stream.dead -= 1
        if failed.time_of(key) > stream.gone_ms:
            stream.gone_ms = failed.time_of(key)
            put_died_ms(txn, stream.number, stream.gone_ms)
        return stream, record
