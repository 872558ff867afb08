"""Micro-batches: begin, seal, reseal, commit.

A batch is NEW until its verdict is sealed, SEALED until the sink has it, then COMMITTED. What a seal stores
has no effect before the commit; a batch that was not sealed leaves no trace. A crash at any point is
followed by `BeginBatch`, whose reply says how far the batch had come.

A batch's delivered offsets are decided by its commit and removed when a later batch begins: until then,
Spark may read them again and gets the same rows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ftlayer.clock import Now
from ftlayer.errors import ProtocolError, StaleOwnerError
from ftlayer.store import batches
from ftlayer.store.batches import BatchHead, StoredEmit, StoredFailure
from ftlayer.store.kv import WriteTransaction
from ftlayer.store.meta import QueryRecord, get_query, put_query
from ftlayer.store.payloads import take_rows
from ftlayer.store.rows import I64, U64, StoredBatch
from ftlayer.store.segments import SegmentKind
from ftlayer.store.streams import delete_entry, get_bounds, log_entries, put_bounds
from ftlayer.vertex.calls import (
    BatchBegun,
    BatchState,
    BeginBatch,
    Commit,
    Committed,
    EventIds,
    Failure,
    Reseal,
    Seal,
    Sealed,
    SealedRows,
)
from ftlayer.vertex.calls.event_ids import stored_event_ids
from ftlayer.vertex.rules.deliveries import Deliveries
from ftlayer.vertex.rules.failing import Failing
from ftlayer.vertex.rules.retry import cause_of
from ftlayer.vertex.rules.seals import SealWriter, keep_report, kept_report, said
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import Stream
from ftlayer.vertex.rules.tracking import Tracking


class Batches:
    """The protocol of a query's micro-batches."""

    def __init__(
        self, state: ShardState, tracking: Tracking, failing: Failing, deliveries: Deliveries
    ) -> None:
        self._state = state
        self._tracking = tracking
        self._failing = failing
        self._deliveries = deliveries
        self._writer = SealWriter(state)

    def begin(self, txn: WriteTransaction, call: BeginBatch) -> BatchBegun:
        """Say how far a batch has come; a new one removes what earlier batches kept."""
        query = self._owned(txn, call)
        if call.batch <= query.last_committed:
            return BatchBegun(BatchState.COMMITTED, report=kept_report(txn, query.number, call.batch))
        head = batches.get_head(txn, query.number, call.batch)
        if head is not None:
            return self._sealed_before(txn, query, call.batch, head)
        self._check_no_other_seal(query, call)
        for name in query.streams:
            self._remove_committed(txn, self._state.stream(name))
        if query.last_committed >= 0:
            batches.delete_head(txn, query.number, query.last_committed)
            batches.delete_report(txn, query.number, query.last_committed)
        return BatchBegun(BatchState.NEW)

    def seal(self, txn: WriteTransaction, call: Seal, now: Now) -> Sealed:
        """Store the verdict of a batch. It has no effect before the commit."""
        query = self._owned(txn, call)
        digest = said(call)
        head = batches.get_head(txn, query.number, call.batch)
        if head is not None:
            if head.said != digest:
                raise ProtocolError(
                    f"batch {call.batch} of query {call.query!r} is sealed, and its seal said something "
                    "else; begin it again and Reseal what failed beyond that"
                )
            return Sealed(head.waiting, head.dead)
        if call.batch <= query.last_committed:
            raise ProtocolError(
                f"batch {call.batch} of query {call.query!r} was committed before: begin the next one"
            )
        self._check_no_other_seal(query, call)
        delivered = self._check_delivered(txn, query, call.delivered)
        head = BatchHead(False, digest, delivered, (), (), (), 0, 0, 0)
        head = self._extend(txn, query, head, call, now)
        put_query(txn, call.query, replace(query, last_sealed=call.batch))
        return Sealed(head.waiting, head.dead)

    def reseal(self, txn: WriteTransaction, call: Reseal, now: Now) -> Sealed:
        """Add to the verdict of a sealed batch what failed when it ran again."""
        query = self._owned(txn, call)
        head = batches.get_head(txn, query.number, call.batch)
        if head is None or head.committed:
            state = "is not sealed: Seal it" if call.batch > query.last_committed else "was committed before"
            raise ProtocolError(f"batch {call.batch} of query {call.query!r} {state}")
        head = self._extend(txn, query, head, call, now)
        return Sealed(head.waiting, head.dead)

    def _extend(
        self, txn: WriteTransaction, query: QueryRecord, head: BatchHead, call: Seal | Reseal, now: Now
    ) -> BatchHead:
        head = self._writer.extend(txn, query, call.batch, head, call, now)
        keep_report(txn, query.number, call.batch, call.report)
        return head

    def commit(self, txn: WriteTransaction, call: Commit, now: Now) -> Committed:
        """Let a sealed verdict take effect."""
        query = self._owned(txn, call)
        if call.batch <= query.last_committed:
            return Committed(again=True)
        head = batches.get_head(txn, query.number, call.batch)
        if head is None:
            raise ProtocolError(
                f"batch {call.batch} of query {call.query!r} is not sealed: Seal it before its commit"
            )
        for part in batches.parts(txn, query.number, call.batch, head.parts, self._state.payloads):
            stream = self._state.stream(part.stream)
            bodies = self._state.payloads.rows(txn, part.rows.payload)
            for row, failure in enumerate(part.failures):
                self._failing.move(txn, stream, part.rows.info, bodies, row, cause_of(failure), now)
            stream.counters.failed_sealed += len(part.failures)
        self._commit_delivered(txn, head, now)
        for emit in head.emitted:
            if emit.segment >= 0:
                self._state.segments.change_kind(txn, emit.segment, SegmentKind.TRACKED)
                stream = self._state.stream(emit.stream)
                roots, values, ids = emitted_ids(emit)
                self._tracking.register(stream, emit.segment, roots, values, now, ids)
        batches.delete_parts(txn, query.number, call.batch, head.parts)
        batches.put_head(txn, query.number, call.batch, replace(head, committed=True, emitted=(), parts=0))
        put_query(txn, call.query, replace(query, last_committed=call.batch))
        return Committed(again=False)

    # ------------------------------------------------------------ delivered rows

    def _commit_delivered(self, txn: WriteTransaction, head: BatchHead, now: Now) -> None:
        """Decide the delivered rows: failed ones wait or are dead, emitted ones are pending, the rest is
        done.
        """
        failures = {failure.root: failure for failure in head.redelivered}
        emitted = {emit.stream: emit for emit in head.emitted if emit.segment < 0}
        for name, start, end in head.delivered:
            stream = self._state.stream(name)
            bounds = get_bounds(txn, stream.number)
            start, end = max(start, bounds.committed), max(end, bounds.committed)
            moved = 0
            if failures or name in emitted:
                for rows in self._deliveries.rows_between(txn, stream, start, end):
                    moved += self._fail_rows(txn, stream, rows, failures, now)
                    if name in emitted:
                        moved += self._track_rows(txn, stream, rows, emitted[name], now)
            stream.counters.delivered_done += end - start - moved
            put_bounds(txn, stream.number, replace(bounds, committed=end))
            stream.logged -= end - start
            stream.log_age.committed(end)
            stream.offered = max(stream.offered, end)

    def _fail_rows(
        self,
        txn: WriteTransaction,
        stream: Stream,
        rows: StoredBatch,
        failures: dict[int, StoredFailure],
        now: Now,
    ) -> int:
        failed = [
            row for row, root in enumerate(rows.info.roots.tolist() if failures else ()) if root in failures
        ]
        if failed:
            bodies = self._state.payloads.rows(txn, rows.payload)
            for row in failed:
                cause = cause_of(failures[int(rows.info.roots[row])])
                self._failing.move(txn, stream, rows.info, bodies, row, cause, now)
        stream.counters.failed_sealed += len(failed)
        return len(failed)

    def _track_rows(
        self, txn: WriteTransaction, stream: Stream, rows: StoredBatch, emit: StoredEmit, now: Now
    ) -> int:
        """Give the rows that were handed on a segment of their own, and register them."""
        roots, values, ids = emitted_ids(emit)
        order = np.argsort(roots)
        places = np.minimum(np.searchsorted(roots, rows.info.roots, sorter=order), len(roots) - 1)
        which: I64 = (
            np.flatnonzero(roots[order[places]] == rows.info.roots) if len(roots) else np.empty(0, np.int64)
        )
        if len(which):
            sequence = self._state.new_segment()
            taken = StoredBatch(rows.info.take(which), take_rows(rows.payload, which))
            self._state.segments.append(txn, sequence, stream.number, SegmentKind.TRACKED, taken)
            found = order[places[which]]
            ids = None if ids is None else ids.take(found)
            self._tracking.register(stream, sequence, taken.info.roots, values[found], now, ids)
        return len(which)

    def _remove_committed(self, txn: WriteTransaction, stream: Stream) -> None:
        """Remove what is committed from a log. A segment goes when all its rows are."""
        bounds = get_bounds(txn, stream.number)
        if bounds.floor == bounds.committed:
            return
        for entry in list(log_entries(txn, stream.number, bounds.floor, bounds.committed)):
            if entry.end <= bounds.committed:
                self._state.segments.delete(txn, entry.segment)
                delete_entry(txn, stream.number, entry)
        put_bounds(txn, stream.number, replace(bounds, floor=bounds.committed))

    def _check_delivered(
        self, txn: WriteTransaction, query: QueryRecord, delivered: dict[str, tuple[int, int]]
    ) -> tuple[tuple[str, int, int], ...]:
        for name, (start, end) in delivered.items():
            if name not in query.streams:
                raise ProtocolError(f"delivered: stream {name!r} is none of the query's")
            bounds = get_bounds(txn, self._state.stream(name).number)
            if not 0 <= start <= end <= bounds.next:
                raise ProtocolError(
                    f"delivered: offsets {start} to {end} of stream {name!r}, whose log ends at {bounds.next}"
                )
            if start > bounds.committed:
                raise ProtocolError(
                    f"delivered: stream {name!r} from offset {start}, but the commits so far end at "
                    f"{bounds.committed}; the rows between would be lost"
                )
        return tuple((name, start, end) for name, (start, end) in sorted(delivered.items()))

    # ------------------------------------------------------------ ownership

    def _owned(self, txn: WriteTransaction, call: BeginBatch | Seal | Reseal | Commit) -> QueryRecord:
        """Return the query of a call; `StaleOwnerError` when a newer run has taken it over."""
        query = get_query(txn, call.query)
        if query is None:
            raise ProtocolError(f"query {call.query!r} is unknown: open it first (OpenQuery)")
        if call.epoch < query.epoch:
            raise StaleOwnerError(
                f"query {call.query!r} was taken over by run {query.run!r} (epoch {query.epoch}, this is "
                f"{call.epoch}): stop this one"
            )
        if call.epoch > query.epoch:
            raise ProtocolError(
                f"epoch {call.epoch} of query {call.query!r} was never given: it is at {query.epoch}"
            )
        return query

    def _check_no_other_seal(self, query: QueryRecord, call: BeginBatch | Seal) -> None:
        if query.last_sealed > query.last_committed and query.last_sealed != call.batch:
            raise ProtocolError(
                f"batch {query.last_sealed} of query {call.query!r} is sealed and not committed; "
                f"batch {call.batch} cannot come before that is done"
            )

    def _sealed_before(
        self, txn: WriteTransaction, query: QueryRecord, batch: int, head: BatchHead
    ) -> BatchBegun:
        failed = tuple(
            SealedRows(
                part.stream,
                part.rows.payload,
                part.rows.info.roots,
                tuple(Failure.of(failure.root, failure, failure.place) for failure in part.failures),
                part.rows.info.key_hashes,
            )
            for part in batches.parts(txn, query.number, batch, head.parts, self._state.payloads)
        )
        return BatchBegun(
            BatchState.SEALED,
            failed,
            tuple(failure.root for failure in head.redelivered),
            tuple(Failure.of(failure.root, failure, failure.place) for failure in head.resumed),
        )


def emitted_ids(emit: StoredEmit) -> tuple[U64, U64, EventIds | None]:
    """Return the roots that were handed on, their values, and the lists of ids behind these."""
    roots, values = np.frombuffer(emit.roots, np.uint64), np.frombuffer(emit.values, np.uint64)
    return roots, values, stored_event_ids(emit.ids)
