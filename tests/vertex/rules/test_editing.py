"""Edited dead letters, and the audit log of every change."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ftlayer.errors import MalformedRequestError, ProtocolError, StoreFullError
from ftlayer.vertex import calls
from ftlayer.vertex.calls import AuditEntry, Edit, EditAndRequeue, ListAudit, Purge, Requeue
from ftlayer.vertex.rules import audit

SCHEMA = pa.schema([pa.field("name", pa.string()), pa.field("price", pa.float64(), nullable=False)])


def row(name: str | None, price: float | None) -> pa.RecordBatch:
    columns = [pa.array([name], pa.string()), pa.array([price], pa.float64())]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


@pytest.fixture
def letters(vertex: Any, kit: Any) -> Any:
    """A vertex with three dead letters of a query's source; the keys of the first two rows are hashed."""
    vertex.open("orders/lines", max_attempts=1)
    payload = pa.concat_tables(
        [pa.Table.from_batches([row(name, 1.0)]) for name in ("a", "b", "c")]
    ).combine_chunks()
    roots = kit.u64([1, 2, 3])
    vertex.call(
        calls.Persist(
            "orders/lines", payload.to_batches()[0], roots, roots, kit.u64([7, 8, 9]).astype("int32")
        )
    )
    traceback = "Traceback\n" + "  a long frame\n" * 40 + "ValueError: no"
    failures = tuple(calls.Failure(root, "no", "parse", traceback) for root in (1, 2, 3))
    vertex.call(calls.Fail(failures, vertex.layer.incarnation))
    return vertex


def keys(vertex: Any) -> list[bytes]:
    return [letter.key for letter in vertex.list("dead")]


def log(vertex: Any) -> list[tuple[str, str, str, int, str]]:
    """Return the lines of the audit log without times, oldest first."""
    entries = vertex.call(ListAudit()).entries
    return [(e.who, e.what, e.which, e.count, e.outcome) for e in reversed(entries)]


def test_an_edited_letter_is_tried_again_with_its_new_payload_and_its_history(letters: Any) -> None:
    first, *others = keys(letters)
    assert letters.call(EditAndRequeue((Edit(first, row("A", 2.5)),), "anna")) == calls.Changed(1)
    (waiting,) = letters.list("waiting")
    assert waiting.payload.to_pylist() == [{"name": "A", "price": 2.5}]
    assert (waiting.attempt, waiting.origin, waiting.reason) == (1, 1, "no")
    assert (waiting.edited_by, waiting.edited_ms) == ("anna", letters.wall)
    assert waiting.traceback.endswith("ValueError: no")
    assert keys(letters) == others
    (batch,) = letters.call(calls.TakeReplays("orders/lines", 10)).batches
    assert (batch.edited, batch.payload.to_pylist(), batch.key_hashes.tolist()) == (
        True,
        [{"name": "A", "price": 2.5}],
        [7],
    )
    # That it was edited stays known, while it is pending, over a restart, and when it fails again.
    (pending,) = letters.list("pending")
    assert pending.edited_by == "anna"
    letters.restart()
    (batch,) = letters.call(calls.TakeReplays("orders/lines", 10)).batches
    assert batch.edited
    failure = calls.Failure(int(batch.roots[0]), "still no", "parse")
    letters.call(calls.Fail((failure,), letters.layer.incarnation))
    again = next(letter for letter in letters.list("dead") if letter.edited_by)
    assert [each.reason for each in again.history] == ["no", "still no"]
    assert [(each.requeued_ms, each.requeued_by) for each in again.history] == [
        (again.edited_ms, "anna"),
        (0, ""),
    ]
    assert again.payload.to_pylist() == [{"name": "A", "price": 2.5}]


def test_each_time_that_a_letter_was_requeued_stays_in_its_history(letters: Any) -> None:
    key = keys(letters)[0]
    times = []
    for who in ("anna", "bert"):
        letters.call(Requeue((key,), who))
        times.append((letters.wall, who))
        letters.restart()
        (batch,) = letters.call(calls.TakeReplays("orders/lines", 10)).batches
        letters.wall += 1_000
        letters.call(calls.Fail((calls.Failure(int(batch.roots[0]), "no"),), letters.layer.incarnation))
        key = next(letter.key for letter in letters.list("dead") if len(letter.history) > 1)
    (again,) = (letter for letter in letters.list("dead") if letter.key == key)
    found = [(each.number, each.requeued_ms, each.requeued_by) for each in again.history]
    assert found == [(1, *times[0]), (2, *times[1]), (3, 0, "")]


def test_edited_and_other_records_do_not_share_a_batch(letters: Any) -> None:
    first, second, _ = keys(letters)
    letters.call(EditAndRequeue((Edit(first, row("A", 2.5)),), "anna"))
    letters.call(Requeue((second,), "bert"))
    batches = letters.call(calls.TakeReplays("orders/lines", 10)).batches
    assert sorted((batch.edited, batch.payload.column("name").to_pylist()) for batch in batches) == [
        (False, ["b"]),
        (True, ["A"]),
    ]


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (pa.record_batch({"name": ["A"]}), r"edits\[1\]\.payload: column 1 has to be 'price' \(double\)"),
        (pa.record_batch({"price": [1.0], "name": ["A"]}), r"column 0 has to be 'name' \(string\)"),
        (pa.record_batch({"name": ["A"], "price": [1]}), r"column 'price' is int64, the letter's is double"),
        (pa.record_batch({"name": ["A"], "price": [1.0], "x": [1]}), r"the letter has no column 'x'"),
        (
            pa.record_batch({"name": ["A"], "price": pa.array([None], pa.float64())}),
            r"column 'price' is null, and the letter's takes no null",
        ),
    ],
)
def test_an_edit_of_another_shape_changes_nothing(letters: Any, payload: pa.RecordBatch, named: str) -> None:
    first, second, _ = keys(letters)
    with pytest.raises(MalformedRequestError, match=named):
        letters.call(EditAndRequeue((Edit(first, row("A", 2.0)), Edit(second, payload)), "anna"))
    assert len(keys(letters)) == 3
    assert letters.call(ListAudit()).entries == ()


def test_metadata_of_an_edit_is_that_of_the_letter(letters: Any) -> None:
    plain = pa.record_batch({"name": ["A"], "price": [2.0]}).replace_schema_metadata({"made by": "a tool"})
    letters.call(EditAndRequeue((Edit(keys(letters)[0], plain),), "anna"))
    (waiting,) = letters.list("waiting")
    assert waiting.payload.schema.equals(SCHEMA, check_metadata=True)


def test_a_purge_that_changed_nothing_says_what_it_was_of(letters: Any) -> None:
    gone = keys(letters)
    letters.call(calls.Purge(tuple(gone), "anna"))
    letters.call(calls.Purge((gone[0],), "bert"))
    letters.call(calls.Requeue((*gone, bytes(20)), "bert"))
    shown = ", ".join(key.hex() for key in gone)
    assert log(letters)[1:] == [
        ("bert", "purge", f"key {gone[0].hex()}", 0, "done; 1 of 1 were gone"),
        ("bert", "requeue", f"keys {shown} and 1 more", 0, "done; 4 of 4 were gone"),
    ]


def test_an_edit_of_a_letter_that_is_gone_is_passed_over(letters: Any) -> None:
    first, second, _ = keys(letters)
    letters.call(Purge((first,), "bert"))
    edits = (Edit(first, row("A", 2.0)), Edit(second, row("B", 2.0)))
    assert letters.call(EditAndRequeue(edits, "anna")) == calls.Changed(1)
    assert log(letters)[-1] == ("anna", "edit", "orders/lines: 0000000000000002", 1, "done; 1 of 2 were gone")


def test_a_store_that_takes_nothing_in_takes_no_edits(letters: Any) -> None:
    letters.store.share = 0.92
    with pytest.raises(ProtocolError, match="the store has used 92%"):
        letters.call(EditAndRequeue((Edit(keys(letters)[0], row("A", 2.0)),), "anna"))
    assert len(keys(letters)) == 3


def test_every_change_has_its_line(letters: Any) -> None:
    first, second, third = keys(letters)
    letters.call(Requeue((first, second), "anna"))
    letters.call(Purge((third, first), "bert"))
    letters.call(Purge((), "bert"))
    assert log(letters) == [
        ("anna", "requeue", "orders/lines: 0000000000000001, 0000000000000002", 2, "done"),
        ("bert", "purge", "orders/lines: 0000000000000003", 1, "done; 1 of 2 were gone"),
    ]


def test_a_line_comes_with_its_change_or_not_at_all(letters: Any) -> None:
    letters.store.fail_next_commit = True
    with pytest.raises(StoreFullError):
        letters.call(Purge(tuple(keys(letters)), "bert"))
    letters.restart()
    assert len(keys(letters)) == 3
    assert letters.call(ListAudit()).entries == ()


def test_orders_have_a_line_when_they_are_asked_and_one_when_they_end(vertex: Any) -> None:
    job = calls.JobDetails(
        "orders", "orders", calls.JobKind.TOPOLOGY, "run-1", "barrier", "running", False, 1, 2
    )
    order = calls.JobOrder("o-1", "orders", "run-1", calls.OrderAction.SAVEPOINT, "anna", 3)
    vertex.call(calls.AnnounceJob(job))
    vertex.call(calls.AskJob(order))
    vertex.call(calls.AskJob(order))
    for state in (calls.OrderState.TAKEN, calls.OrderState.DONE, calls.OrderState.DONE):
        vertex.call(calls.AnnounceJob(job, (calls.OrderAnswer("o-1", state, "/savepoints/1", 4),)))
    assert log(vertex) == [
        ("anna", "savepoint", "orders, run run-1", 1, "asked"),
        ("anna", "savepoint", "orders, run run-1", 1, "done: /savepoints/1"),
    ]


def test_the_log_is_read_from_the_latest_on_page_by_page(letters: Any) -> None:
    for name in "abcdefg":
        letters.call(Requeue((b"no such key",), name))
        if name == "c":
            letters.advance(10)
    found: list[AuditEntry] = []
    after = b""
    while not found or after:
        page = letters.call(ListAudit(after, 3))
        found += page.entries
        after = page.more
    assert [entry.who for entry in found] == list("gfedcba")
    assert [entry.at_ms for entry in found] == [letters.wall] * 4 + [letters.wall - 10] * 3


def test_old_lines_go(letters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "KEEP", 5)
    for number in range(8):
        letters.call(Requeue((b"no such key",), f"n-{number}"))
        letters.advance(1_000)
    letters.advance(60_000)
    assert [line[0] for line in log(letters)] == ["n-3", "n-4", "n-5", "n-6", "n-7"]
    letters.advance(audit.KEEP_MS - 61_500)
    assert [line[0] for line in log(letters)] == ["n-7"]


def test_a_query_gets_an_edited_record_with_its_next_batch(vertex: Any, kit: Any) -> None:
    clicks, payload = "ingest/clicks", pa.record_batch({"v": ["a", "b"]})
    epoch = vertex.call(calls.OpenQuery("q", "run", (clicks,))).epoch
    vertex.call(calls.Ingest(clicks, payload))
    first = vertex.call(calls.ReadDeliveries(clicks, 0, 2)).batches[0]
    failure = calls.Failure(int(first.roots[0]), "no", "clean", fatal=True)
    vertex.call(calls.BeginBatch("q", epoch, 0))
    vertex.call(calls.Seal("q", epoch, 0, {clicks: (0, 2)}, redelivered=(failure,)))
    vertex.call(calls.Commit("q", epoch, 0))
    (letter,) = vertex.list("dead")
    vertex.call(EditAndRequeue((Edit(letter.key, pa.record_batch({"v": ["A"]})),), "anna"))
    assert vertex.call(calls.Deliverable(clicks, 2, 10)).end == 3
    (again,) = vertex.call(calls.ReadDeliveries(clicks, 2, 3)).batches
    assert (again.payload.to_pylist(), again.origins.tolist()) == ([{"v": "A"}], [int(first.origins[0])])
    (listed,) = vertex.list("delivery")
    assert (listed.edited_by, listed.title) == ("anna", "q")
    assert log(vertex)[-1][:4] == ("anna", "edit", f"q/ingest/clicks: {letter.origin:016x}", 1)


def test_many_letters_are_named_by_their_operators_in_the_log(vertex: Any) -> None:
    vertex.open(max_attempts=1)
    roots = list(range(1, 31))
    vertex.persist(roots)
    failures = tuple(
        calls.Failure(root, f"secret {root}", "parse" if root <= 20 else "map-1") for root in roots
    )
    vertex.call(calls.Fail(failures, vertex.layer.incarnation))
    vertex.call(calls.Purge(tuple(keys(vertex)), "anna"))
    ((who, what, which, count, _),) = log(vertex)
    assert (who, what, which, count) == ("anna", "purge", "s/s: 10 of map-1, 20 of parse", 30)
