"""A shard's shell: groups, holding back, running beside a sync, and what a lost transaction means."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.errors import (
    FTLayerError,
    IntakeTimeoutError,
    ProtocolError,
    StaleIncarnationError,
    StoreError,
    VertexUnavailableError,
)
from ftlayer.vertex.calls import (
    Accepted,
    Call,
    Envelope,
    Fail,
    Failed,
    Failure,
    ListRecords,
    Persist,
    RecordList,
    Register,
    RowRange,
    SourcePosition,
    Stats,
    StatsReply,
    StreamOpened,
    TakeOver,
    Xor,
    Xored,
)
from ftlayer.vertex.rules.layer import FTLayerCore
from ftlayer.vertex.rules.state import LayerOptions
from ftlayer.vertex.service.shard import Shard, ShardParts

STREAM = "job/source"


class Caller:
    """Submits calls under numbers of its own and collects the answers."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.sequence = 0

    def start(self, call: Call) -> queue.SimpleQueue[Any]:
        self.sequence += 1
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        reading = isinstance(call, (Stats, ListRecords))
        self.shard.submit(call, None if reading else Envelope("me", self.sequence), answers.put)
        return answers

    def call(self, call: Call) -> Any:
        return self.start(call).get(timeout=600)


@pytest.fixture
def faults() -> list[Exception]:
    return []


@pytest.fixture
def caller(parts: ShardParts, faults: list[Exception], store: Any) -> Iterator[Caller]:
    shard = Shard(parts, "shard-000", faults.append)
    yield Caller(shard)
    store.may_commit.set()
    shard.close()


@pytest.fixture
def opened(caller: Caller, open_stream: Callable[..., Any]) -> StreamOpened:
    reply = caller.call(open_stream(max_pending=25))
    assert isinstance(reply, StreamOpened)
    return reply


def test_calls_that_wait_become_one_transaction(
    caller: Caller, opened: Any, batches: Any, store: Any
) -> None:
    store.may_commit.clear()
    first = caller.start(batches.persist(1))
    while not store.commits_waiting.acquire(timeout=600):
        raise AssertionError("no commit")
    others = [caller.start(batches.persist(1)) for _ in range(10)]
    drain(store)
    store.may_commit.set()
    assert [answers.get(timeout=600) for answers in [first, *others]] == [Accepted(1)] * 11
    assert drain(store) <= 3  # one group, and ticks


def drain(store: Any) -> int:
    count = 0
    while store.commits_waiting.acquire(blocking=False):
        count += 1
    return count


def test_xor_does_not_wait_for_a_sync(caller: Caller, opened: Any, batches: Any, store: Any) -> None:
    root = batches.persist(1)
    assert caller.call(root) == Accepted(1)
    drain(store)
    store.may_commit.clear()
    other = batches.persist(1)
    answers = caller.start(other)
    assert store.commits_waiting.acquire(timeout=600)
    assert caller.call(batches.xor(root, opened.incarnation)) == Xored(1, 0)
    # A root that is not answered for yet is not known yet either.
    assert caller.call(batches.xor(other, opened.incarnation)) == Xored(0, 1)
    store.may_commit.set()
    assert answers.get(timeout=600) == Accepted(1)
    assert caller.call(batches.xor(other, opened.incarnation)) == Xored(1, 0)


def test_xors_during_a_failing_transaction_are_not_lost(
    caller: Caller, opened: Any, batches: Any, store: Any
) -> None:
    root = batches.persist(1)
    assert caller.call(root) == Accepted(1)
    drain(store)
    store.may_commit.clear()
    refused = caller.start(batches.persist(1))
    assert store.commits_waiting.acquire(timeout=600)
    assert caller.call(batches.xor(root, opened.incarnation)) == Xored(1, 0)
    store.fail_next = 1
    store.may_commit.set()
    assert isinstance(refused.get(timeout=600), StoreError)
    again = batches.persist(1)
    assert caller.call(again) == Accepted(1)
    assert caller.call(batches.xor(again, opened.incarnation)) == Xored(1, 0)
    stats = caller.call(Stats())
    assert (stats.values["completed"], stats.values["pending"]) == (2, 0)


def test_a_lost_transaction_of_intake_changes_nothing(
    caller: Caller, opened: Any, batches: Any, store: Any
) -> None:
    call = batches.persist(1)
    store.fail_next = 1
    assert isinstance(caller.call(call), StoreError)
    assert caller.call(call) == Accepted(1)
    assert caller.shard.incarnation == opened.incarnation


def test_another_lost_transaction_means_new_rules_from_the_store(
    caller: Caller, opened: Any, batches: Any, store: Any
) -> None:
    call = batches.persist(1)
    assert caller.call(call) == Accepted(1)
    fail = Fail((Failure(int(call.roots[0]), "why"),), opened.incarnation)
    store.fail_next = 1
    assert isinstance(caller.call(fail), StoreError)
    # The transaction was lost: the record is recovered and waits for its replay under a new root.
    assert isinstance(caller.call(fail), StaleIncarnationError)
    stats = caller.call(Stats())
    assert isinstance(stats, StatsReply)
    assert stats.values["recovered"] == 1
    assert caller.shard.incarnation == opened.incarnation + 1


def test_a_shard_that_cannot_recover_says_so_and_refuses(
    parts: ShardParts, faults: list[Exception], store: Any, batches: Any, open_stream: Callable[..., Any]
) -> None:
    broken: list[bool] = []

    def make_layer(opened: Any, now: Any) -> FTLayerCore:
        if broken:
            raise StoreError("damaged")
        return parts.make_layer(opened, now)

    shard = Shard(dataclasses.replace(parts, make_layer=make_layer), "shard-000", faults.append)
    caller = Caller(shard)
    caller.call(open_stream())
    broken.append(True)
    store.fail_next = 1
    assert isinstance(caller.call(open_stream(timeout_ms=5)), StoreError)
    shard.close()
    assert [str(fault) for fault in faults] == ["damaged"]
    assert isinstance(caller.call(batches.persist()), VertexUnavailableError)


def test_a_fault_in_the_rules_is_answered_and_recovered_from(
    parts: ShardParts, faults: list[Exception], batches: Any, open_stream: Callable[..., Any]
) -> None:
    class Faulty(FTLayerCore):
        def apply(self, txn: Any, call: Any, envelope: Any, now: Any) -> Any:
            if isinstance(call, (Persist, Xor, Fail)) and 666 in getattr(call, "roots", [666]):
                raise ZeroDivisionError("a bug")
            return super().apply(txn, call, envelope, now)

    def make_layer(opened: Any, now: Any) -> FTLayerCore:
        return Faulty(opened, LayerOptions(flush_ms=parts.flush_ms), now)

    shard = Shard(dataclasses.replace(parts, make_layer=make_layer), "shard-000", faults.append)
    caller = Caller(shard)
    caller.call(open_stream())
    bad = np.array([666], np.uint64)
    poison = dataclasses.replace(batches.persist(1), roots=bad)
    for call in [poison, Xor(bad, bad, shard.incarnation), Fail((Failure(666, "x"),), shard.incarnation)]:
        answer = caller.call(call)
        assert type(answer) is FTLayerError
        assert "ZeroDivisionError" in str(answer)
        answer = caller.call(batches.persist(1))
        while isinstance(answer, VertexUnavailableError):  # what a client would do
            answer = caller.call(batches.persist(1))
        assert answer == Accepted(1)
    shard.close()
    assert faults == []


# ---------------------------------------------------------------- holding back


def test_at_max_pending_intake_waits_until_roots_complete(
    caller: Caller, opened: Any, batches: Any, store: Any
) -> None:
    first = batches.persist(20)
    assert caller.call(first) == Accepted(20)
    held = caller.start(batches.persist(10))
    # It is held back, and others of its stream with it; what is not intake goes on.
    behind = caller.start(batches.persist(1))
    assert isinstance(caller.call(Stats()), StatsReply)
    assert held.empty()
    assert behind.empty()
    assert caller.call(batches.xor(first, opened.incarnation)) == Xored(20, 0)
    assert held.get(timeout=600) == Accepted(10)
    assert behind.get(timeout=600) == Accepted(1)


def test_intake_held_back_too_long_fails(caller: Caller, opened: Any, batches: Any) -> None:
    assert caller.call(batches.persist(20)) == Accepted(20)
    answer = caller.call(batches.persist(10))
    assert isinstance(answer, IntakeTimeoutError)
    assert "max_pending" in str(answer)


def test_streams_that_are_not_held_back_overtake(
    caller: Caller, opened: Any, batches: Any, open_stream: Callable[..., Any]
) -> None:
    caller.call(open_stream("job/other"))
    assert caller.call(batches.persist(25)) == Accepted(25)
    held = caller.start(batches.persist(1))
    assert caller.call(batches.persist(5, "job/other")) == Accepted(5)
    assert isinstance(held.get(timeout=600), IntakeTimeoutError)


def test_positions_of_a_stream_keep_their_order_while_held_back(
    caller: Caller, opened: Any, batches: Any
) -> None:
    def step(rows: int, start: bytes | None, end: bytes) -> Persist:
        return batches.persist(rows, position=SourcePosition("0", start, end))

    first = step(20, None, b"1")
    assert caller.call(first) == Accepted(20)
    held, behind = caller.start(step(10, b"1", b"2")), caller.start(step(1, b"2", b"3"))
    caller.call(batches.xor(first, opened.incarnation))
    assert held.get(timeout=600) == Accepted(10)
    assert behind.get(timeout=600) == Accepted(1)


def test_a_refused_call_of_a_group_spoils_no_other(
    caller: Caller, opened: Any, batches: Any, store: Any
) -> None:
    store.may_commit.clear()
    first = caller.start(batches.persist(1))
    assert store.commits_waiting.acquire(timeout=600)
    calls = [batches.persist(1), batches.persist(26), batches.persist(1), batches.persist(1, "job/unknown")]
    answers = [caller.start(call) for call in calls]
    store.may_commit.set()
    assert first.get(timeout=600) == Accepted(1)
    good, large, also_good, unknown = [answer.get(timeout=600) for answer in answers]
    assert good == also_good == Accepted(1)
    assert isinstance(large, ProtocolError)
    assert isinstance(unknown, ProtocolError)
    assert caller.call(Stats()).values["persisted"] == 3


def test_other_changes_become_one_transaction_too_and_one_refused_spoils_no_other(
    caller: Caller, opened: Any, batches: Any, store: Any
) -> None:
    roots = batches.persist(4)
    assert caller.call(roots) == Accepted(4)
    store.may_commit.clear()
    first = caller.start(batches.persist(1))
    assert store.commits_waiting.acquire(timeout=600)
    fails = [
        caller.start(Fail((Failure(int(root), "why"),), opened.incarnation + wrong))
        for root, wrong in zip(roots.roots, [0, 0, 1, 0], strict=True)
    ]
    drain(store)
    store.may_commit.set()
    assert first.get(timeout=600) == Accepted(1)
    answers = [answer.get(timeout=600) for answer in fails]
    assert isinstance(answers.pop(2), StaleIncarnationError)
    assert answers == [Failed(1, 0, 0)] * 3
    assert drain(store) <= 3  # one group, and ticks
    assert caller.shard.incarnation == opened.incarnation


# ---------------------------------------------------------------- once


def test_a_call_sent_again_has_its_effect_once(caller: Caller, opened: Any, batches: Any) -> None:
    call = batches.persist(5)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(3):
        caller.shard.submit(call, Envelope("other", 1), answers.put)
    assert [answers.get(timeout=600) for _ in range(3)] == [Accepted(5)] * 3
    assert caller.call(Stats()).values["persisted"] == 5
    xor = batches.xor(call, opened.incarnation)
    for _ in range(2):
        caller.shard.submit(xor, Envelope("other", 2), answers.put)
    assert [answers.get(timeout=600) for _ in range(2)] == [Xored(5, 0)] * 2


def test_close_runs_what_was_submitted_and_refuses_what_comes(
    caller: Caller, opened: Any, batches: Any
) -> None:
    answers = [caller.start(batches.persist(1)) for _ in range(5)]
    caller.shard.close()
    assert [answer.get(timeout=600) for answer in answers] == [Accepted(1)] * 5
    assert isinstance(caller.call(batches.persist(1)), VertexUnavailableError)
    assert isinstance(caller.call(batches.xor(batches.persist(1), 1)), VertexUnavailableError)


def test_what_completed_before_close_is_not_replayed(
    parts: ShardParts, caller: Caller, opened: Any, batches: Any, faults: list[Exception]
) -> None:
    call = batches.persist(5)
    caller.call(call)
    caller.call(batches.xor(call, opened.incarnation))
    caller.shard.close()
    again = Shard(parts, "shard-000", faults.append)
    assert Caller(again).call(Stats()).values["recovered"] == 0
    again.close()


def test_failed_records_are_listed(caller: Caller, opened: Any, batches: Any) -> None:
    call = batches.persist(1)
    caller.call(call)
    failure = Failure(int(call.roots[0]), "no such column", fatal=True)
    assert caller.call(Fail((failure,), opened.incarnation)) == Failed(0, 1, 0)
    listed = caller.call(ListRecords("dead"))
    assert isinstance(listed, RecordList)
    assert [record.reason for record in listed.records] == ["no such column"]
    assert listed.records[0].payload == pa.record_batch({"text": ["record 0"]})


def test_ranges_are_registered_beside_a_sync_and_wait_for_room_in_their_order(
    caller: Caller, opened: StreamOpened, store: Any
) -> None:
    """No disk is in their way; beyond ``max_pending`` they wait, and none overtakes those before it."""
    assert caller.call(TakeOver(STREAM, ("p0",), "me")).partitions[0].position is None

    def register(at: int) -> Register:
        roots = np.arange(10 * at + 1, 10 * at + 11, dtype=np.uint64)
        start = None if at == 0 else str(at).encode()
        facts = RowRange("p0", start, str(at + 1).encode(), 0, 10 * at, 10, 10)
        return Register(STREAM, facts, roots, roots, "me", opened.incarnation)

    store.may_commit.clear()
    answers = [caller.start(register(at)) for at in range(2)]
    segments = [each.get(timeout=600).segment for each in answers]
    waiting = [caller.start(register(at)) for at in range(2, 4)]
    assert all(each.empty() for each in waiting)
    store.may_commit.set()
    done = np.arange(1, 21, dtype=np.uint64)
    assert caller.call(Xor(done, done, opened.incarnation)) == Xored(20, 0)
    segments += [each.get(timeout=600).segment for each in waiting]
    assert segments == sorted(segments)
    done = np.arange(21, 41, dtype=np.uint64)
    assert caller.call(Xor(done, done, opened.incarnation)) == Xored(20, 0)
    refused = caller.call(dataclasses.replace(register(7), holder="another"))
    assert isinstance(refused, ProtocolError)
    assert "has another holder" in str(refused)
