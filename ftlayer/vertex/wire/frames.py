"""Frames: one call, or one reply, as a msgpack map.

call     ``{"call": name, "fields": {…}}``, and for a call that is to have its effect once ``"client"`` and
         ``"sequence"`` as well (see `ftlayer.vertex.calls.Envelope`)
reply    ``{"reply": name, "fields": {…}}``
error    ``{"error": code, "message": text}`` (`ftlayer.transport.flight_connection`); the codes are those of
         `ftlayer.errors`

A reply or an error in a stream of calls has ``"sequence"`` too. What the fields look like is said in
`ftlayer.vertex.wire.frames`; names and meanings are the dataclasses of `ftlayer.vertex.calls`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Iterable, Sized
from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.config import MIB
from ftlayer.errors import FTLayerError, MalformedRequestError, UnsupportedError, VertexError
from ftlayer.failures import MAX_RETRY_LATER_MS
from ftlayer.printable import described
from ftlayer.records.failure_columns import from_columns, to_columns
from ftlayer.records.ipc import UNREADABLE, as_stream, read_one_batch
from ftlayer.transport.codec import Codec, Codecs, list_of
from ftlayer.transport.flight_connection import error_in
from ftlayer.transport.frames import malformed, pack, unpack_map
from ftlayer.vertex import calls
from ftlayer.vertex.calls import (
    I32,
    MAX_EDITS,
    MAX_KEYS,
    MAX_LETTERS,
    MAX_PAGE,
    MAX_ROWS,
    MAX_SELECTED,
    U64,
    AnnounceJob,
    AskJob,
    AskRanges,
    Call,
    Deliverable,
    Envelope,
    EventIds,
    Failure,
    GetHour,
    GetJob,
    JobDetails,
    JobOrder,
    MutatingCall,
    NoteRange,
    OrderAction,
    OrderState,
    ReadingCall,
    Register,
    Reply,
    RootRange,
    RowRange,
    RowRoots,
    StoreRows,
    TakeOver,
)
from ftlayer.vertex.calls.event_ids import check_event_ids

# Names become parts of the store's keys, which LMDB limits to 511 bytes.
MAX_NAME_BYTES = 200
# A job's name with some more.
MAX_RUN_BYTES = 256
# A run's name, and the number of a checkpoint.
MAX_FILE_BYTES = MAX_RUN_BYTES + 20


def check_name(name: str, where: str, most: int = MAX_NAME_BYTES) -> None:
    """Raise `MalformedRequestError` unless ``name`` has 1 to ``most`` bytes and no NUL."""
    size = len(name.encode("utf-8", "surrogatepass"))
    if not 1 <= size <= most or "\0" in name:
        raise MalformedRequestError(f"{where}: expected 1 to {most} bytes without NUL, got {size} bytes")


def check_least(value: int, least: int, where: str) -> None:
    """Raise `MalformedRequestError` unless ``value`` is ``least`` or more, and a signed 64-bit number."""
    if not least <= value < 1 << 63:
        raise MalformedRequestError(f"{where}: expected {least} to 2^63-1, got {value}")


# What the vertex checks of announcements and orders beyond their types.
#
# An announcement is kept, listed and drawn: its texts and lists are bounded, and its numbers are finite.


MAX_TEXT = 65_536
"""Characters of a stack, of a failure with its traceback, of any other text."""

MAX_KEY = 512
"""Characters of a key of a map: a metric's name with an operator's."""

# Lists by the name of their field. A job has so many subtasks and edges at most; of the rest it says the latest.
_MOST = {
    "answers": 200,
    "nodes": 2_000,
    "names": 2_000,
    "slots": 2_000,
    "subtasks": 20_000,
    "edges": 20_000,
    "counters": 5_000,
    "rates": 5_000,
    "histograms": 5_000,
    "bounds": 64,
    "counts": 65,
    "exemplars": 65,
    "incidents": 200,
    "checkpoints": 100,
    "retained": 1_000,
    "circuits": 1_000,
    "batches": 200,
    "phases_ms": 20,
    "links": 20,
}


def check_job_call(call: AnnounceJob | AskJob | GetJob | GetHour) -> None:
    match call:
        case AnnounceJob():
            _check_plain(call, "AnnounceJob")
            _check_job(call.job, "AnnounceJob.job")
            for index, answer in enumerate(call.answers):
                where = f"AnnounceJob.answers[{index}]"
                check_name(answer.id, f"{where}.id")
                if answer.state is OrderState.WAITING:
                    raise MalformedRequestError(
                        f"{where}.state: an answer to an order is never {answer.state}"
                    )
        case AskJob():
            _check_plain(call, "AskJob")
            _check_order(call.order, "AskJob.order")
        case GetJob():
            check_name(call.owner, "GetJob.owner")
            check_least(call.checkpoints_since_ms, 0, "GetJob.checkpoints_since_ms")
        case GetHour():
            if call.owner:
                check_name(call.owner, "GetHour.owner")


def _check_job(job: JobDetails, where: str) -> None:
    check_name(job.owner, f"{where}.owner")
    check_name(job.name, f"{where}.name")
    check_name(job.run, f"{where}.run", MAX_RUN_BYTES)
    for index, checkpoint in enumerate(job.checkpoints):
        check_least(checkpoint.number, 1, f"{where}.checkpoints[{index}].number")
        check_least(checkpoint.ended_ms, 0, f"{where}.checkpoints[{index}].ended_ms")


def _check_order(order: JobOrder, where: str) -> None:
    check_name(order.id, f"{where}.id")
    check_name(order.owner, f"{where}.owner")
    check_name(order.run, f"{where}.run", MAX_RUN_BYTES)
    check_name(order.by, f"{where}.by")
    check_least(order.asked_ms, 0, f"{where}.asked_ms")
    check_least(order.timeout_ms, 0, f"{where}.timeout_ms")
    check_least(order.slot, 0 if order.action is OrderAction.STACK else -1, f"{where}.slot")


def _check_plain(call: AnnounceJob | AskJob, where: str) -> None:
    fault = _fault_in(call)
    if fault is not None:
        raise MalformedRequestError(where + fault)


def _fault_in(value: Any) -> str | None:
    """Look at each text, number and list in ``value``, however deep; return the first fault behind its path."""
    kind = type(value)
    if kind is int or kind is bool or value is None:
        return None
    if kind is float:
        return None if math.isfinite(value) else f": expected a finite number, got {value}"
    if isinstance(value, str):
        return (
            None if len(value) <= MAX_TEXT else f": expected {MAX_TEXT} characters at most, got {len(value)}"
        )
    if kind is tuple:
        parts: Iterable[tuple[Any, Any]] = enumerate(value)
    elif kind is dict:
        too_long = next((key for key in value if len(key) > MAX_KEY), None)
        if too_long is not None:
            return f": expected keys of {MAX_KEY} characters at most, got {len(too_long)}"
        parts = value.items()
    else:
        return _fault_in_fields(value)
    for at, part in parts:
        fault = _fault_in(part)
        if fault is not None:
            return f"[{at!r}]{fault}"
    return None


def _fault_in_fields(value: Any) -> str | None:
    kind: type = type(value)
    for name in _fields(kind):
        part = getattr(value, name)
        if name in _MOST and len(part) > _MOST[name]:
            return f".{name}: expected {_MOST[name]} items at most, got {len(part)}"
        fault = _fault_in(part)
        if fault is not None:
            return f".{name}{fault}"
    return None


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def check_rows(rows: int, where: str) -> None:
    """Raise `MalformedRequestError` for more rows than a call may have."""
    if rows > MAX_ROWS:
        raise MalformedRequestError(f"{where}: {rows} rows in one call; send {MAX_ROWS} at most")


def check_ids(ids: U64, where: str) -> None:
    """Raise `MalformedRequestError` for an id of 0."""
    # Twice as fast as `all`, and four times for a few ids.
    if np.count_nonzero(ids) != ids.size:
        index = int(np.flatnonzero(ids == 0)[0])
        raise MalformedRequestError(f"{where}[{index}]: 0 is never an id")


def check_lengths(call: str, rows: int, **columns: Sized) -> None:
    """Raise `MalformedRequestError` unless all columns have ``rows`` rows."""
    for name, column in columns.items():
        if len(column) != rows:
            raise MalformedRequestError(
                f"{call}.{name}: expected {rows} rows, as {call}.roots has, got {len(column)}"
            )


def check_key_hashes(key_hashes: I32 | None, rows: int, where: str) -> None:
    """Raise `MalformedRequestError` unless there are numbers for ``rows`` rows, or none at all."""
    if key_hashes is None:
        return
    if len(key_hashes) != rows:
        raise MalformedRequestError(f"{where}: expected {rows} rows, as roots has, got {len(key_hashes)}")
    if key_hashes.ndim not in (1, 2) or 0 in key_hashes.shape[1:]:
        raise MalformedRequestError(
            f"{where}: expected shape (n,) or (n, selectors), got {key_hashes.shape}; leave it out without keys"
        )


def check_values(roots: RowRoots, values: U64 | None, ids: EventIds | None, where: str) -> None:
    """Raise `MalformedRequestError` for values or ids that do not fit their roots."""
    if values is not None:
        check_lengths(where, len(roots), values=values)
        check_event_ids(ids, values, f"{where}.ids")
    elif ids is not None:
        raise MalformedRequestError(f"{where}.ids: they need the values that were folded from them")


MAX_PARTITIONS = 65_536
MAX_HOLDER_BYTES = 2 * MAX_RUN_BYTES
MAX_DIGEST_BYTES = 64
MAX_PLANNED_BYTES = 16 * MIB
"""Offsets of all splits of a source, as text."""


def check_note(call: NoteRange) -> None:
    check_name(call.stream, "NoteRange.stream")
    check_least(call.first, 0, "NoteRange.first")
    check_least(call.number, call.first, "NoteRange.number")
    if call.number >= 1 << 63:
        raise MalformedRequestError(f"NoteRange.number: expected less than 2^63, got {call.number}")
    if len(call.planned) > MAX_PLANNED_BYTES:
        raise MalformedRequestError(
            f"NoteRange.planned: expected {MAX_PLANNED_BYTES} bytes at most, got {len(call.planned)}"
        )


def check_range_call(call: TakeOver | Register | AskRanges | StoreRows) -> None:
    where = type(call).__name__
    check_name(call.stream, f"{where}.stream")
    check_name(call.holder, f"{where}.holder", MAX_HOLDER_BYTES)
    match call:
        case TakeOver():
            if len(call.partitions) > MAX_PARTITIONS:
                raise MalformedRequestError(
                    f"TakeOver.partitions: expected {MAX_PARTITIONS} at most, got {len(call.partitions)}"
                )
            for index, partition in enumerate(call.partitions):
                check_name(partition, f"TakeOver.partitions[{index}]")
        case Register():
            _check_range_of_range_checks(call.range)
            check_rows(len(call.roots), "Register")
            if not isinstance(call.roots, RootRange):
                check_ids(call.roots, "Register.roots")
            check_values(call.roots, call.values, call.ids, "Register")
            if call.range.rows != len(call.roots):
                raise MalformedRequestError(
                    f"Register.range.rows: expected {len(call.roots)}, as Register.roots has, got {call.range.rows}"
                )
        case StoreRows():
            check_least(call.segment, 0, "StoreRows.segment")
            check_rows(len(call.rows), "StoreRows")
            if call.payload.num_rows != len(call.rows):
                raise MalformedRequestError(
                    f"StoreRows.payload: expected {len(call.rows)} rows, as StoreRows.rows has, got "
                    f"{call.payload.num_rows}"
                )
            check_key_hashes(call.key_hashes, len(call.rows), "StoreRows.key_hashes")
            _check_ascending(call.rows)


def _check_range_of_range_checks(facts: RowRange) -> None:
    where = "Register.range"
    check_name(facts.partition, f"{where}.partition")
    check_least(facts.number, 0, f"{where}.number")
    check_least(facts.first, 0, f"{where}.first")
    check_least(facts.span, facts.rows, f"{where}.span")
    if len(facts.digest) > MAX_DIGEST_BYTES:
        raise MalformedRequestError(
            f"{where}.digest: expected {MAX_DIGEST_BYTES} bytes at most, got {len(facts.digest)}"
        )


def _check_ascending(rows: U64) -> None:
    if len(rows) and (int(rows[-1]) >= 1 << 20 or np.any(rows[1:] <= rows[:-1])):
        raise MalformedRequestError("StoreRows.rows: expected places below 2^20 in ascending order")


# Checks of decoded calls beyond their types: ids of 0, lengths that differ, empty names.
#
# Here calls enter the vertex's process, which must not trust those who send them, and here alone they are checked:
# neither does a client check what it sends, nor the service, the rules or the store what has passed. Whether a
# well-formed call makes sense *now*, and on this shard, is theirs to say.


MAX_SOUGHT = 1_024
LIST_STATES = ("pending", "waiting", "delivery", "dead")


def check_call(call: Call) -> None:
    """Raise `MalformedRequestError` naming the field, if ``call`` cannot be meant."""
    match call:
        case calls.Persist():
            check_name(call.stream, "Persist.stream")
            check_rows(len(call.roots), "Persist")
            if not isinstance(call.roots, RootRange):
                check_ids(call.roots, "Persist.roots")
            check_lengths("Persist", len(call.roots), payload=call.payload)
            check_values(call.roots, call.values, call.ids, "Persist")
            check_key_hashes(call.key_hashes, len(call.roots), "Persist.key_hashes")
            if call.position is not None:
                check_name(call.position.partition, "Persist.position.partition")
        case calls.NoteRange():
            check_note(call)
        case calls.TakeOver() | calls.Register() | calls.AskRanges() | calls.StoreRows():
            check_range_call(call)
        case calls.Ingest():
            check_name(call.stream, "Ingest.stream")
            check_rows(call.payload.num_rows, "Ingest")
        case calls.Xor():
            check_ids(call.roots, "Xor.roots")
            check_values(call.roots, call.values, call.ids, "Xor")
        case calls.Touch():
            check_ids(call.roots, "Touch.roots")
        case calls.Fail():
            _check_failures(call.failures, "Fail.failures")
        case calls.ClaimJob():
            check_name(call.job, "ClaimJob.job")
            check_name(call.run, "ClaimJob.run", MAX_RUN_BYTES)
        case calls.OpenStream():
            check_name(call.stream, "OpenStream.stream")
        case calls.TakeReplays():
            check_name(call.stream, "TakeReplays.stream")
            check_least(call.limit, 1, "TakeReplays.limit")
        case calls.Recall() | calls.StreamStatusCall():
            _check_streams(call.streams, f"{type(call).__name__}.streams")
        case calls.OpenQuery():
            check_name(call.query, "OpenQuery.query")
            for index, stream in enumerate(call.streams):
                check_name(stream, f"OpenQuery.streams[{index}]")
            if call.title:
                check_name(call.title, "OpenQuery.title")
        case calls.Deliverable():
            check_name(call.stream, "Deliverable.stream")
            check_least(call.start, 0, "Deliverable.start")
            check_least(call.max_rows, 1, "Deliverable.max_rows")
        case calls.ReadDeliveries():
            check_name(call.stream, "ReadDeliveries.stream")
            _check_range(call.start, call.end, "ReadDeliveries")
        case calls.BeginBatch() | calls.Commit():
            _check_batch(call)
        case calls.Seal():
            _check_batch(call)
            _check_verdict(call)
            for stream, (start, end) in call.delivered.items():
                check_name(stream, "Seal.delivered")
                _check_range(start, end, f"Seal.delivered[{stream!r}]")
        case calls.Reseal():
            _check_batch(call)
            _check_verdict(call)
        case calls.QueryStatusCall() | calls.ReportCircuits():
            check_name(call.query, f"{type(call).__name__}.query")
        case calls.PutCursor() | calls.GetCursor():
            check_name(call.stream, f"{type(call).__name__}.stream")
            check_name(call.reader, f"{type(call).__name__}.reader")
            if isinstance(call, calls.PutCursor) and len(call.position) > MAX_NAME_BYTES:
                raise MalformedRequestError(f"PutCursor.position: expected {MAX_NAME_BYTES} bytes at most")
        case calls.ListRecords():
            if call.state not in LIST_STATES:
                raise MalformedRequestError(
                    f"ListRecords.state: expected one of {', '.join(LIST_STATES)}, got {call.state!r}"
                )
            if not 1 <= call.limit <= MAX_PAGE:
                raise MalformedRequestError(f"ListRecords.limit: expected 1 to {MAX_PAGE}, got {call.limit}")
        case calls.SelectRecords():
            _check_selection(call)
        case calls.DeadGroups():
            if call.stream:
                check_name(call.stream, "DeadGroups.stream")
        case calls.Explain():
            if not 0 < call.root < 1 << 64:
                raise MalformedRequestError(f"Explain.root: expected an id, 1 to 2^64-1, got {call.root}")
        case calls.AnnounceJob() | calls.AskJob() | calls.GetJob() | calls.GetHour():
            check_job_call(call)
        case calls.Requeue() | calls.Purge():
            if call.by:
                check_name(call.by, f"{type(call).__name__}.by")
        case calls.EditAndRequeue():
            _check_edits(call)
        case calls.KeepLetters():
            check_name(call.stream, "KeepLetters.stream")
            check_name(call.file, "KeepLetters.file", MAX_FILE_BYTES)
            check_least(call.part, 0, "KeepLetters.part")
            _check_letters(call.letters)
        case calls.ForgetLetters():
            check_name(call.job, "ForgetLetters.job")
            check_name(call.file, "ForgetLetters.file", MAX_FILE_BYTES)
        case calls.GetRequeued():
            check_name(call.job, "GetRequeued.job")
            if not 1 <= call.limit <= MAX_LETTERS:
                raise MalformedRequestError(
                    f"GetRequeued.limit: expected 1 to {MAX_LETTERS}, got {call.limit}"
                )
        case calls.Readmitted() | calls.ReturnLetters():
            where = type(call).__name__
            check_name(call.job, f"{where}.job")
            if len(call.keys) > MAX_KEYS:
                raise MalformedRequestError(
                    f"{where}.keys: expected {MAX_KEYS} at most, got {len(call.keys)}"
                )
        case calls.ListAudit():
            if not 1 <= call.limit <= MAX_SELECTED:
                raise MalformedRequestError(
                    f"ListAudit.limit: expected 1 to {MAX_SELECTED}, got {call.limit}"
                )
        case calls.Stats() | calls.ListJobs() | calls.ListStreams():
            pass


def check_envelope(envelope: Envelope) -> None:
    """Raise `MalformedRequestError` unless the envelope names a client and a sequence from 1."""
    check_name(envelope.client, "client")
    check_least(envelope.sequence, 1, "sequence")


def _check_selection(call: calls.SelectRecords) -> None:
    where = type(call).__name__
    if call.state not in LIST_STATES:
        raise MalformedRequestError(
            f"{where}.state: expected one of {', '.join(LIST_STATES)}, got {call.state!r}"
        )
    if call.stream:
        check_name(call.stream, f"{where}.stream")
    if call.group != -1:
        if not 0 <= call.group < 1 << 32:
            raise MalformedRequestError(
                f"{where}.group: expected 0 to 2^32-1, or -1 for any, got {call.group}"
            )
        if call.state != "dead" or not call.stream or call.keys:
            raise MalformedRequestError(f"{where}.group: it needs state 'dead' and a stream, and no keys")
    if call.newest and (call.state != "dead" or call.root or call.keys):
        raise MalformedRequestError(f"{where}.newest: it needs state 'dead', and neither root nor keys")
    check_least(call.since_ms, 0, f"{where}.since_ms")
    check_least(call.until_ms, 0, f"{where}.until_ms")
    for name, text in (("operator", call.operator), ("text", call.text)):
        if len(text) > MAX_SOUGHT:
            raise MalformedRequestError(
                f"{where}.{name}: expected {MAX_SOUGHT} characters at most, got {len(text)}"
            )
    if not 0 <= call.root < 1 << 64:
        raise MalformedRequestError(f"{where}.root: expected an id, or 0 for any, got {call.root}")
    most = MAX_KEYS if call.keys_only else MAX_SELECTED
    if not 1 <= call.limit <= most:
        raise MalformedRequestError(f"{where}.limit: expected 1 to {most}, got {call.limit}")
    if len(call.keys) > MAX_KEYS:
        raise MalformedRequestError(f"{where}.keys: expected {MAX_KEYS} at most, got {len(call.keys)}")


def _check_letters(letters: tuple[calls.KeptLetter, ...]) -> None:
    if len(letters) > MAX_LETTERS:
        raise MalformedRequestError(
            f"KeepLetters.letters: expected {MAX_LETTERS} at most, got {len(letters)}"
        )
    for index, letter in enumerate(letters):
        where = f"KeepLetters.letters[{index}]"
        if letter.payload.num_rows != 1:
            raise MalformedRequestError(f"{where}.payload: expected 1 row, got {letter.payload.num_rows}")
        if not letter.letter:
            raise MalformedRequestError(f"{where}.letter: it has no name")
        if not letter.attempts:
            raise MalformedRequestError(f"{where}.attempts: expected one or more, got none")


def _check_edits(call: calls.EditAndRequeue) -> None:
    check_name(call.by, "EditAndRequeue.by")
    if len(call.edits) > MAX_EDITS:
        raise MalformedRequestError(
            f"EditAndRequeue.edits: expected {MAX_EDITS} at most, got {len(call.edits)}"
        )
    keys: set[bytes] = set()
    for index, edit in enumerate(call.edits):
        where = f"EditAndRequeue.edits[{index}]"
        if edit.payload.num_rows != 1:
            raise MalformedRequestError(f"{where}.payload: expected 1 row, got {edit.payload.num_rows}")
        if edit.key in keys:
            raise MalformedRequestError(f"{where}.key: it is there twice")
        keys.add(edit.key)


def _check_streams(streams: tuple[str, ...], where: str) -> None:
    if not streams:
        raise MalformedRequestError(f"{where}: expected one name or more, got none")
    for index, stream in enumerate(streams):
        check_name(stream, f"{where}[{index}]")
        if stream in streams[:index]:
            raise MalformedRequestError(f"{where}[{index}]: {stream!r} is named twice")


def _check_failures(failures: tuple[calls.Failure, ...], where: str) -> None:
    for index, failure in enumerate(failures):
        if not 0 < failure.root < 1 << 64:
            raise MalformedRequestError(
                f"{where}[{index}].root: expected an id, 1 to 2^64-1, got {failure.root}"
            )
        if failure.after_ms is not None and not 0 <= failure.after_ms <= MAX_RETRY_LATER_MS:
            raise MalformedRequestError(
                f"{where}[{index}].after_ms: expected 0 to {MAX_RETRY_LATER_MS}, got {failure.after_ms}"
            )


def _check_range(start: int, end: int, where: str) -> None:
    check_least(start, 0, f"{where}.start")
    check_least(end, start, f"{where}.end")


def _check_batch(call: calls.BeginBatch | calls.Seal | calls.Reseal | calls.Commit) -> None:
    where = type(call).__name__
    check_name(call.query, f"{where}.query")
    check_least(call.epoch, 0, f"{where}.epoch")
    check_least(call.batch, 0, f"{where}.batch")


def _check_report(report: calls.Report, where: str) -> None:
    for index, event in enumerate(report.done):
        part = f"{where}.done[{index}]"
        check_values(event.roots, event.values, event.ids, part)
    for index, fail in enumerate(report.failed):
        _check_failures(fail.failures, f"{where}.failed[{index}].failures")


def _check_verdict(call: calls.Seal | calls.Reseal) -> None:
    where = type(call).__name__
    _check_failures(call.redelivered, f"{where}.redelivered")
    _check_failures(call.resumed, f"{where}.resumed")
    _check_report(call.report, f"{where}.report")
    for index, sealed in enumerate(call.failed):
        part = f"{where}.failed[{index}]"
        check_name(sealed.stream, f"{part}.stream")
        check_rows(len(sealed.roots), part)
        check_ids(sealed.roots, f"{part}.roots")
        check_lengths(part, len(sealed.roots), payload=sealed.payload, failures=sealed.failures)
        check_key_hashes(sealed.key_hashes, len(sealed.roots), f"{part}.key_hashes")
        for row, failure in enumerate(sealed.failures):
            if failure.root != int(sealed.roots[row]):
                raise MalformedRequestError(f"{part}.failures[{row}].root: differs from {part}.roots[{row}]")
    for index, emitted in enumerate(call.emitted):
        part = f"{where}.emitted[{index}]"
        check_name(emitted.stream, f"{part}.stream")
        check_rows(len(emitted.roots), part)
        check_ids(emitted.roots, f"{part}.roots")
        check_lengths(part, len(emitted.roots), values=emitted.values)
        check_event_ids(emitted.ids, emitted.values, f"{part}.ids")
        if emitted.payload is not None:
            check_lengths(part, len(emitted.roots), payload=emitted.payload)


# Calls and replies of the contract ↔ what msgpack can carry: `ftlayer.transport.codec` with the vertex's own types.
#
# | type | on the wire |
# | --- | --- |
# | uint64 array, shape (n,) | bin: little-endian, 8 bytes an item |
# | roots of rows | as a uint64 array, or as array [first, n]: the ids from ``first`` on |
# | int32 array, shape (n,) or (n, k) | array [k, bin]: little-endian, 4 bytes an item; k = 0 for (n,) |
# | Arrow record batch | bin: an Arrow IPC stream with exactly one batch, not compressed |
# | tuple of `Failure` | map of columns (`ftlayer.records.failure_columns`); an array of maps is taken as well |


def _unpack_batch(data: Any, where: str) -> pa.RecordBatch:
    """Read the one batch of an IPC stream; see `ftlayer.records.ipc.read_one_batch` for what is refused."""
    if not isinstance(data, bytes):
        raise malformed(where, "the bytes of an Arrow IPC stream", data)
    try:
        return read_one_batch(data)
    except UNREADABLE as error:
        raise MalformedRequestError(
            f"{where}: not a readable Arrow IPC stream ({described(error)})"
        ) from None


def _unpack_u64(value: Any, where: str) -> U64:
    if type(value) is not bytes or len(value) % 8:
        raise malformed(where, "bytes of little-endian uint64", value)
    # A copy, because kernels are compiled for writable arrays and a view of bytes is not one.
    return np.frombuffer(value, "<u8").astype(np.uint64)


def _pack_roots(roots: RowRoots) -> Any:
    return [roots.first, roots.count] if isinstance(roots, RootRange) else _pack_u64(roots)


def _unpack_roots(value: Any, where: str) -> RowRoots:
    if type(value) is not list:
        return _unpack_u64(value, where)
    if len(value) != 2 or type(value[0]) is not int or type(value[1]) is not int:
        raise malformed(where, "[first, count]", value)
    first, count = value
    if not (first > 0 and 0 <= count <= MAX_ROWS and first + count <= 1 << 64):
        raise malformed(where, f"[first, count] of ids, 1 to 2^64-1, and at most {MAX_ROWS} of them", value)
    return RootRange(first, count)


def _pack_u64(array: U64) -> bytes:
    return np.ascontiguousarray(array, "<u8").tobytes()


def _pack_i32(array: I32) -> list[Any]:
    width = 0 if array.ndim == 1 else array.shape[1]
    return [width, np.ascontiguousarray(array, "<i4").tobytes()]


def _unpack_i32(value: Any, where: str) -> I32:
    if type(value) is not list or len(value) != 2:
        raise malformed(where, "[width, bytes of little-endian int32]", value)
    width, data = value
    if type(width) is not int or not 0 <= width <= 1 << 16:
        raise malformed(f"{where}[0]", "a width of 0 to 65536", width)
    if type(data) is not bytes or len(data) % (4 * max(width, 1)):
        raise malformed(f"{where}[1]", f"bytes of little-endian int32, {max(width, 1)} a row", data)
    array = np.frombuffer(data, "<i4").astype(np.int32)
    return array.reshape(-1, width) if width else array


CODECS = Codecs(
    {
        U64: Codec(_pack_u64, _unpack_u64),
        RowRoots: Codec(_pack_roots, _unpack_roots),
        I32: Codec(_pack_i32, _unpack_i32),
        pa.RecordBatch: Codec(lambda batch: memoryview(as_stream(batch)), _unpack_batch),
    }
)


def _failures() -> Codec:
    one_by_one = list_of(CODECS.of(Failure))

    def unpack(value: Any, where: str) -> Any:
        if type(value) is not dict:
            return one_by_one.unpack(value, where)
        try:
            return tuple(Failure(*row) for row in from_columns(value))
        except ValueError as error:
            raise MalformedRequestError(f"{where}: {error}") from None

    return Codec(to_columns, unpack)


CODECS.add(tuple[Failure, ...], _failures())

dataclass_codec = CODECS.of_dataclass
"""The codec of a call, a reply or a part of one."""


PROTOCOL = 2
"""The number of this protocol: vertices and boards say it with their health."""

# These change something, but nothing that asking again would change twice.
ENVELOPED = frozenset(typing.get_args(MutatingCall)) - {Deliverable, AnnounceJob, AskJob}
READING = typing.get_args(ReadingCall)
CALLS: dict[str, type] = {
    kind.__name__: kind for kind in typing.get_args(MutatingCall) + typing.get_args(ReadingCall)
}
REPLIES: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Reply)}


# ---------------------------------------------------------------- calls


def encode_call(call: Call, envelope: Envelope | None) -> bytes:
    """Return the frame of ``call``; `MalformedRequestError` for what msgpack or UTF-8 cannot hold.

    The vertex checks the rest (`ftlayer.vertex.wire.frames`).
    """
    return frame_of(call, fields_of(call), envelope)


def fields_of(call: Call) -> dict[str, Any]:
    """Return the fields of ``call``, its batches as bytes already: the long part of writing a frame."""
    kind: type = type(call)
    fields: dict[str, Any] = dataclass_codec(kind).pack(call)
    return fields


def frame_of(call: Call, fields: dict[str, Any], envelope: Envelope | None) -> bytes:
    """Return the frame of ``call``, whose `fields_of` are known."""
    name = type(call).__name__
    frame: dict[str, Any] = {"call": name, "fields": fields}
    if envelope is not None:
        frame |= {"client": envelope.client, "sequence": envelope.sequence}
    return pack(frame, name)


def decode_call(data: bytes | pa.Buffer) -> tuple[Call, Envelope | None]:
    """Read and check a call's frame. Raises as `call_of`."""
    return call_of(open_frame(data))


def open_frame(data: bytes | pa.Buffer) -> dict[str, Any]:
    """Read a call's frame as far as its names; `call_of` reads the rest."""
    return unpack_map(data, "call", ("call", "fields"), ("client", "sequence"))


def call_of(frame: dict[str, Any]) -> tuple[Call, Envelope | None]:
    """Read and check the call in a frame.

    Raises `MalformedRequestError` naming what is wrong, `UnsupportedError` for a call that there is not.
    """
    name = frame["call"]
    if type(name) is not str:
        raise MalformedRequestError(f"call: expected the name of a call, got {name!r}")
    kind = CALLS.get(name)
    if kind is None:
        raise UnsupportedError(
            f"this vertex, or board, has no call {name!r}: its ftlayer is older than that of the caller. Start it with "
            "the newer ftlayer, or use the tools of its own"
        )
    envelope = None
    if kind in ENVELOPED:
        envelope = envelope_of(frame)
    elif "client" in frame or "sequence" in frame:
        raise MalformedRequestError(f"client: {name} has no envelope")
    call = dataclass_codec(kind).unpack(frame["fields"], name)
    check_call(call)
    return call, envelope


def envelope_of(frame: dict[str, Any]) -> Envelope:
    """Return the envelope a frame carries; `MalformedRequestError` where it lacks one."""
    client, sequence = frame.get("client"), frame.get("sequence")
    if type(client) is not str:
        raise malformed("client", "a name", client)
    if type(sequence) is not int:
        raise malformed("sequence", "an integer from 1", sequence)
    envelope = Envelope(client, sequence)
    check_envelope(envelope)
    return envelope


# ---------------------------------------------------------------- replies


def encode_reply(reply: Reply, sequence: int | None = None) -> bytes:
    kind: type = type(reply)
    frame = {"reply": kind.__name__, "fields": dataclass_codec(kind).pack(reply)}
    return pack(frame if sequence is None else frame | {"sequence": sequence}, kind.__name__)


def decode_reply(data: bytes | pa.Buffer) -> tuple[Reply | FTLayerError, int | None]:
    """Read a reply's or an error's frame, and the sequence it answers. The error is returned, not raised.

    Raises `VertexError` for bytes that no vertex of this version sends.
    """
    try:
        frame = unpack_map(data, "reply", (), ("reply", "fields", "error", "message", "sequence"))
        error = error_in(frame)
        if error is not None:
            return error, frame.get("sequence")
        kind = REPLIES[frame["reply"]]
        return dataclass_codec(kind).unpack(frame["fields"], frame["reply"]), frame.get("sequence")
    except (MalformedRequestError, KeyError, TypeError) as failure:
        raise VertexError(f"the vertex sent a reply that this client cannot read: {failure}") from failure


# ---------------------------------------------------------------- health


def encode_health(*, incarnation: int, shards: int, max_message_bytes: int, exact: bool) -> bytes:
    """Return what a vertex, or a board, answers to the action ``health``."""
    health = {
        "protocol": PROTOCOL,
        "incarnation": incarnation,
        "shards": shards,
        "max_message_bytes": max_message_bytes,
        "exact": exact,
    }
    return pack(health, "health")
