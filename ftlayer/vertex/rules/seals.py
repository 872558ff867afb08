from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from ftlayer.backoff import next_attempt
from ftlayer.clock import Now
from ftlayer.errors import ProtocolError, StoreDamagedError
from ftlayer.records.failure_columns import from_columns, to_columns
from ftlayer.store import batches
from ftlayer.store.batches import BatchHead, BatchPart, StoredEmit, StoredFailure
from ftlayer.store.kv import ReadTransaction, WriteTransaction
from ftlayer.store.meta import QueryRecord
from ftlayer.store.rows import StoredBatch, first_attempts, pack
from ftlayer.store.segments import SegmentKind
from ftlayer.store.streams import get_bounds, log_entries
from ftlayer.vertex.calls import EmittedRows, Fail, Failure, Report, Reseal, Seal, Xor
from ftlayer.vertex.calls.event_ids import plain_event_ids, stored_event_ids
from ftlayer.vertex.rules.retry import (
    MAX_OPERATOR,
    MAX_PLACE,
    MAX_REASON,
    MAX_TRACEBACK,
    cause_of,
    cut,
)
from ftlayer.vertex.rules.state import ShardState


class SealWriter:
    """Stores the content of `Seal` and `Reseal`."""

    def __init__(self, state: ShardState) -> None:
        self._state = state

    def extend(
        self,
        txn: WriteTransaction,
        query: QueryRecord,
        batch: int,
        head: BatchHead,
        call: Seal | Reseal,
        now: Now,
    ) -> BatchHead:
        """Store ``head`` with what ``call`` says added to it, and return it.

        Raises `ProtocolError` before anything is stored.
        """
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
        failures = sum(len(rows.failures) for rows in call.failed) + len(redelivered)
        for number, rows in enumerate(call.failed, start=head.parts + 1):
            stored = tuple(stored_failure(failure) for failure in rows.failures)
            info = first_attempts(np.ascontiguousarray(rows.roots), rows.key_hashes)
            part = BatchPart(rows.stream, StoredBatch(info, rows.payload), stored)
            batches.put_part(txn, query.number, batch, number, part, self._state.payloads)
        head = replace(
            head,
            redelivered=head.redelivered + tuple(redelivered.values()),
            resumed=tuple(resumed.values()),
            emitted=self._replace_emitted(txn, head, call.emitted),
            parts=head.parts + len(call.failed),
            waiting=head.waiting + waiting,
            dead=head.dead + failures - waiting,
        )
        batches.put_head(txn, query.number, batch, head)
        return head

    def _replace_emitted(
        self, txn: WriteTransaction, head: BatchHead, emitted: tuple[EmittedRows, ...]
    ) -> tuple[StoredEmit, ...]:
        for old in head.emitted:
            if old.segment >= 0:
                self._state.segments.delete(txn, old.segment)
        stored = []
        for rows in emitted:
            if not len(rows.roots):
                continue
            segment = -1
            if rows.payload is not None:
                # Stored at the seal: the payload must be durable before the first of its children is handed
                # on.
                segment = self._state.new_segment()
                info = first_attempts(np.ascontiguousarray(rows.roots), None)
                number = self._state.stream(rows.stream).number
                self._state.segments.append(
                    txn, segment, number, SegmentKind.SEALED, StoredBatch(info, rows.payload)
                )
            ids = plain_event_ids(rows.ids) if self._state.exact else None
            stored.append(StoredEmit(rows.stream, segment, rows.roots.tobytes(), rows.values.tobytes(), ids))
        return tuple(stored)

    def _delivered_attempts(self, txn: WriteTransaction, head: BatchHead) -> dict[int, tuple[str, int]]:
        """Return the stream and attempt of every row this batch was given, by root."""
        attempts: dict[int, tuple[str, int]] = {}
        for name, start, end in head.delivered:
            number = self._state.stream(name).number
            start = max(start, get_bounds(txn, number).committed)
            for entry in log_entries(txn, number, start, end):
                info = self._state.segments.head(txn, entry.segment).info
                part = slice(max(start - entry.start, 0), max(min(end - entry.start, entry.rows), 0))
                for root, attempt in zip(
                    info.roots[part].tolist(), info.attempts[part].tolist(), strict=True
                ):
                    attempts[root] = name, attempt
        return attempts

    def _will_wait(self, stream: str, attempt: int, failure: Failure | StoredFailure, now: Now) -> bool:
        options = self._state.stream(stream).options
        retry = next_attempt(options, failure.root, attempt, cause_of(failure), wall_ms=now.wall_ms)
        return retry is not None

    def _check(
        self, query: QueryRecord, call: Seal | Reseal, head: BatchHead, attempts: dict[int, tuple[str, int]]
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


def said(call: Seal) -> bytes:
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


def stored_failure(failure: Failure) -> StoredFailure:
    """Return a failure as it is stored, its texts cut to their bounds."""
    return StoredFailure(
        failure.root,
        cut(failure.reason, MAX_REASON),
        cut(failure.operator, MAX_OPERATOR),
        cut(failure.traceback, MAX_TRACEBACK),
        failure.fatal,
        failure.after_ms,
        failure.uses_attempt,
        cut(failure.place, MAX_PLACE),
    )


def _plain(failures: Iterable[Failure]) -> list[list[object]]:
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


def _check_stream(query: QueryRecord, stream: str, what: str) -> None:
    if stream not in query.streams:
        raise ProtocolError(f"{what}: stream {stream!r} is none of the query's ({', '.join(query.streams)})")


def keep_report(txn: WriteTransaction, query: int, batch: int, report: Report) -> None:
    """Store what a batch will report on records that other queries handed on, in the place of what it would have.

    The query sends the events itself, behind its commit: their roots may be another shard's. They are kept because a
    crash in between must not lose them, and a run of the batch again could say something else.
    """
    if report.done or report.failed:
        batches.put_report(txn, query, batch, _plain_report(report))
    else:
        batches.delete_report(txn, query, batch)


def kept_report(txn: ReadTransaction, query: int, batch: int) -> Report:
    """Return what a batch is to report; nothing if no record of it was resumed."""
    values = batches.get_report(txn, query, batch)
    if values is None:
        return Report()
    try:
        return _stored_report(values)
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"the report of batch {batch} cannot be read: {error}") from error


def _plain_report(report: Report) -> list[Any]:
    done = [
        [event.roots.tobytes(), event.deltas.tobytes(), event.incarnation, plain_event_ids(event.ids)]
        for event in report.done
    ]
    failed = [
        [to_columns(stored_failure(failure) for failure in fail.failures), fail.incarnation]
        for fail in report.failed
    ]
    return [done, failed]


def _stored_report(values: list[Any]) -> Report:
    done, failed = values
    return Report(
        tuple(
            Xor(
                np.frombuffer(roots, np.uint64),
                np.frombuffer(xors, np.uint64),
                incarnation,
                hold=True,
                ids=stored_event_ids(ids),
            )
            for roots, xors, incarnation, ids in done
        ),
        tuple(
            Fail(tuple(Failure(*row) for row in from_columns(columns)), incarnation, hold=True)
            for columns, incarnation in failed
        ),
    )
