"""Checks of decoded calls beyond their types: ids of 0, lengths that differ, empty names.

Here calls enter the vertex's process, which must not trust those who send them, and here alone they are checked:
neither does a client check what it sends, nor the service, the rules or the store what has passed. Whether a
well-formed call makes sense *now*, and on this shard, is theirs to say.
"""

from __future__ import annotations

from ftlayer.errors import MalformedRequestError
from ftlayer.failures import MAX_RETRY_LATER_MS
from ftlayer.vertex import calls
from ftlayer.vertex.calls import (
    MAX_EDITS,
    MAX_KEYS,
    MAX_LETTERS,
    MAX_PAGE,
    MAX_SELECTED,
    Call,
    Envelope,
    RootRange,
)
from ftlayer.vertex.calls.event_ids import check_event_ids
from ftlayer.vertex.wire.bounds import MAX_FILE_BYTES, MAX_NAME_BYTES, MAX_RUN_BYTES, check_least, check_name
from ftlayer.vertex.wire.job_checks import check_job_call
from ftlayer.vertex.wire.range_checks import check_note, check_range_call
from ftlayer.vertex.wire.row_checks import (
    check_ids,
    check_key_hashes,
    check_lengths,
    check_rows,
    check_values,
)

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
