"""Delivery by offset: what a query reads of a stream, ingested records and replays in one order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ftlayer.clock import Now
from ftlayer.errors import ProtocolError
from ftlayer.records.ids import random_root_ids
from ftlayer.store.kept import ReadTransaction, WriteTransaction
from ftlayer.store.rows import StoredBatch, first_attempts
from ftlayer.store.segments import SegmentKind
from ftlayer.store.streams import (
    LogEntry,
    get_bounds,
    log_entries,
    next_stream_number,
    put_bounds,
    put_entry,
)
from ftlayer.vertex.calls import (
    Accepted,
    Deliverable,
    DeliverableUpTo,
    Ingest,
    ReadDeliveries,
    RecordBatches,
    StreamOptions,
)
from ftlayer.vertex.rules.replay import Replays, records_of
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import Stream
from ftlayer.vertex.rules.tracking import check_intake


class Deliveries:
    def __init__(self, state: ShardState, replay: Replays) -> None:
        self._state = state
        self._replay = replay

    def ingest(
        self, txn: WriteTransaction, call: Ingest, now: Now
    ) -> tuple[Accepted, Callable[[], None] | None]:
        """Store records at the end of the log, under root ids drawn for them. An unknown stream is made."""
        state = self._state
        rows = call.payload.num_rows
        stream = state.find_stream(call.stream) or self._new_stream(txn, call.stream)
        check_intake(stream, rows)
        if rows == 0:
            return Accepted(0), None
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

        return Accepted(rows), count

    def deliverable(self, txn: WriteTransaction, call: Deliverable, now: Now) -> DeliverableUpTo:
        """Return how far the query can read, moving due replays into the log as far as they are asked for."""
        stream = self._state.stream(call.stream)
        bounds = get_bounds(txn, stream.number)
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
            bounds = get_bounds(txn, stream.number)
        end = min(bounds.next, limit)
        stream.offered = max(stream.offered, end)
        return DeliverableUpTo(end)

    def read(self, txn: ReadTransaction, call: ReadDeliveries) -> RecordBatches:
        """Return the rows of a range. Those removed by the begin of a later batch are absent."""
        stream = self._state.stream(call.stream)
        bounds = get_bounds(txn, stream.number)
        if not 0 <= call.start <= call.end <= bounds.next:
            raise ProtocolError(
                f"offsets {call.start} to {call.end} of stream {stream.name!r}: its log ends at {bounds.next}"
            )
        parts = self.rows_between(txn, stream, max(call.start, bounds.floor), call.end)
        return RecordBatches(tuple(records_of(rows) for rows in parts))

    def rows_between(self, txn: ReadTransaction, stream: Stream, start: int, end: int) -> list[StoredBatch]:
        """Return the log's rows of [start, end) in order, those of a segment together."""
        parts = []
        for entry in log_entries(txn, stream.number, start, end):
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
        """Give rows the next offsets; return where the log ends then."""
        state = self._state
        sequence = state.new_segment()
        state.segments.append(txn, sequence, stream.number, SegmentKind.LOG, rows)
        bounds = get_bounds(txn, stream.number)
        put_entry(txn, stream.number, LogEntry(bounds.next, sequence, len(rows)))
        end = bounds.next + len(rows)
        put_bounds(txn, stream.number, replace(bounds, next=end))
        return end

    def _new_stream(self, txn: WriteTransaction, name: str) -> Stream:
        stream = Stream(name, next_stream_number(txn), StreamOptions())
        stream.write(txn)
        self._state.group.streams[name] = stream
        return stream
