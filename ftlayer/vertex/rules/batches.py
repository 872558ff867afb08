"""Micro-batches: begin, seal, reseal, commit.

A batch is NEW until its verdict is sealed, SEALED until the sink has it, then COMMITTED. What a seal stores has no
effect before the commit. A crash at any point is followed by `BeginBatch`, which says how far the batch had come.

A batch's delivered offsets are decided by its commit and removed when a later batch begins: until then,
Spark may read them again and gets the same rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from ftlayer.common.clock import Now
from ftlayer.common.rules.restart import next_attempt
from ftlayer.errors import ProtocolError, StaleOwnerError, StoreDamagedError
from ftlayer.records.failures import from_columns, to_columns
from ftlayer.vertex import calls
from ftlayer.vertex.rules.deliveries import Deliveries
from ftlayer.vertex.rules.state import ShardState
from ftlayer.vertex.rules.streams import MAX_OPERATOR, MAX_PLACE, MAX_REASON, MAX_TRACEBACK, Stream, cut
from ftlayer.vertex.rules.tracking import Failing, Tracking
from ftlayer.vertex.store import streams as stored
from ftlayer.vertex.store.key_value import ReadTransaction, WriteTransaction
from ftlayer.vertex.store.rows import I64, U64, StoredBatch, first_attempts, pack, take_rows


class SealWriter:
    def __init__(self, state: ShardState) -> None:
        self._state = state

    def extend(
        self,
        txn: WriteTransaction,
        query: stored.QueryRecord,
        batch: int,
        head: stored.BatchHead,
        call: calls.Seal | calls.Reseal,
        now: Now,
    ) -> stored.BatchHead:
        """Store ``head`` with what ``call`` adds; return it. Raises `ProtocolError` before anything is stored."""
        attempts = self._delivered_attempts(txn, head) if call.redelivered or call.emitted else {}
        self._check(query, call, head, attempts)
        known = {failure.root for failure in head.redelivered}
        redelivered = {
            failure.root: stored_failure(failure) for failure in call.redelivered if failure.root not in known
        }
        resumed = {failure.root: failure for failure in head.resumed}
        resumed.update((failure.root, stored_failure(failure)) for failure in call.resumed)
        waiting = sum(
            self._will_wait(rows.stream, 1, failure, now) for rows in call.failed for failure in rows.failures
        )
        waiting += sum(
            self._will_wait(*attempts[failure.root], failure, now) for failure in redelivered.values()
        )
        failed = sum(len(rows.failures) for rows in call.failed) + len(redelivered)
        for number, rows in enumerate(call.failed, start=head.parts + 1):
            failures = tuple(stored_failure(failure) for failure in rows.failures)
            info = first_attempts(np.ascontiguousarray(rows.roots), rows.key_hashes)
            part = stored.BatchPart(rows.stream, StoredBatch(info, rows.payload), failures)
            stored.put_batch_part(txn, query.number, batch, number, part, self._state.payloads)
        head = replace(
            head,
            redelivered=head.redelivered + tuple(redelivered.values()),
            resumed=tuple(resumed.values()),
            emitted=self._replace_emitted(txn, head, call.emitted),
            parts=head.parts + len(call.failed),
            waiting=head.waiting + waiting,
            dead=head.dead + failed - waiting,
        )
        stored.put_batch(txn, query.number, batch, head)
        return head

    def _replace_emitted(
        self, txn: WriteTransaction, head: stored.BatchHead, emitted: tuple[calls.EmittedRows, ...]
    ) -> tuple[stored.StoredEmit, ...]:
        for old in head.emitted:
            if old.segment >= 0:
                self._state.segments.delete(txn, old.segment)
        kept = []
        for rows in emitted:
            if not len(rows.roots):
                continue
            segment = -1
            if rows.payload is not None:
                # Stored at the seal: the payload must be durable before the first of its children is handed on.
                segment = self._state.new_segment()
                info = first_attempts(np.ascontiguousarray(rows.roots), None)
                number = self._state.stream(rows.stream).number
                self._state.segments.append(
                    txn, segment, number, stored.SegmentKind.SEALED, StoredBatch(info, rows.payload)
                )
            ids = calls.plain_event_ids(rows.ids) if self._state.exact else None
            kept.append(
                stored.StoredEmit(rows.stream, segment, rows.roots.tobytes(), rows.values.tobytes(), ids)
            )
        return tuple(kept)

    def _delivered_attempts(
        self, txn: WriteTransaction, head: stored.BatchHead
    ) -> dict[int, tuple[str, int]]:
        attempts: dict[int, tuple[str, int]] = {}
        for name, start, end in head.delivered:
            number = self._state.stream(name).number
            start = max(start, stored.get_bounds(txn, number).committed)
            for entry in stored.log_entries(txn, number, start, end):
                info = self._state.segments.head(txn, entry.segment).info
                part = slice(max(start - entry.start, 0), max(min(end - entry.start, entry.rows), 0))
                for root, attempt in zip(
                    info.roots[part].tolist(), info.attempts[part].tolist(), strict=True
                ):
                    attempts[root] = name, attempt
        return attempts

    def _will_wait(self, stream: str, attempt: int, failure: calls.Failure, now: Now) -> bool:
        options = self._state.stream(stream).options
        retry = next_attempt(options, failure.root, attempt, failure, wall_ms=now.wall_ms)
        return retry is not None

    def _check(
        self,
        query: stored.QueryRecord,
        call: calls.Seal | calls.Reseal,
        head: stored.BatchHead,
        attempts: dict[int, tuple[str, int]],
    ) -> None:
        for rows in call.failed:
            _check_stream(query, rows.stream, "failed")
        for failure in call.redelivered:
            if failure.root not in attempts:
                raise ProtocolError(f"redelivered: root {failure.root} was not delivered to this batch")
        failing = {failure.root for failure in call.redelivered}
        failing.update(failure.root for failure in head.redelivered)
        failing.update(failure.root for rows in call.failed for failure in rows.failures)
        delivered: set[str] = set()
        for emitted in call.emitted:
            _check_stream(query, emitted.stream, "emitted")
            if failing and (both := failing.intersection(emitted.roots.tolist())):
                raise ProtocolError(f"root {both.pop()} has failed and was emitted: a root is all or nothing")
            if emitted.payload is not None:
                continue
            missing = next((root for root in emitted.roots.tolist() if root not in attempts), None)
            if missing is not None:
                raise ProtocolError(
                    f"emitted: root {missing} has no payload and was not delivered to this batch"
                )
            if emitted.stream in delivered:
                raise ProtocolError(
                    f"emitted: delivered rows of {emitted.stream!r} come twice; put them together"
                )
            delivered.add(emitted.stream)


def said(call: calls.Seal) -> bytes:
    """Return a digest of what a seal says. An id always names one record, so payload is left out."""
    content = [
        [[rows.stream, rows.roots.tobytes(), _plain(rows.failures)] for rows in call.failed],
        sorted((name, *offsets) for name, offsets in call.delivered.items()),
        _plain(call.redelivered),
        _plain(call.resumed),
        [[rows.stream, rows.roots.tobytes(), rows.values.tobytes()] for rows in call.emitted],
        [[event.roots.tobytes(), event.deltas.tobytes(), event.incarnation] for event in call.report.done],
        [[_plain(event.failures), event.incarnation] for event in call.report.failed],
    ]
    return hashlib.blake2b(pack(content), digest_size=16).digest()


def stored_failure(failure: calls.Failure) -> calls.Failure:
    return replace(
        failure,
        reason=cut(failure.reason, MAX_REASON),
        operator=cut(failure.operator, MAX_OPERATOR),
        traceback=cut(failure.traceback, MAX_TRACEBACK),
        place=cut(failure.place, MAX_PLACE),
    )


def _plain(failures: Iterable[calls.Failure]) -> list[list[object]]:
    return [
        [
            failure.root,
            failure.reason,
            failure.operator,
            failure.fatal,
            failure.after_ms,
            failure.uses_attempt,
        ]
        for failure in failures
    ]


def _check_stream(query: stored.QueryRecord, stream: str, what: str) -> None:
    if stream not in query.streams:
        raise ProtocolError(f"{what}: stream {stream!r} is none of the query's ({', '.join(query.streams)})")


def keep_report(txn: WriteTransaction, query: int, batch: int, report: calls.Report) -> None:
    """Store what a batch will report on records of other queries: a crash must not lose it, nor a run again change it.

    The query sends the events itself, behind its commit: their roots may be another shard's.
    """
    if report.done or report.failed:
        stored.put_batch_report(txn, query, batch, _plain_report(report))
    else:
        stored.delete_batch_report(txn, query, batch)


def kept_report(txn: ReadTransaction, query: int, batch: int) -> calls.Report:
    values = stored.get_batch_report(txn, query, batch)
    if values is None:
        return calls.Report()
    try:
        return _stored_report(values)
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"the report of batch {batch} cannot be read: {error}") from error


def _plain_report(report: calls.Report) -> list[Any]:
    done = [
        [event.roots.tobytes(), event.deltas.tobytes(), event.incarnation, calls.plain_event_ids(event.ids)]
        for event in report.done
    ]
    failed = [
        [to_columns(stored_failure(failure) for failure in fail.failures), fail.incarnation]
        for fail in report.failed
    ]
    return [done, failed]


def _stored_report(values: list[Any]) -> calls.Report:
    done, failed = values
    return calls.Report(
        tuple(
            calls.Xor(
                np.frombuffer(roots, np.uint64),
                np.frombuffer(xors, np.uint64),
                incarnation,
                hold=True,
                ids=calls.stored_event_ids(ids),
            )
            for roots, xors, incarnation, ids in done
        ),
        tuple(
            calls.Fail(tuple(from_columns(columns)), incarnation, hold=True)
            for columns, incarnation in failed
        ),
    )


class Batches:
    def __init__(
        self, state: ShardState, tracking: Tracking, failing: Failing, deliveries: Deliveries
    ) -> None:
        self._state = state
        self._tracking = tracking
        self._failing = failing
        self._deliveries = deliveries
        self._writer = SealWriter(state)

    @calls.handles(calls.BeginBatch)
    def begin(self, txn: WriteTransaction, call: calls.BeginBatch, now: Now) -> calls.BatchBegun:
        query = self._owned(txn, call)
        if call.batch <= query.last_committed:
            return calls.BatchBegun(
                calls.BatchState.COMMITTED, report=kept_report(txn, query.number, call.batch)
            )
        head = stored.get_batch(txn, query.number, call.batch)
        if head is not None:
            return self._sealed_before(txn, query, call.batch, head)
        self._check_no_other_seal(query, call)
        for name in query.streams:
            self._remove_committed(txn, self._state.stream(name))
        if query.last_committed >= 0:
            stored.delete_batch(txn, query.number, query.last_committed)
            stored.delete_batch_report(txn, query.number, query.last_committed)
        return calls.BatchBegun(calls.BatchState.NEW)

    @calls.handles(calls.Seal)
    def seal(self, txn: WriteTransaction, call: calls.Seal, now: Now) -> calls.Sealed:
        query = self._owned(txn, call)
        digest = said(call)
        head = stored.get_batch(txn, query.number, call.batch)
        if head is not None:
            if head.said != digest:
                raise ProtocolError(
                    f"batch {call.batch} of query {call.query!r} is sealed, and its seal said something "
                    "else; begin it again and Reseal what failed beyond that"
                )
            return calls.Sealed(head.waiting, head.dead)
        if call.batch <= query.last_committed:
            raise ProtocolError(
                f"batch {call.batch} of query {call.query!r} was committed before: begin the next one"
            )
        self._check_no_other_seal(query, call)
        delivered = self._check_delivered(txn, query, call.delivered)
        head = stored.BatchHead(False, digest, delivered, (), (), (), 0, 0, 0)
        head = self._extend(txn, query, head, call, now)
        stored.put_query(txn, call.query, replace(query, last_sealed=call.batch))
        return calls.Sealed(head.waiting, head.dead)

    @calls.handles(calls.Reseal)
    def reseal(self, txn: WriteTransaction, call: calls.Reseal, now: Now) -> calls.Sealed:
        query = self._owned(txn, call)
        head = stored.get_batch(txn, query.number, call.batch)
        if head is None or head.committed:
            state = "is not sealed: Seal it" if call.batch > query.last_committed else "was committed before"
            raise ProtocolError(f"batch {call.batch} of query {call.query!r} {state}")
        head = self._extend(txn, query, head, call, now)
        return calls.Sealed(head.waiting, head.dead)

    def _extend(
        self,
        txn: WriteTransaction,
        query: stored.QueryRecord,
        head: stored.BatchHead,
        call: calls.Seal | calls.Reseal,
        now: Now,
    ) -> stored.BatchHead:
        head = self._writer.extend(txn, query, call.batch, head, call, now)
        keep_report(txn, query.number, call.batch, call.report)
        return head

    @calls.handles(calls.Commit)
    def commit(self, txn: WriteTransaction, call: calls.Commit, now: Now) -> calls.Committed:
        query = self._owned(txn, call)
        if call.batch <= query.last_committed:
            return calls.Committed(again=True)
        head = stored.get_batch(txn, query.number, call.batch)
        if head is None:
            raise ProtocolError(
                f"batch {call.batch} of query {call.query!r} is not sealed: Seal it before its commit"
            )
        for part in stored.batch_parts(txn, query.number, call.batch, head.parts, self._state.payloads):
            stream = self._state.stream(part.stream)
            bodies = self._state.payloads.rows(txn, part.rows.payload)
            for row, failure in enumerate(part.failures):
                self._failing.move(txn, stream, part.rows.info, bodies, row, failure, now)
            stream.counters.failed_sealed += len(part.failures)
        self._commit_delivered(txn, head, now)
        for emit in head.emitted:
            if emit.segment >= 0:
                self._state.segments.change_kind(txn, emit.segment, stored.SegmentKind.TRACKED)
                stream = self._state.stream(emit.stream)
                roots, values, ids = emitted_ids(emit)
                self._tracking.register(stream, emit.segment, roots, values, now, ids)
        stored.delete_batch_parts(txn, query.number, call.batch, head.parts)
        stored.put_batch(txn, query.number, call.batch, replace(head, committed=True, emitted=(), parts=0))
        stored.put_query(txn, call.query, replace(query, last_committed=call.batch))
        return calls.Committed(again=False)

    def _commit_delivered(self, txn: WriteTransaction, head: stored.BatchHead, now: Now) -> None:
        """Decide the delivered rows: failed ones wait or are dead, emitted ones are pending, the rest is done."""
        failures = {failure.root: failure for failure in head.redelivered}
        emitted = {emit.stream: emit for emit in head.emitted if emit.segment < 0}
        for name, start, end in head.delivered:
            stream = self._state.stream(name)
            bounds = stored.get_bounds(txn, stream.number)
            start, end = max(start, bounds.committed), max(end, bounds.committed)
            moved = 0
            if failures or name in emitted:
                for rows in self._deliveries.rows_between(txn, stream, start, end):
                    moved += self._fail_rows(txn, stream, rows, failures, now)
                    if name in emitted:
                        moved += self._track_rows(txn, stream, rows, emitted[name], now)
            stream.counters.delivered_done += end - start - moved
            stored.put_bounds(txn, stream.number, replace(bounds, committed=end))
            stream.logged -= end - start
            stream.log_age.committed(end)
            stream.offered = max(stream.offered, end)

    def _fail_rows(
        self,
        txn: WriteTransaction,
        stream: Stream,
        rows: StoredBatch,
        failures: dict[int, calls.Failure],
        now: Now,
    ) -> int:
        failed = [
            row for row, root in enumerate(rows.info.roots.tolist() if failures else ()) if root in failures
        ]
        if failed:
            bodies = self._state.payloads.rows(txn, rows.payload)
            for row in failed:
                cause = failures[int(rows.info.roots[row])]
                self._failing.move(txn, stream, rows.info, bodies, row, cause, now)
        stream.counters.failed_sealed += len(failed)
        return len(failed)

    def _track_rows(
        self, txn: WriteTransaction, stream: Stream, rows: StoredBatch, emit: stored.StoredEmit, now: Now
    ) -> int:
        roots, values, ids = emitted_ids(emit)
        order = np.argsort(roots)
        places = np.minimum(np.searchsorted(roots, rows.info.roots, sorter=order), len(roots) - 1)
        which: I64 = (
            np.flatnonzero(roots[order[places]] == rows.info.roots) if len(roots) else np.empty(0, np.int64)
        )
        if len(which):
            sequence = self._state.new_segment()
            taken = StoredBatch(rows.info.take(which), take_rows(rows.payload, which))
            self._state.segments.append(txn, sequence, stream.number, stored.SegmentKind.TRACKED, taken)
            found = order[places[which]]
            ids = None if ids is None else ids.take(found)
            self._tracking.register(stream, sequence, taken.info.roots, values[found], now, ids)
        return len(which)

    def _remove_committed(self, txn: WriteTransaction, stream: Stream) -> None:
        """Remove what is committed from a log. A segment goes when all its rows are."""
        bounds = stored.get_bounds(txn, stream.number)
        if bounds.floor == bounds.committed:
            return
        for entry in list(stored.log_entries(txn, stream.number, bounds.floor, bounds.committed)):
            if entry.end <= bounds.committed:
                self._state.segments.delete(txn, entry.segment)
                stored.delete_entry(txn, stream.number, entry)
        stored.put_bounds(txn, stream.number, replace(bounds, floor=bounds.committed))

    def _check_delivered(
        self, txn: WriteTransaction, query: stored.QueryRecord, delivered: dict[str, tuple[int, int]]
    ) -> tuple[tuple[str, int, int], ...]:
        for name, (start, end) in delivered.items():
            if name not in query.streams:
                raise ProtocolError(f"delivered: stream {name!r} is none of the query's")
            bounds = stored.get_bounds(txn, self._state.stream(name).number)
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

    def _owned(
        self, txn: WriteTransaction, call: calls.BeginBatch | calls.Seal | calls.Reseal | calls.Commit
    ) -> stored.QueryRecord:
        query = stored.get_query(txn, call.query)
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

    def _check_no_other_seal(self, query: stored.QueryRecord, call: calls.BeginBatch | calls.Seal) -> None:
        if query.last_sealed > query.last_committed and query.last_sealed != call.batch:
            raise ProtocolError(
                f"batch {query.last_sealed} of query {call.query!r} is sealed and not committed; "
                f"batch {call.batch} cannot come before that is done"
            )

    def _sealed_before(
        self, txn: WriteTransaction, query: stored.QueryRecord, batch: int, head: stored.BatchHead
    ) -> calls.BatchBegun:
        failed = tuple(
            calls.SealedRows(
                part.stream, part.rows.payload, part.rows.info.roots, part.failures, part.rows.info.key_hashes
            )
            for part in stored.batch_parts(txn, query.number, batch, head.parts, self._state.payloads)
        )
        return calls.BatchBegun(
            calls.BatchState.SEALED, failed, tuple(failure.root for failure in head.redelivered), head.resumed
        )


def emitted_ids(emit: stored.StoredEmit) -> tuple[U64, U64, calls.EventIds | None]:
    roots, values = np.frombuffer(emit.roots, np.uint64), np.frombuffer(emit.values, np.uint64)
    return roots, values, calls.stored_event_ids(emit.ids)
