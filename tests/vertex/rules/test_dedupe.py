"""Rule 5: what is kept of a client's calls, and for how long."""

from __future__ import annotations

import pytest

from ftlayer.errors import ProtocolError
from ftlayer.vertex import calls
from ftlayer.vertex.calls import Envelope
from ftlayer.vertex.rules import dedupe


@pytest.fixture
def vertex(vertex):
    vertex.open()
    return vertex


def persist(vertex, kit, sequence, client="c"):
    return vertex.call(kit.persist_call([10_000 + sequence]), Envelope(client, sequence))


def pending(vertex):
    return sorted(r.root - 10_000 for state in ("pending", "waiting") for r in vertex.list(state))


def test_a_call_that_was_overtaken_is_executed(vertex, kit):
    for sequence in (1, 4, 2):
        persist(vertex, kit, sequence)
    assert pending(vertex) == [1, 2, 4]
    for sequence in (1, 2, 3, 4):
        persist(vertex, kit, sequence)
    assert pending(vertex) == [1, 2, 3, 4]


def test_a_call_that_was_overtaken_is_executed_after_a_restart(vertex, kit):
    for sequence in (2, 5):
        persist(vertex, kit, sequence)
    vertex.restart()
    for sequence in (1, 2, 3, 5):
        persist(vertex, kit, sequence)
    assert pending(vertex) == [1, 2, 3, 5]


def test_long_ago_means_seen(vertex, kit):
    last = dedupe.REPLIES + 10
    for sequence in range(1, last + 1):
        persist(vertex, kit, sequence)
    for _ in range(2):
        for sequence in (1, 5):
            with pytest.raises(ProtocolError, match="long ago"):
                persist(vertex, kit, sequence)
        persist(vertex, kit, last)
        vertex.restart()
    assert len(pending(vertex)) == last
    stored = [key for key in vertex.stored("meta") if key.startswith(b"client/")]
    assert len(stored) <= dedupe.REPLIES + 1


def test_a_lost_transaction_does_not_count_as_seen(vertex, kit):
    call = kit.persist_call([7]), Envelope("c", 1)
    vertex.store.fail_next_commit = True
    with pytest.raises(Exception, match="disk is full"):
        vertex.group(call)
    # The service may forget to say so: the next transaction tells.
    assert vertex.group(call) == [calls.Accepted(1)]
    assert len(vertex.list("pending")) == 1


def test_skipped_numbers_are_bounded(vertex):
    for sequence in range(1, 2 * dedupe.GAPS + 10, 2):
        vertex.xor((1, 1), envelope=Envelope("c", sequence))
    with pytest.raises(ProtocolError, match="long ago"):
        vertex.xor((1, 1), envelope=Envelope("c", 2))
    assert vertex.xor((1, 1), envelope=Envelope("c", sequence - 1)).unknown == 1


def test_a_take_that_is_sent_again_hands_out_the_same_rows(vertex):
    vertex.persist([1, 2])
    vertex.fail(1, 2)
    vertex.advance(100)
    call = calls.TakeReplays("s", 1)
    first = vertex.call(call, Envelope("c", 1))
    assert vertex.call(call, Envelope("c", 1)) is first
    assert vertex.call(call, Envelope("c", 2)).batches[0].origins.tolist() == [2]
    for sequence in range(3, 10):
        vertex.call(call, Envelope("c", sequence))
    with pytest.raises(ProtocolError, match="long ago"):
        vertex.call(call, Envelope("c", 1))
    vertex.restart()
    assert len(vertex.call(call, Envelope("c", 1)).batches) == 1


def test_idle_clients_are_forgotten(vertex, kit):
    persist(vertex, kit, 1, "idle")
    vertex.advance(dedupe.IDLE_MS - 1_000)
    persist(vertex, kit, 1, "busy")
    vertex.advance(700_000)
    stored = [key for key in vertex.stored("meta") if key.startswith(b"client/")]
    assert [key[7:11] for key in stored] == [b"busy"]


def test_too_many_clients_are_forgotten(vertex, kit, monkeypatch):
    monkeypatch.setattr(dedupe, "CLIENTS", 3)
    for number in range(5):
        vertex.mono += 1
        persist(vertex, kit, number + 1, f"client {number}")
    vertex.advance(700_000)
    stored = [key for key in vertex.stored("meta") if key.startswith(b"client/")]
    assert [key[7:15] for key in stored] == [b"client 2", b"client 3", b"client 4"]
