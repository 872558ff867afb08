from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.errors import IntakeTimeoutError, ProtocolError, StaleIncarnationError, VertexUnavailableError
from ftlayer.runtime.acker_mode.slot.vertex_port import (
    MAX_XORS,
    TOUCH_ROOTS,
    PersistOrder,
    PersistQueue,
    VertexPort,
)
from ftlayer.runtime.slot.rules.events import Event, PartFailed, ReplaysCame, RootsAccepted, Wake
from ftlayer.runtime.task.actions import Acknowledge, AskReplays
from ftlayer.vertex.calls import (
    Accepted,
    Fail,
    Failed,
    Failure,
    OpenStream,
    Persist,
    RecordBatches,
    StreamOpened,
    StreamOptions,
    TakeReplays,
    Touch,
    Touched,
    Xor,
    Xored,
)

KEY = ("source", 0)
WAIT_S = 600


class FakeClient:
    """A vertex whose answers the test gives."""

    def __init__(self) -> None:
        self.incarnation = 7
        self.submitted: queue.SimpleQueue[tuple[Any, Future[Any]]] = queue.SimpleQueue()
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.closed = threading.Event()

    def pipeline(self) -> FakeClient:
        return self

    def submit(self, call: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.submitted.put((call, future))
        return future

    def call(self, call: Any) -> Any:
        self.calls.put(call)
        match call:
            case OpenStream():
                return StreamOpened(self.incarnation, {"p0": b"x"})
            case TakeReplays():
                return RecordBatches(())
            case Touch() | Fail() if call.incarnation != self.incarnation:
                raise StaleIncarnationError("another one")
            case Touch():
                return Touched(len(call.roots))
            case _:
                return Failed(0, 0, 0)

    def shard_of(self, stream: str) -> tuple[int, int]:
        return 2, 4

    def close(self) -> None:
        self.closed.set()

    def next(self) -> tuple[Any, Future[Any]]:
        return self.submitted.get(timeout=WAIT_S)


class Port:
    def __init__(self) -> None:
        self.client = FakeClient()
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.port = VertexPort(self.client, (("job/source", StreamOptions()),), self.events.put, "run-1")  # type: ignore[arg-type]
        self.opened = self.port.open()

    def event(self) -> Event:
        """Return the next event that says something."""
        while isinstance(event := self.events.get(timeout=WAIT_S), Wake):
            continue
        return event

    def until_quiet(self) -> None:
        while not self.port.is_quiet:
            self.events.get(timeout=WAIT_S)


@pytest.fixture
def port() -> Any:
    return Port()


def persist(tools: Any, first: int) -> Persist:
    rows = tools.rows_of(first, 1)
    lineage = tools.lineage_of(rows)
    return Persist("job/source", rows, lineage.roots, lineage.ids)


def ack(root: int) -> Acknowledge:
    return Acknowledge(np.array([root], np.uint64), np.array([1], np.uint64))


def test_what_a_stream_is_opened_with(port: Port) -> None:
    opened = port.opened["job/source"]
    assert (opened.positions, opened.shard, opened.shards, opened.exact) == ({"p0": b"x"}, 2, 4, False)


def test_persisted_roots_are_told_and_counted(tools: Any, port: Port) -> None:
    for ticket in range(48):
        assert port.port.may_persist
        port.port.persist(KEY, ticket, persist(tools, ticket))
    assert not port.port.may_persist
    assert not port.port.is_quiet
    for ticket in range(48):
        call, future = port.client.next()
        assert call.roots[0] == ticket + 1
        future.set_result(Accepted(1))
        told = port.event()
        assert told == RootsAccepted(KEY, ticket)
        assert told.took_s > 0
    assert port.port.is_quiet


def test_a_vertex_without_room_is_asked_again_in_order(tools: Any, port: Port) -> None:
    for ticket in range(4):
        port.port.persist(KEY, ticket, persist(tools, ticket))
    calls = [port.client.next() for _ in range(4)]
    # Answers may come in any order; what follows a refused position is refused too.
    calls[1][1].set_exception(ProtocolError("the position does not follow"))
    calls[0][1].set_exception(IntakeTimeoutError("full"))
    port.port.persist(KEY, 4, persist(tools, 4))
    calls[3][1].set_exception(ProtocolError("the position does not follow"))
    calls[2][1].set_result(Accepted(1))
    assert port.event() == RootsAccepted(KEY, 2)
    again = [port.client.next() for _ in range(4)]
    assert [int(call.roots[0]) for call, _ in again] == [1, 2, 4, 5]
    for _, future in again:
        future.set_result(Accepted(1))
    assert [port.event() for _ in range(4)] == [RootsAccepted(KEY, ticket) for ticket in (0, 1, 3, 4)]
    assert port.port.is_quiet


def test_a_position_that_somebody_else_has_moved_fails_the_slot(tools: Any, port: Port) -> None:
    port.port.persist(KEY, 0, persist(tools, 0))
    error = ProtocolError("the position does not follow")
    port.client.next()[1].set_exception(error)
    assert port.event() == PartFailed(error)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["put", "ok", "full"]), max_size=60))
def test_refused_calls_keep_their_order(moves: list[str]) -> None:
    sent: list[PersistOrder] = []
    accepted: list[int] = []
    failed: list[BaseException] = []
    calls = PersistQueue(
        sent.append, lambda order, reply: accepted.append(order.ticket), failed.append, lambda order: None
    )
    tickets = 0

    def answer(full: bool) -> None:
        """Handle the next call as a vertex does: in order, and nothing that follows a refused position."""
        order = sent.pop(0)
        future: Future[Any] = Future()
        if len(accepted) != order.ticket:
            future.set_exception(ProtocolError("does not follow"))
        elif full:
            future.set_exception(IntakeTimeoutError("full"))
        else:
            future.set_result(Accepted(1))
        calls.answered(order, future)

    for move in moves:
        if move == "put":
            calls.put(KEY, tickets, None)  # type: ignore[arg-type]
            tickets += 1
        elif sent:
            answer(move == "full")
    while sent:
        answer(full=False)
    assert accepted == list(range(tickets))
    assert not failed


def test_xors_beyond_the_window_wait_here(port: Port) -> None:
    for root in range(1, MAX_XORS + 4):
        port.port.xor(ack(root))
    calls = [port.client.next() for _ in range(MAX_XORS)]
    assert port.client.submitted.empty()
    assert [int(call.roots[0]) for call, _ in calls] == list(range(1, MAX_XORS + 1))
    for _, future in calls:
        future.set_result(Xored(0, 0))
    for _ in range(3):
        port.client.next()[1].set_result(Xored(0, 0))
    port.until_quiet()


def test_xors_for_an_earlier_vertex_are_sent_to_the_new_one_and_the_streams_opened_once(port: Port) -> None:
    port.client.calls.get(timeout=WAIT_S)
    for root in (1, 2, 3):
        port.port.xor(ack(root))
    calls = [port.client.next() for _ in range(3)]
    port.client.incarnation = 8
    for call, future in calls:
        assert call.incarnation == 7
        future.set_exception(StaleIncarnationError("restarted"))
    port.port.xor(ack(4))
    again = [port.client.next() for _ in range(4)]
    assert all(isinstance(call, Xor) and call.incarnation == 8 for call, _ in again)
    assert [int(call.roots[0]) for call, _ in again] == [1, 2, 3, 4]
    for _, future in again:
        future.set_result(Xored(1, 0))
    port.until_quiet()
    assert isinstance(port.client.calls.get(timeout=WAIT_S), OpenStream)
    assert port.client.calls.empty()


def test_a_failure_for_an_earlier_vertex_is_sent_to_the_new_one_too(port: Port) -> None:
    port.client.incarnation = 8
    port.port.fail((Failure(1, "why"),))
    port.until_quiet()
    calls = [port.client.calls.get(timeout=WAIT_S) for _ in range(4)]
    assert list(map(type, calls)) == [OpenStream, Fail, OpenStream, Fail]
    assert calls[-1] == Fail((Failure(1, "why"),), 8)
    assert port.client.calls.empty()


def test_replays_that_were_asked_for_come(port: Port) -> None:
    port.port.take_replays(("replay", 0), AskReplays("job/source", 10))
    assert port.event() == ReplaysCame(("replay", 0), ())


def test_touches_name_each_root_once_and_come_in_parts(port: Port) -> None:
    port.client.calls.get(timeout=WAIT_S)
    roots = np.arange(1, TOUCH_ROOTS + 11, dtype=np.uint64)
    port.port.touch([roots, roots[:5]])
    sizes = [len(port.client.calls.get(timeout=WAIT_S).roots) for _ in range(2)]
    assert sizes == [TOUCH_ROOTS, 10]


def test_a_vertex_that_does_not_answer_fails_the_slot(port: Port) -> None:
    error = VertexUnavailableError("no answer")
    port.port.xor(ack(1))
    port.client.next()[1].set_exception(error)
    assert port.event() == PartFailed(error)


def test_closing(port: Port) -> None:
    port.port.close()
    assert port.client.closed.is_set()
