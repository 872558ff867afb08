"""What operators ask for: records page by page, dead letters sent back to work or deleted, cursors of their readers."""

from __future__ import annotations

from dataclasses import replace

from ftlayer.clock import Now
from ftlayer.store import failed
from ftlayer.store.failed import FailedRecord, FailedTable
from ftlayer.store.kv import ReadTransaction, WriteTransaction
from ftlayer.store.streams import get_cursor, put_cursor, put_died_ms
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
from ftlayer.vertex.rules.walking import Span, Walks


class Listing:
    """`ListRecords`."""

    def __init__(self, state: ShardState) -> None:
        self._state = state

    def records(self, txn: ReadTransaction, call: ListRecords) -> RecordList:
        """Return a page of records."""
        streams = [stream for _, stream in sorted(self._state.numbers.items())]
        if call.stream:
            streams = [stream for stream in streams if stream.name == call.stream]
        found: list[RecordInfo] = []
        for record in Walks(self._state, txn).records(call.state, Span(streams, call.after, call.limit + 1)):
            if len(found) == call.limit:
                return RecordList(tuple(found), found[-1].key)
            found.append(record.info())
        return RecordList(tuple(found), b"")


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
        self._state.dead_index.remove(txn, key, record)
        stream = self._state.numbers[failed.stream_of(key)]
        stream.dead -= 1
        if failed.time_of(key) > stream.gone_ms:
            stream.gone_ms = failed.time_of(key)
            put_died_ms(txn, stream.number, stream.gone_ms)
        return stream, record
