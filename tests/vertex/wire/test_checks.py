"""What the vertex refuses of calls that could be read. Nothing behind its wire checks these again."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.errors import MalformedRequestError
from ftlayer.vertex import calls
from ftlayer.vertex.calls import MAX_PAGE, MAX_ROWS, Call, Envelope, EventIds, Failure, RootRange
from ftlayer.vertex.calls.common import check_event_ids
from ftlayer.vertex.wire.frames import decode_call, encode_call

ROWS = pa.record_batch({"n": [1, 2]})
ROOTS = np.array([1, 2**64 - 1], np.uint64)
ONE, NONE, ZERO = np.array([7], np.uint64), np.array([], np.uint64), np.array([0], np.uint64)
NO = Failure(7, "no")
IDS = EventIds(ROOTS, np.array([0, 1, 2], np.int32), np.array([0, -1], np.int32), ("parse",))


def persist(**changes: Any) -> calls.Persist:
    return dataclasses.replace(calls.Persist("s", ROWS, ROOTS, ROOTS), **changes)


def sealed(**changes: Any) -> calls.SealedRows:
    row = calls.SealedRows("q/s", ROWS.slice(0, 1), ONE, (NO,))
    return dataclasses.replace(row, **changes)


def emitted(**changes: Any) -> calls.EmittedRows:
    return dataclasses.replace(calls.EmittedRows("q/s", None, ONE, ONE), **changes)


def seal(**changes: Any) -> calls.Seal:
    return dataclasses.replace(calls.Seal("q", 1, 0, {}, ()), **changes)


def too_many() -> tuple[pa.RecordBatch, calls.U64]:
    rows = MAX_ROWS + 1
    return pa.record_batch({"n": pa.nulls(rows, pa.bool_())}), np.arange(1, rows + 1, dtype=np.uint64)


def arrive(call: Call) -> Call:
    """Return what the vertex gets of a call."""
    return decode_call(encode_call(call, Envelope("me", 1) if call.enveloped else None))[0]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (persist(values=ROOTS[:1]), r"Persist\.values: expected 2 rows"),
        (persist(roots=np.zeros(2, np.uint64)), r"Persist\.roots\[0\]: 0 is never an id"),
        (persist(payload=ROWS.slice(0, 1)), r"Persist\.payload: expected 2 rows"),
        (persist(roots=RootRange(0, 2)), r"Persist\.roots: expected \[first, count\]"),
        (persist(roots=RootRange(1, -1)), r"Persist\.roots: expected \[first, count\]"),
        (persist(roots=RootRange(1, MAX_ROWS + 1)), r"Persist\.roots: expected \[first, count\]"),
        (persist(roots=RootRange(2**64 - 1, 2)), r"Persist\.roots: expected \[first, count\]"),
        (persist(roots=RootRange(5, 3)), r"Persist\.payload: expected 3 rows"),
        (persist(roots=RootRange(5, 2), values=ROOTS[:1]), r"Persist\.values: expected 2 rows"),
        (persist(values=None, ids=IDS), r"Persist\.ids: they need the values"),
        (calls.Xor(ROOTS, None, 1, ids=IDS), r"Xor\.ids: they need the values"),
        (persist(key_hashes=np.zeros(3, np.int32)), r"Persist\.key_hashes"),
        (persist(key_hashes=np.zeros((2, 0), np.int32)), r"Persist\.key_hashes"),
        (persist(stream=""), r"Persist\.stream"),
        (persist(position=calls.SourcePosition("", None, b"")), r"Persist\.position\.partition"),
        (calls.Ingest("", ROWS), r"Ingest\.stream"),
        (calls.Xor(ONE, NONE, 1), r"Xor\.values: expected 1 rows"),
        (calls.Xor(ZERO, ONE, 1), r"Xor\.roots\[0\]: 0 is never an id"),
        (calls.Touch(ZERO, 1), r"Touch\.roots\[0\]"),
        (calls.Fail((Failure(0, "no"),), 1), r"Fail\.failures\[0\]\.root"),
        (calls.TakeReplays("s", 0), r"TakeReplays\.limit"),
        (calls.ListRecords("lost"), r"ListRecords\.state"),
        (calls.ListRecords("dead", limit=MAX_PAGE + 1), r"ListRecords\.limit"),
        (calls.OpenStream("", calls.StreamOptions()), r"OpenStream\.stream"),
        (calls.Requeue((), "b" * 201), r"Requeue\.by"),
        (calls.Purge((), "a\0"), r"Purge\.by"),
        (calls.EditAndRequeue((), ""), r"EditAndRequeue\.by"),
        (
            calls.EditAndRequeue((calls.Edit(b"k", ROWS),), "me"),
            r"EditAndRequeue\.edits\[0\]\.payload: expected 1 row, got 2",
        ),
        (
            calls.EditAndRequeue((calls.Edit(b"k", ROWS.slice(0, 1)),) * 2, "me"),
            r"EditAndRequeue\.edits\[1\]\.key: it is there twice",
        ),
        (
            calls.EditAndRequeue((calls.Edit(b"k", ROWS.slice(0, 1)),) * 1_001, "me"),
            r"EditAndRequeue\.edits: expected 1000",
        ),
        (calls.ListAudit(limit=501), r"ListAudit\.limit: expected 1 to 500"),
        (calls.SelectRecords("gone"), r"SelectRecords\.state: expected one of"),
        (calls.SelectRecords("dead", stream="s" * 201), r"SelectRecords\.stream"),
        (calls.SelectRecords("dead", group=1), r"SelectRecords\.group: it needs state 'dead' and a stream"),
        (calls.SelectRecords("pending", "s", group=1), r"SelectRecords\.group: it needs state 'dead'"),
        (calls.SelectRecords("dead", "s", group=-2), r"SelectRecords\.group: expected 0"),
        (calls.SelectRecords("dead", "s", group=1 << 32), r"SelectRecords\.group: expected 0"),
        (calls.SelectRecords("waiting", newest=True), r"SelectRecords\.newest"),
        (calls.SelectRecords("dead", root=1, newest=True), r"SelectRecords\.newest"),
        (calls.SelectRecords("dead", since_ms=-1), r"SelectRecords\.since_ms: expected 0"),
        (calls.SelectRecords("dead", until_ms=1 << 63), r"SelectRecords\.until_ms: expected 0"),
        (calls.SelectRecords("dead", text="x" * 1_025), r"SelectRecords\.text: expected 1024"),
        (calls.SelectRecords("dead", root=-1), r"SelectRecords\.root"),
        (calls.SelectRecords("dead", limit=0), r"SelectRecords\.limit: expected 1 to 500"),
        (calls.SelectRecords("dead", limit=501), r"SelectRecords\.limit: expected 1 to 500"),
        (
            calls.SelectRecords("dead", limit=2_001, keys_only=True),
            r"SelectRecords\.limit: expected 1 to 2000",
        ),
        (calls.SelectRecords("dead", keys=(b"k",) * 2_001), r"SelectRecords\.keys: expected 2000"),
        (calls.DeadGroups("s" * 201), r"DeadGroups\.stream"),
        (calls.OpenQuery("", "run", ()), r"OpenQuery\.query"),
        (calls.OpenQuery("q", "run", ("q/s", "s" * 201)), r"OpenQuery\.streams\[1\]"),
        (calls.ClaimJob("", "run"), r"ClaimJob\.job"),
        (calls.ClaimJob("job", ""), r"ClaimJob\.run"),
        (calls.ClaimJob("job", "r" * 257), r"ClaimJob\.run: expected 1 to 256 bytes"),
        (calls.BeginBatch("q", 1, -1), r"BeginBatch\.batch"),
        (calls.BeginBatch("q", 1, 1 << 63), r"BeginBatch\.batch"),
        (calls.Deliverable("s", 0, 0), r"Deliverable\.max_rows"),
        (seal(failed=(sealed(failures=(Failure(6, "no"),)),)), r"failures\[0\]\.root: differs"),
        (seal(failed=(sealed(failures=()),)), r"Seal\.failed\[0\]\.failures: expected 1 rows"),
        (seal(failed=(sealed(roots=ZERO),)), r"Seal\.failed\[0\]\.roots\[0\]"),
        (seal(redelivered=(Failure(0, "no"),)), r"Seal\.redelivered\[0\]\.root"),
        (seal(resumed=(Failure(0, "no"),)), r"Seal\.resumed\[0\]\.root"),
        (seal(emitted=(emitted(values=NONE),)), r"Seal\.emitted\[0\]\.values"),
        (seal(emitted=(emitted(payload=ROWS),)), r"Seal\.emitted\[0\]\.payload"),
        (seal(report=calls.Report((calls.Xor(ROOTS, ONE, 1),))), r"report\.done\[0\]\.values"),
        (
            seal(report=calls.Report((), (calls.Fail((Failure(0, "no"),), 1),))),
            r"report\.failed\[0\]\.failures",
        ),
        (calls.Explain(0), r"Explain\.root"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_field(call: Call, named: str) -> None:
    with pytest.raises(MalformedRequestError, match=named):
        arrive(call)


def test_a_call_of_too_many_rows_is_refused() -> None:
    rows, roots = too_many()
    for call in (calls.Ingest("ingest/x", rows), calls.Persist("s", rows, roots, roots)):
        with pytest.raises(MalformedRequestError, match=f"{MAX_ROWS + 1} rows in one call; send {MAX_ROWS}"):
            arrive(call)


@pytest.mark.parametrize(
    "envelope", [Envelope("c", 0), Envelope("", 1), Envelope("c" * 300, 1), Envelope("c", 1 << 63)]
)
def test_an_envelope_that_makes_no_sense_is_refused(envelope: Envelope) -> None:
    with pytest.raises(MalformedRequestError, match=r"(client|sequence): expected"):
        decode_call(encode_call(persist(), envelope))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ids": np.array([11, 13, 21], np.uint64)}, "XOR of list 0"),
        ({"ids": np.array([11, 0, 21], np.uint64)}, r"ids\[1\]: 0 is never"),
        ({"ids": np.array([11, 12, 21], np.int64)}, "ids: expected"),
        ({"offsets": np.array([0, 3], np.int32)}, "offsets"),
        ({"offsets": np.array([0, 4, 3], np.int32)}, "offsets"),
        ({"offsets": np.array([[0, 2, 3]], np.int32)}, "offsets"),
        ({"offsets": np.array([0, 1, 3], np.int32)}, "XOR of list 0"),
        ({"owners": np.array([0, 1], np.int32)}, "owners"),
        ({"owners": np.array([0, 1, 2], np.int32)}, "owners"),
        ({"owners": np.array([0, 1, -2], np.int32)}, "owners"),
        ({"operators": ("count",)}, "owners"),
    ],
)
def test_ids_that_do_not_fit_are_refused_by_field(change: dict[str, Any], field: str) -> None:
    good = {"ids": np.array([11, 12, 21], np.uint64), "offsets": np.array([0, 2, 3], np.int32)}
    good |= {"owners": np.array([0, 1, -1], np.int32), "operators": ("count", "parse")}
    values = np.array([11 ^ 12, 21], np.uint64)
    check_event_ids(EventIds(**good), values, "ids")
    ids = EventIds(**(good | change))
    with pytest.raises(MalformedRequestError, match=field):
        check_event_ids(ids, values, "ids")


def test_ids_are_checked_wherever_they_come() -> None:
    ids = IDS
    event, handed_on = calls.Xor(ROOTS, ROOTS, 3, ids=ids), emitted(roots=ROOTS, values=ROOTS, ids=ids)
    wrong = ROOTS[[0, 0]]
    for call, spoiled in (
        (persist(ids=ids), persist(ids=ids, values=wrong)),
        (event, dataclasses.replace(event, values=wrong)),
        (seal(emitted=(handed_on,)), seal(emitted=(dataclasses.replace(handed_on, values=wrong),))),
        (
            seal(report=calls.Report((event,))),
            seal(report=calls.Report((dataclasses.replace(event, values=wrong),))),
        ),
    ):
        arrive(call)
        with pytest.raises(MalformedRequestError, match=r"ids: the XOR of list 1"):
            arrive(spoiled)
