"""Recall: pending rows are due again at once, under roots of their own, and no attempt is used up."""

from __future__ import annotations

import numpy as np
import pytest

from ftlayer.errors import MalformedRequestError, ProtocolError, StaleIncarnationError
from ftlayer.vertex import calls
from ftlayer.vertex.calls import Envelope


@pytest.fixture(params=["table", "exact"])
def vertex(request, kit):
    vertex = kit.Vertex(tracker=request.param)
    vertex.open(max_attempts=2)
    return vertex


def status(vertex, *streams):
    return vertex.call(calls.StreamStatusCall(streams or ("s",)))


def test_what_is_pending_is_due_in_the_same_attempt(vertex):
    vertex.persist([1, 2, 3])
    vertex.xor((2, 2))
    assert vertex.recall() == 2
    taken = vertex.take()
    assert [(origin, attempt, text) for _, origin, attempt, text in taken] == [
        (1, 1, "row 1"),
        (3, 1, "row 3"),
    ]
    assert vertex.xor(*((root, root) for root, *_ in taken)).completed == 2
    vertex.advance(200)
    assert vertex.stored("segments") == {}


def test_a_row_has_another_root_after_each_recall(vertex):
    vertex.persist([1])
    roots = {1}
    for _ in range(6):
        assert vertex.recall() == 1
        ((root, origin, attempt, _),) = vertex.take()
        assert (origin, attempt) == (1, 1)
        assert root not in roots
        assert vertex.xor(*((old, old) for old in roots)) == calls.Xored(0, len(roots))
        (listed,) = vertex.list("pending")
        assert listed.root == root
        roots.add(root)
    vertex.restart()
    ((root, *_),) = vertex.take()
    assert root not in roots
    assert vertex.xor((root, root)).completed == 1


def test_attempts_go_on_counting_from_where_they_were(vertex):
    vertex.persist([1])
    vertex.recall()
    ((root, _, attempt, _),) = vertex.take()
    assert vertex.fail(root) == calls.Failed(1, 0, 0)
    vertex.advance(100)
    ((root, _, attempt, _),) = vertex.take()
    assert attempt == 2
    vertex.recall()
    ((root, _, attempt, _),) = vertex.take()
    assert attempt == 2
    assert vertex.fail(root) == calls.Failed(0, 1, 0)


def test_what_timed_out_or_failed_before_is_left_as_it_is(vertex):
    vertex.open(timeout_ms=1_000, backoff_ms=(60_000,))
    vertex.persist([1, 2])
    vertex.fail(2)
    vertex.advance(2_000)
    vertex.persist([3])
    assert vertex.recall() == 1
    assert status(vertex) == calls.StreamStatus(0, 1, 2, 0, 0)
    assert vertex.xor((1, 1), (2, 2), (3, 3)) == calls.Xored(1, 2)  # a late completion cancels its replay
    assert status(vertex) == calls.StreamStatus(0, 1, 1, 0, 0, done=1)
    assert [origin for _, origin, *_ in vertex.take()] == [3]


def test_a_root_whose_time_is_over_and_that_no_tick_has_moved_yet_uses_up_no_attempt(vertex):
    vertex.persist([1])
    vertex.mono += 10_000
    assert vertex.recall() == 1
    vertex.tick()
    ((root, _, attempt, _),) = vertex.take()
    assert attempt == 1
    assert vertex.xor((root, root)).completed == 1
    assert status(vertex).drained


def test_streams_that_are_not_named_keep_what_they_have(vertex):
    vertex.open("other")
    vertex.open("third")
    for number, name in enumerate(("s", "other", "third")):
        vertex.persist([10 * number + 1, 10 * number + 2], stream=name)
    assert vertex.recall("s", "third") == 4
    assert status(vertex, "s", "third") == calls.StreamStatus(0, 4, 0, 0, 0)
    assert status(vertex, "other") == calls.StreamStatus(2, 0, 0, 0, -1)
    assert status(vertex, "other", "s") == calls.StreamStatus(2, 2, 0, 0, 0)
    assert vertex.xor((11, 11), (12, 12)).completed == 2


def test_events_held_for_a_registration_still_wait_for_it(vertex, kit):
    vertex.xor((5, 50), hold=True)
    vertex.persist([1])
    assert vertex.recall() == 1
    vertex.persist([5], [50])
    assert vertex.stats()["completed"] == 1


def test_room_for_max_pending_is_free_again(vertex, kit):
    vertex.open(max_pending=2)
    vertex.persist([1, 2])
    assert vertex.layer.intake_blocked(kit.persist_call([3]), vertex.now)
    vertex.recall()
    assert vertex.layer.intake_blocked(kit.persist_call([3]), vertex.now) is None
    vertex.take()
    assert vertex.layer.intake_blocked(kit.persist_call([3]), vertex.now)


def test_records_that_can_be_taken_are_counted_by_their_time(vertex):
    vertex.open(backoff_ms=(500,))
    vertex.persist([1, 2, 3])
    vertex.fail(1)
    vertex.advance(300)
    vertex.fail(2)
    vertex.recall()
    assert status(vertex) == calls.StreamStatus(0, 1, 2, 0, 0)
    vertex.take(1)
    assert status(vertex) == calls.StreamStatus(1, 0, 2, 0, 200)
    vertex.advance(200)
    assert status(vertex) == calls.StreamStatus(1, 1, 1, 0, 0)
    vertex.take()
    assert status(vertex) == calls.StreamStatus(2, 0, 1, 0, 300)


def test_more_due_records_than_are_counted_count_as_waiting(vertex, monkeypatch):
    monkeypatch.setattr("ftlayer.vertex.rules.deliveries.COUNTED_DUE", 2)
    vertex.persist([1, 2, 3])
    vertex.fail(1, 2, 3)
    vertex.advance(100)
    assert status(vertex) == calls.StreamStatus(0, 2, 1, 0, 0)


def test_sent_again_it_has_no_second_effect(vertex):
    vertex.persist([1])
    call, envelope = calls.Recall(("s",), vertex.layer.incarnation), Envelope("coordinator", 1)
    assert vertex.call(call, envelope) == calls.Recalled(1)
    ((root, *_),) = vertex.take()
    assert vertex.call(call, envelope) == calls.Recalled(1)
    assert vertex.xor((root, root)).completed == 1
    vertex.restart()
    with pytest.raises(StaleIncarnationError):
        vertex.call(call, envelope)


def test_what_is_refused_changes_nothing(vertex):
    vertex.persist([1])
    with pytest.raises(ProtocolError, match="'t' is unknown"):
        vertex.recall("s", "t")
    with pytest.raises(ProtocolError, match="'t' is unknown"):
        status(vertex, "t")
    with pytest.raises(StaleIncarnationError):
        vertex.call(calls.Recall(("s",), 7))
    with pytest.raises(MalformedRequestError, match="no changing call"):
        vertex.group(calls.StreamStatusCall(("s",)))
    assert vertex.xor((1, 1)).completed == 1


def test_rows_registered_in_the_same_transaction_are_recalled(vertex, kit):
    vertex.persist([1])
    vertex.recall()
    replies = vertex.group(
        calls.TakeReplays("s", 5), calls.Recall(("s",), vertex.layer.incarnation), calls.TakeReplays("s", 5)
    )
    first, recalled, second = replies
    assert recalled == calls.Recalled(1)
    old, new = (np.concatenate([part.roots for part in reply.batches]) for reply in (first, second))
    assert old != new
    assert vertex.xor((old[0], old[0])) == calls.Xored(0, 1)
    assert vertex.xor((new[0], new[0])).completed == 1


def test_what_was_taken_is_due_before_what_was_not(vertex):
    vertex.persist([1, 2, 3])
    vertex.persist([4, 5])
    vertex.recall()
    assert [origin for _, origin, *_ in vertex.take(2)] == [1, 2]
    vertex.persist([6])
    assert vertex.recall() == 3
    assert [origin for _, origin, *_ in vertex.take()] == [1, 2, 6, 3, 4, 5]
