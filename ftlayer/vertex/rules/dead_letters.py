"""Dead letters go back to work or are deleted; and how far their readers have come."""

from __future__ import annotations

from dataclasses import replace

from ftlayer.clock import Now
from ftlayer.store import failed
from ftlayer.store.failed import FailedRecord, FailedTable
from ftlayer.store.kv import ReadTransaction, WriteTransaction
from ftlayer.store.streams import get_cursor, put_cursor, put_died_ms
from ftlayer.vertex.calls import Changed, Cursor, GetCursor, Purge, PutCursor, Requeue
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import Stream


class DeadLetters:
    """`Requeue`, `Purge`, `PutCursor` and `GetCursor`. Keys that are not there are passed over: somebody was faster."""

    def __init__(self, state: ShardState) -> None:
        self._state = state

    def requeue(self, txn: WriteTransaction, call: Requeue, now: Now) -> Changed:
        """Give dead letters their attempts back; they are due at once and keep their history."""
        taken = [self._take(txn, key) for key in call.keys]
        for stream, record in filter(None, taken):
            key = failed.key_of(stream.number, now.wall_ms, self._state.new_serial())
            failed.put(txn, FailedTable.WAITING, key, replace(record, attempt=1))
            stream.waiting += 1
            self._state.counters.requeued += 1
        return Changed(sum(item is not None for item in taken))

    def purge(self, txn: WriteTransaction, call: Purge) -> Changed:
        """Delete dead letters permanently."""
        purged = [taken[1] for taken in (self._take(txn, key) for key in call.keys) if taken is not None]
        for record in purged:
            self._state.group.texts.release(record.frames)
        self._state.counters.purged += len(purged)
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
