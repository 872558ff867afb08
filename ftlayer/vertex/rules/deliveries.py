"""Delivery by offset: what a query reads of a stream, ingested records and replays in one order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from ftlayer.common.clock import Now
from ftlayer.errors import ProtocolError
from ftlayer.records.ids import random_root_ids
from ftlayer.vertex import calls
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import Stream
from ftlayer.vertex.rules.tracking import Tracking, check_intake
from ftlayer.vertex.store import dead_index as failed
from ftlayer.vertex.store import streams as stored
from ftlayer.vertex.store.dead_index import FailedRecord, FailedTable
from ftlayer.vertex.store.key_value import ReadTransaction, WriteTransaction
from ftlayer.vertex.store.rows import I64, RowInfo, StoredBatch, concat, first_attempts

# Bytes of waiting records that one call moves: it has to answer with them in one message.
_BYTES_PER_CALL = 32 << 20
# Counting reads the table, and holds up other calls.
COUNTED_DUE = 10_000
# Rows that one call hands out, whatever it asks for: a segment's rows have 20 bits.
_ROWS_PER_CALL = 1 << 16


@dataclass(frozen=True, slots=True)
class DueRows:
    """Rows of a live segment that are due, with the fresh roots they are to have."""

    segment: int
    which: I64
    rows: StoredBatch


class Replays:
    def __init__(self, state: ShardState, tracking: Tracking) -> None:
        self._state = state
        self._tracking = tracking

    @calls.handles(calls.TakeReplays)
    def take(self, txn: WriteTransaction, call: calls.TakeReplays, now: Now) -> calls.RecordBatches:
        state = self._state
        state.owners.check([call.stream], call.owner)
        stream = state.stream(call.stream)
        if stream.query:
            raise ProtocolError(
                f"stream {stream.name!r} is read by offset by query {stream.query!r}; its replays are in its "
                "delivery log"
            )
        asked = min(call.limit, _ROWS_PER_CALL)
        limit = state.circuits.may_take(stream, asked, now.mono_ms)
        held = limit < asked
        taken = []
        for due in self.due_rows(txn, stream, limit):
            self._tracking.reissue(stream, due.segment, due.which, due.rows.info.roots, now)
            taken.append(due.rows)
        limit -= sum(len(rows) for rows in taken)
        for rows in self.waiting_rows(txn, stream, limit, now):
            sequence = state.new_segment()
            state.segments.append(txn, sequence, stream.number, stored.SegmentKind.TRACKED, rows)
            self._tracking.register_replays(stream, sequence, rows.info, now)
            taken.append(rows)
        for rows in taken:
            state.circuits.let_out(stream, rows.info.roots, now.mono_ms)
            if state.followed is not None:
                state.followed.let_out(stream.name, rows.info, now)
        # What is still with those who hold it comes later: what is due now is not all.
        return calls.RecordBatches(tuple(records_of(rows) for rows in taken), held or stream.unstored > 0)

    def due_rows(self, txn: ReadTransaction, stream: Stream, limit: int) -> Iterator[DueRows]:
        """Take up to ``limit`` rows of tracked segments that are not being worked on; their attempt goes on."""
        state = self._state
        while limit > 0 and stream.due:
            segment, which = stream.take_due(limit)
            limit -= len(which)
            rows = state.segments.rows(txn, segment, which)
            stream.counters.replayed += len(rows)
            yield DueRows(segment, which, rows.with_roots(state.fresh_roots(len(rows))))

    def waiting_rows(self, txn: WriteTransaction, stream: Stream, limit: int, now: Now) -> list[StoredBatch]:
        """Take up to ``limit`` due records out of the table of waiting ones, a batch for each kind of payload."""
        state = self._state
        groups: dict[tuple[bytes, int, bool], list[FailedRecord]] = {}
        timed_out: list[int] = []
        size = 0
        for key, value in self._due_entries(txn, stream, now):
            if limit <= 0 or size >= _BYTES_PER_CALL:
                break
            record = failed.decode(value)
            if record.kept is not None:
                # Of a job in barrier mode: it goes back into that, not into a source of the same name.
                continue
            txn.delete(FailedTable.WAITING, key)
            state.group.texts.release_all(record.history)
            if key in state.cancelled:
                state.cancelled.discard(key)
                continue
            # A record of an earlier incarnation may have the root of one that waits in this one.
            if state.timed_out.get(record.root) == key:
                del state.timed_out[record.root]
                timed_out.append(record.root)
            groups.setdefault(record.shape, []).append(record)
            limit -= 1
            size += len(value)
            stream.waiting -= 1
        if timed_out:
            # From here on events of the old attempt are late: they must not complete the new one's record.
            state.tracker.forget(np.array(timed_out, np.uint64))
        return [self._put_together(txn, stream, records) for records in groups.values()]

    def delete_cancelled(self, txn: WriteTransaction) -> None:
        for key in self._state.cancelled:
            record = failed.get(txn, FailedTable.WAITING, key)
            if record is not None:
                self._state.group.texts.release_all(record.history)
                txn.delete(FailedTable.WAITING, key)
        self._state.cancelled.clear()

    def count_due(self, txn: ReadTransaction, stream: Stream, now: Now) -> int:
        """Return how many waiting records can be taken now, counting to `COUNTED_DUE`."""
        if not stream.waiting:
            return 0
        entries = (key for key, _ in self._due_entries(txn, stream, now) if key not in self._state.cancelled)
        return sum(1 for _ in islice(entries, COUNTED_DUE))

    def next_due_ms(self, txn: ReadTransaction, stream: Stream, now: Now) -> int | None:
        """Return the wall time from which on something can be taken (0: now); None if nothing waits."""
        if stream.due_rows:
            return 0
        if not stream.waiting:
            return None
        cancelled = self._state.cancelled
        if any(key not in cancelled for key, _ in self._due_entries(txn, stream, now)):
            return 0
        entries = failed.scan(txn, FailedTable.WAITING, stream.number)
        return next((failed.time_of(key) for key, _ in entries if key not in cancelled), None)

    def _due_entries(
        self, txn: ReadTransaction, stream: Stream, now: Now
    ) -> Iterator[tuple[bytes, memoryview | bytes]]:
        for key, value in failed.scan(txn, FailedTable.WAITING, stream.number):
            if failed.time_of(key) > now.wall_ms:
                break
            yield key, value
        # No pause is that long: the wall clock was ahead when these were stored, and has been set back.
        too_late = now.wall_ms + stream.longest_pause_ms + 1
        yield from failed.scan(txn, FailedTable.WAITING, stream.number, too_late)

    def _put_together(
        self, txn: WriteTransaction, stream: Stream, records: list[FailedRecord]
    ) -> StoredBatch:
        state = self._state
        hashed = records[0].key_hashes is not None
        info = RowInfo(
            roots=state.fresh_roots(len(records)),
            origins=np.array([record.origin for record in records], np.uint64),
            attempts=np.array([record.attempt for record in records], np.int32),
            key_hashes=np.array([record.hash_row() for record in records], np.int32) if hashed else None,
            histories=tuple(record.history for record in records),
            texts=state.group.texts.of_all(txn, [record.history for record in records]),
            edits=tuple(record.edit for record in records) if records[0].is_edited else (),
        )
        stream.counters.replayed += len(records)
        return StoredBatch(info, concat([state.payloads.read(txn, r.digest, r.body) for r in records]))


def records_of(rows: StoredBatch) -> calls.Records:
    info = rows.info
    first_failed = None
    if info.histories:
        times = [history[0].wall_ms if history else 0 for history in info.histories]
        first_failed = np.array(times, np.uint64)
    is_edited = bool(info.edits)
    return calls.Records(
        rows.payload, info.roots, info.origins, info.attempts, info.key_hashes, first_failed, is_edited
    )


class Deliveries:
    def __init__(self, state: ShardState, replay: Replays) -> None:
        self._state = state
        self._replay = replay

    @calls.handles(calls.Ingest)
    def ingest(
        self, txn: WriteTransaction, call: calls.Ingest, now: Now
    ) -> tuple[calls.Accepted, Callable[[], None] | None]:
        """Store records at the end of the log, under root ids drawn for them. An unknown stream is made."""
        state = self._state
        rows = call.payload.num_rows
        stream = state.find_stream(call.stream) or self._new_stream(txn, call.stream)
        check_intake(stream, rows)
        if rows == 0:
            return calls.Accepted(0), None
        roots = random_root_ids(rows, shard=state.options.shard, shards=state.options.shards)
        end = self._append(txn, stream, StoredBatch(first_attempts(roots, None), call.payload))
        group = state.group
        group.add_rows(stream.name, rows)

        def count() -> None:
            group.add_rows(stream.name, -rows)
            if stream.name not in state.streams:
                state.add_stream(stream)
            stream.logged += rows
            stream.log_age.add(end, now.wall_ms)
            stream.counters.ingested += rows

        return calls.Accepted(rows), count

    @calls.handles(calls.Deliverable)
    def deliverable(self, txn: WriteTransaction, call: calls.Deliverable, now: Now) -> calls.DeliverableUpTo:
        """Return how far the query can read, moving due replays into the log as far as they are asked for."""
        stream = self._state.stream(call.stream)
        bounds = stored.get_bounds(txn, stream.number)
        if not 0 <= call.start <= bounds.next:
            raise ProtocolError(
                f"offset {call.start} of stream {stream.name!r}: its log ends at {bounds.next}; the "
                "checkpoint that names this offset belongs to another store"
            )
        # What is committed is there no more, so it must not use up the rows asked for.
        limit = max(call.start, bounds.committed) + call.max_rows
        missing = limit - bounds.next
        if missing > 0:
            for rows in self._take_due(txn, stream, missing, now):
                stream.log_age.add(self._append(txn, stream, rows), now.wall_ms)
                stream.logged += len(rows)
            bounds = stored.get_bounds(txn, stream.number)
        end = min(bounds.next, limit)
        stream.offered = max(stream.offered, end)
        return calls.DeliverableUpTo(end)

    @calls.handles(calls.ReadDeliveries)
    def read(self, txn: ReadTransaction, call: calls.ReadDeliveries, now: Now) -> calls.RecordBatches:
        """Return the rows of a range. Those removed by the begin of a later batch are absent."""
        stream = self._state.stream(call.stream)
        bounds = stored.get_bounds(txn, stream.number)
        if not 0 <= call.start <= call.end <= bounds.next:
            raise ProtocolError(
                f"offsets {call.start} to {call.end} of stream {stream.name!r}: its log ends at {bounds.next}"
            )
        parts = self.rows_between(txn, stream, max(call.start, bounds.floor), call.end)
        return calls.RecordBatches(tuple(records_of(rows) for rows in parts))

    def rows_between(self, txn: ReadTransaction, stream: Stream, start: int, end: int) -> list[StoredBatch]:
        """Return the log's rows of [start, end) in order, those of a segment together."""
        parts = []
        for entry in stored.log_entries(txn, stream.number, start, end):
            which = np.arange(max(start - entry.start, 0), min(end - entry.start, entry.rows))
            parts.append(self._state.segments.rows(txn, entry.segment, which))
        return parts

    def _take_due(self, txn: WriteTransaction, stream: Stream, limit: int, now: Now) -> list[StoredBatch]:
        state = self._state
        taken = []
        for due in self._replay.due_rows(txn, stream, limit):
            taken.append(due.rows)
            state.live.finish(due.segment, due.which)
            state.live.write_segment(txn, due.segment)
        limit -= sum(len(rows) for rows in taken)
        return taken + self._replay.waiting_rows(txn, stream, limit, now)

    def _append(self, txn: WriteTransaction, stream: Stream, rows: StoredBatch) -> int:
        state = self._state
        sequence = state.new_segment()
        state.segments.append(txn, sequence, stream.number, stored.SegmentKind.LOG, rows)
        bounds = stored.get_bounds(txn, stream.number)
        stored.put_entry(txn, stream.number, stored.LogEntry(bounds.next, sequence, len(rows)))
        end = bounds.next + len(rows)
        stored.put_bounds(txn, stream.number, replace(bounds, next=end))
        return end

    def _new_stream(self, txn: WriteTransaction, name: str) -> Stream:
        stream = Stream(name, stored.next_stream_number(txn), calls.StreamOptions())
        stream.write(txn)
        self._state.group.streams[name] = stream
        return stream
