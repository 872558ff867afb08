"""The rules of pending roots, one by one; `test_tracking_model.py` mixes them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.errors import (
    MalformedRequestError,
    ProtocolError,
    StaleIncarnationError,
    StoreFullError,
    VertexError,
)
from ftlayer.vertex import calls
from ftlayer.vertex.calls import Envelope


def test_rule_1_a_root_completes_once_when_registered_and_zero(vertex):
    vertex.open()
    vertex.persist([1, 2], [1 ^ 7, 2])
    assert vertex.xor((1, 1), (2, 2)) == calls.Xored(1, 0)
    assert vertex.xor((1, 7)) == calls.Xored(1, 0)
    assert vertex.xor((1, 7)) == calls.Xored(0, 1)
    vertex.advance(200)
    assert vertex.counts() == {"pending": 0, "waiting": 0, "delivery": 0, "dead": 0}
    assert vertex.stored("segments") == {}


def test_rule_1_only_held_events_wait_for_their_registration(vertex):
    vertex.open()
    vertex.xor((5, 5), hold=True)
    vertex.xor((6, 6))
    vertex.persist([5, 6])
    assert [record.root for record in vertex.list("pending")] == [6]


def test_rule_1_held_events_are_dropped_after_two_timeouts(vertex):
    vertex.open(timeout_ms=1_000)
    vertex.xor((5, 5), hold=True)
    vertex.advance(1_999, ticks=5)
    assert vertex.stats()["orphans"] == 1
    vertex.advance(1_005, ticks=5)
    assert vertex.stats()["orphans"] == 0
    vertex.persist([5])
    assert len(vertex.list("pending")) == 1


def test_rule_2_a_root_without_receivers_completes_at_registration(vertex):
    vertex.open()
    vertex.persist([9], [0])
    assert vertex.stats()["completed"] == 1
    assert vertex.list("pending") == []


def test_rule_5_a_call_sent_again_has_its_effect_once(vertex, kit):
    vertex.open()
    call = kit.persist_call([1])
    first = vertex.call(call, Envelope("c", 1))
    assert vertex.call(call, Envelope("c", 1)) == first
    vertex.restart()
    assert vertex.call(call, Envelope("c", 1)) == first
    assert len(vertex.take()) == 1


def test_rule_5_twice_in_one_group(vertex, kit):
    vertex.open()
    call = kit.persist_call([1])
    assert vertex.group((call, Envelope("c", 1)), (call, Envelope("c", 1))) == [calls.Accepted(1)] * 2
    assert len(vertex.list("pending")) == 1


def test_rule_5_an_xor_sent_again_is_not_folded_again(vertex):
    vertex.open()
    vertex.persist([1], [6])
    vertex.xor((1, 4), envelope=Envelope("c", 1))
    vertex.xor((1, 4), envelope=Envelope("c", 1))
    assert vertex.xor((1, 2), envelope=Envelope("c", 2)).completed == 1


def test_rule_5_events_for_another_incarnation_are_refused(vertex, kit):
    vertex.open()
    vertex.persist([1])
    old = vertex.layer.incarnation
    vertex.restart()
    ids = kit.u64([1])
    for call in (calls.Xor(ids, ids, old), calls.Touch(ids, old), calls.Fail((calls.Failure(1, "x"),), old)):
        with pytest.raises(StaleIncarnationError):
            vertex.call(call)


def test_rule_6_persisted_rows_outlive_the_vertex(vertex):
    vertex.open()
    vertex.persist([1, 2])
    vertex.restart()
    assert [row[1:] for row in vertex.take()] == [(1, 1, "row 1"), (2, 1, "row 2")]


def test_rule_6_offsets_advance_without_gaps(vertex):
    vertex.open()
    position = calls.SourcePosition
    vertex.persist([1], position=position("p", None, b"1"))
    vertex.persist([2], position=position("p", b"1", b"2"))
    assert vertex.persist([2], position=position("p", b"1", b"2")) == calls.Accepted(1)
    for start in (None, b"1", b"3"):
        with pytest.raises(ProtocolError, match="b'2'"):
            vertex.persist([3], position=position("p", start, b"4"))
    assert vertex.open().positions == {"p": b"2"}
    assert len(vertex.list("pending")) == 2


def test_rule_7_late_events_of_a_failed_root_are_ignored(vertex):
    vertex.open()
    vertex.persist([1])
    assert vertex.fail(1) == calls.Failed(1, 0, 0)
    assert vertex.xor((1, 1)) == calls.Xored(0, 1)
    assert vertex.counts()["waiting"] == 1


def test_rule_7_a_late_completion_cancels_the_replay_of_a_timed_out_root(vertex):
    vertex.open()
    vertex.persist([1, 2])
    vertex.advance(3_000)
    assert vertex.counts()["waiting"] == 2
    assert vertex.xor((1, 1)) == calls.Xored(1, 0)
    assert vertex.counts()["waiting"] == 1
    vertex.advance(1_000)
    assert [row[1] for row in vertex.take()] == [2]
    assert vertex.xor((2, 2)) == calls.Xored(0, 1)
    assert vertex.stats()["cancelled_replays"] == 1


def test_rule_7_a_cancelled_replay_is_not_due(vertex):
    vertex.open(backoff_ms=(0,))
    vertex.persist([1])
    vertex.advance(3_000)
    vertex.open(backoff_ms=(60_000,))
    vertex.persist([2])
    vertex.fail(2)
    vertex.xor((1, 1))
    status = vertex.call(calls.StreamStatusCall(("s",)))
    assert (status.due, status.waiting, status.next_due_in_ms) == (0, 1, 60_000)


def test_rule_7_a_cancelled_replay_stays_cancelled_over_a_restart(vertex):
    vertex.open()
    vertex.persist([1])
    vertex.advance(3_000)
    vertex.xor((1, 1))
    vertex.advance(200)
    vertex.restart()
    vertex.advance(1_000)
    assert vertex.take() == []
    assert vertex.counts() == {"pending": 0, "waiting": 0, "delivery": 0, "dead": 0}


def test_rule_8_a_root_expires_between_its_timeout_and_the_bound(vertex):
    vertex.open(timeout_ms=1_000)
    vertex.persist([1])
    vertex.advance(999, ticks=9)
    assert vertex.counts()["pending"] == 1
    vertex.advance(501, ticks=3)
    assert vertex.counts() == {"pending": 0, "waiting": 1, "delivery": 0, "dead": 0}


def test_rule_8_touch_starts_the_time_again(vertex, kit):
    vertex.open(timeout_ms=1_000)
    vertex.open("other", timeout_ms=5_000)
    vertex.persist([1, 2])
    vertex.persist([3], stream="other")
    vertex.advance(900)
    assert vertex.call(calls.Touch(kit.u64([1, 3, 99]), vertex.layer.incarnation)) == calls.Touched(2)
    vertex.advance(990, ticks=3)
    assert sorted(record.root for record in vertex.list("pending")) == [1, 3]
    vertex.advance(600)
    assert [record.root for record in vertex.list("pending")] == [3]


def test_rule_8_the_layer_says_when_to_tick(vertex):
    vertex.open(timeout_ms=1_000)
    vertex.persist([1])
    due = vertex.layer.next_tick_ms(vertex.now)
    assert vertex.mono + 1_000 <= due <= vertex.mono + 1_500
    vertex.advance(due - vertex.mono)
    assert vertex.counts()["waiting"] == 1


def test_rule_9_attempts_and_history_survive_a_restart(vertex):
    vertex.open(max_attempts=3)
    vertex.persist([1])
    vertex.fail(1)
    vertex.restart()
    vertex.advance(100)
    ((root, origin, attempt, text),) = vertex.take()
    assert (origin, attempt, text) == (1, 2, "row 1")
    assert root != 1
    vertex.fail(root, traceback="trace")
    vertex.restart()
    (record,) = vertex.list("waiting")
    assert record.attempt == 3
    assert [(entry.reason, entry.operator) for entry in record.history] == [("broken", "op")] * 2
    assert record.traceback == "trace"
    vertex.advance(100)
    ((root, _, _, _),) = vertex.take()
    assert vertex.fail(root) == calls.Failed(0, 1, 0)
    vertex.restart()
    (dead,) = vertex.list("dead")
    assert (dead.origin, dead.attempt, len(dead.history)) == (1, 3, 3)


def test_rule_9_the_loss_of_the_vertex_uses_up_no_attempt(vertex):
    vertex.open(max_attempts=2)
    vertex.persist([1])
    roots = {1}
    for _ in range(5):
        vertex.restart()
        ((root, origin, attempt, _),) = vertex.take()
        assert (origin, attempt) == (1, 1)
        assert root not in roots
        roots.add(root)
    assert vertex.xor((root, root)).completed == 1


def test_rule_9_a_replay_is_not_given_before_its_time(vertex):
    vertex.open(backoff_ms=(500, 2_000))
    vertex.persist([1])
    vertex.fail(1)
    vertex.advance(499)
    assert vertex.take() == []
    vertex.advance(1)
    ((root, *_),) = vertex.take()
    assert vertex.take() == []
    vertex.fail(root)
    vertex.advance(1_999)
    assert vertex.take() == []
    vertex.advance(1)
    assert len(vertex.take()) == 1


def test_rule_9_a_wall_clock_that_is_set_back_delays_a_replay_by_one_pause_at_most(vertex):
    vertex.open(backoff_ms=(500,))
    vertex.persist([1])
    vertex.fail(1)
    vertex.wall -= 86_400_000
    assert len(vertex.take()) == 1


def test_rule_10_a_dead_letter_appears_once_and_can_be_requeued_and_purged(vertex):
    vertex.open(max_attempts=1)
    vertex.persist([1, 2])
    assert vertex.fail(1, 2, 2) == calls.Failed(0, 2, 1)
    one, two = vertex.list("dead")
    assert vertex.call(calls.Requeue((one.key, one.key, b"nonsense"))) == calls.Changed(1)
    ((root, origin, attempt, _),) = vertex.take()
    assert (origin, attempt) == (one.origin, 1)
    assert vertex.call(calls.Purge((two.key, one.key))) == calls.Changed(1)
    assert vertex.list("dead") == []
    vertex.fail(root)
    (again,) = vertex.list("dead")
    assert len(again.history) == 2


def test_rule_10_a_fatal_failure_is_dead_at_once(vertex):
    vertex.open()
    vertex.persist([1])
    assert vertex.fail(1, fatal=True) == calls.Failed(0, 1, 0)


def test_rule_11_intake_waits_at_max_pending_and_replays_do_not(vertex, kit):
    vertex.open(max_pending=3)
    vertex.persist([1, 2])
    assert vertex.layer.intake_blocked(kit.persist_call([3]), vertex.now) is None
    assert "max_pending" in vertex.layer.intake_blocked(kit.persist_call([3, 4]), vertex.now)
    vertex.fail(1, 2)
    vertex.persist([3, 4, 5])
    vertex.advance(100)
    assert len(vertex.take()) == 2
    with pytest.raises(ProtocolError, match="max_pending"):
        vertex.persist([6, 7, 8, 9])


def test_rule_11_calls_of_one_group_count(vertex, kit):
    vertex.open(max_pending=3)
    with vertex.store.write(intake=True) as txn:
        outcome = vertex.layer.apply(txn, kit.persist_call([1, 2]), None, vertex.now)
        assert vertex.layer.intake_blocked(kit.persist_call([3, 4]), vertex.now) is not None
        assert vertex.layer.intake_blocked(kit.persist_call([3]), vertex.now) is None
    outcome.after()
    assert vertex.layer.intake_blocked(kit.persist_call([3, 4]), vertex.now) is not None


def test_rule_11_a_full_store_stops_intake_alone(vertex, kit):
    vertex.open()
    vertex.persist([1])
    vertex.store.share = 0.9
    assert "90%" in vertex.layer.intake_blocked(kit.persist_call([2]), vertex.now)
    assert vertex.layer.intake_blocked(calls.Fail((), 1), vertex.now) is None
    assert vertex.xor((1, 1)).completed == 1


def test_a_lost_intake_transaction_leaves_no_trace(vertex, kit):
    vertex.open(max_pending=2)
    vertex.store.fail_next_commit = True
    call = (kit.persist_call([1, 2]), Envelope("c", 1))
    with pytest.raises(StoreFullError):
        vertex.group(call)
    vertex.layer.lost()
    assert vertex.layer.intake_blocked(kit.persist_call([3, 4]), vertex.now) is None
    assert vertex.counts()["pending"] == 0
    assert vertex.group(call) == [calls.Accepted(2)]
    assert vertex.xor((1, 1), (2, 2)).completed == 2


def test_a_lost_transaction_of_another_call_breaks_the_object(vertex):
    vertex.open()
    vertex.persist([1])
    vertex.store.fail_next_commit = True
    with pytest.raises(StoreFullError):
        vertex.fail(1)
    with pytest.raises(VertexError, match="recover"):
        vertex.layer.lost()
    with pytest.raises(VertexError, match="recover"):
        vertex.xor((1, 1))
    vertex.restart()
    assert len(vertex.take()) == 1


def test_two_fails_and_an_xor_of_one_root_in_one_group(vertex, kit):
    vertex.open()
    vertex.persist([1, 2])
    incarnation = vertex.layer.incarnation
    fail = calls.Fail((calls.Failure(1, "x"),), incarnation)
    xor = calls.Xor(kit.u64([1, 2]), kit.u64([1, 2]), incarnation)
    assert vertex.group(fail, fail, xor, calls.Fail((calls.Failure(2, "x"),), incarnation)) == [
        calls.Failed(1, 0, 0),
        calls.Failed(0, 0, 1),
        calls.Xored(1, 1),
        calls.Failed(0, 0, 1),
    ]
    assert vertex.counts() == {"pending": 0, "waiting": 1, "delivery": 0, "dead": 0}


def test_a_root_that_is_pending_already_is_replayed_under_one_of_its_own(vertex):
    vertex.open()
    vertex.persist([1])
    vertex.persist([1, 2, 2])
    assert vertex.xor((1, 1), (2, 2)).completed == 2
    rows = vertex.take()
    assert sorted(row[1] for row in rows) == [1, 2]
    assert vertex.xor(*((row[0], row[0]) for row in rows)).completed == 2
    vertex.advance(200)
    assert vertex.stored("segments") == {}


@pytest.mark.parametrize(
    ("column", "hashes"),
    [
        (pa.array(["a", "b", None]), np.array([1, 2, 3], np.int32)),
        (pa.array(["a", "b", "a"]).dictionary_encode(), np.array([[1, 4], [2, 5], [3, 6]], np.int32)),
        (pa.array([["x"], [], ["y", "z"]]), None),
        (pa.array([{"a": 1}, None, {"a": 3}]), np.empty((3, 0), np.int32)),
        (pa.array(["a", "b" * 20, "c"], pa.string_view()), None),
    ],
)
def test_payload_and_key_hashes_come_back_as_they_were(vertex, kit, column, hashes):
    vertex.open()
    batch = pa.record_batch({"v": column})
    ids = kit.u64([1, 2, 3])
    vertex.call(calls.Persist("s", batch, ids, ids, hashes))
    vertex.fail(3, 1)
    vertex.advance(100)
    vertex.restart()
    found = {}
    for part in vertex.call(calls.TakeReplays("s", 10)).batches:
        for row, origin in enumerate(part.origins.tolist()):
            key_hash = None if part.key_hashes is None else part.key_hashes[row].tolist()
            found[origin] = part.payload.column(0)[row].as_py(), key_hash
    expected = {i + 1: (column[i].as_py(), None if hashes is None else hashes[i].tolist()) for i in range(3)}
    assert found == expected


def test_a_timeout_that_cannot_be_cut_into_buckets_is_refused(vertex):
    with pytest.raises(MalformedRequestError, match="timeout_ms: expected at least 2 ms"):
        vertex.call(calls.OpenStream("t", calls.StreamOptions(timeout_ms=1)))


def test_records_of_a_stream_that_was_never_opened_are_refused(vertex):
    with pytest.raises(ProtocolError, match="unknown"):
        vertex.persist([1], stream="never opened")
