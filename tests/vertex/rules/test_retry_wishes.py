"""A failure that asks for its own pause, or for its attempt back: by calls of a topology and by sealed batches."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.common.rules.restart import check_pauses
from ftlayer.errors import ConfigError, StoreDamagedError
from ftlayer.vertex import calls
from ftlayer.vertex.calls import BatchState, Failure, StreamOptions
from ftlayer.vertex.store import streams

FILES, CLICKS = "q/files", "ingest/clicks"
DAY = 86_400_000


def later(root: int, after_ms: int | None = 5_000, *, uses_attempt: bool = False) -> Failure:
    return Failure(root, "busy", "op", "", False, after_ms, uses_attempt)


def fail(vertex, *failures):
    return vertex.call(calls.Fail(failures, vertex.layer.incarnation))


def test_a_failure_sets_its_own_pause_and_takes_no_attempt(vertex):
    vertex.open(max_attempts=1, backoff_ms=(100,))
    vertex.persist([1])
    assert fail(vertex, later(1)) == calls.Failed(1, 0, 0)
    for restart in (False, True):
        vertex.advance(4_999)
        if restart:
            vertex.restart()
        assert vertex.take() == []
        vertex.advance(1)
        ((root, origin, attempt, _),) = vertex.take()
        assert (origin, attempt) == (1, 1)
        assert fail(vertex, later(root)) == calls.Failed(1, 0, 0)
    vertex.advance(5_000)
    ((root, *_),) = vertex.take()
    assert fail(vertex, later(root, uses_attempt=True)) == calls.Failed(0, 1, 0)
    (letter,) = vertex.list("dead")
    assert (letter.attempt, len(letter.history)) == (1, 4)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_long_pause_is_kept_over_restarts_and_ends_where_the_clock_was_set_back(kit, data):
    vertex = kit.Vertex()
    vertex.open(backoff_ms=(100,))
    vertex.persist([1, 2])
    pause = data.draw(st.integers(1_000, 30 * DAY))
    fail(vertex, later(1, pause))
    fail(vertex, later(2, None, uses_attempt=True))
    if data.draw(st.booleans()):
        vertex.restart()
    if data.draw(st.booleans()):
        vertex.wall -= 365 * DAY
        assert len(vertex.take()) == 2  # as for any pause: the clock was ahead when they were stored
        return
    vertex.advance(100)
    assert [origin for _, origin, *_ in vertex.take()] == [2]
    vertex.advance(pause - 101)
    assert vertex.take() == []
    vertex.advance(1)
    assert [origin for _, origin, *_ in vertex.take()] == [1]


def test_without_a_bound_a_record_is_tried_without_end(vertex):
    vertex.open(max_attempts=None, backoff_ms=(100,))
    vertex.persist([1])
    root = 1
    for attempt in range(2, 40):
        assert vertex.fail(root) == calls.Failed(1, 0, 0)
        vertex.advance(100)
        if attempt == 20:
            vertex.restart()
        ((root, origin, number, _),) = vertex.take()
        assert (origin, number) == (1, attempt)


@pytest.fixture
def query(vertex, kit):
    options = StreamOptions(timeout_ms=1_000, max_attempts=1, backoff_ms=(100,), jitter=0.0)
    opened = vertex.call(calls.OpenQuery("q", "run", (FILES, CLICKS), options))
    return opened.epoch


def sealed_rows(kit, *failures):
    roots = [failure.root for failure in failures]
    return calls.SealedRows(FILES, kit.payload([f"row {root}" for root in roots]), kit.u64(roots), failures)


def test_what_a_seal_says_of_the_next_attempt_survives_restart_and_reseal(vertex, kit, query):
    vertex.call(calls.BeginBatch("q", query, 0))
    rows = sealed_rows(kit, later(5), later(6, None, uses_attempt=True))
    assert vertex.call(calls.Seal("q", query, 0, {}, failed=(rows,))) == calls.Sealed(1, 1)
    vertex.restart()
    begun = vertex.call(calls.BeginBatch("q", query, 0))
    assert (begun.state, begun.failed[0].failures) == (BatchState.SEALED, rows.failures)
    more = sealed_rows(kit, later(7, 9_000))
    assert vertex.call(calls.Reseal("q", query, 0, failed=(more,))) == calls.Sealed(2, 1)
    vertex.restart()
    vertex.call(calls.Commit("q", query, 0))
    vertex.advance(5_000)
    assert vertex.call(calls.Deliverable(FILES, 0, 10)).end == 1
    ((root, origin, attempt, _),) = kit.flat(vertex.call(calls.ReadDeliveries(FILES, 0, 1)))
    assert (origin, attempt) == (5, 1)
    vertex.call(calls.BeginBatch("q", query, 1))
    again = vertex.call(calls.Seal("q", query, 1, {FILES: (0, 1)}, redelivered=(later(root, 1_000),)))
    assert again == calls.Sealed(1, 0)
    vertex.restart()
    vertex.call(calls.Commit("q", query, 1))
    vertex.advance(1_000)
    assert vertex.call(calls.Deliverable(FILES, 1, 10)).end == 2
    ((_, origin, attempt, _),) = kit.flat(vertex.call(calls.ReadDeliveries(FILES, 1, 2)))
    assert (origin, attempt) == (5, 1)


def test_a_seal_says_something_else_where_it_asks_for_something_else(vertex, kit, query):
    vertex.call(calls.BeginBatch("q", query, 0))
    first = calls.Seal("q", query, 0, {}, failed=(sealed_rows(kit, later(5)),))
    assert vertex.call(first) == vertex.call(first)
    with pytest.raises(Exception, match="said something else"):
        vertex.call(calls.Seal("q", query, 0, {}, failed=(sealed_rows(kit, later(5, 1)),)))


def test_a_seal_of_another_format_is_refused(vertex, kit, query, monkeypatch):
    vertex.call(calls.BeginBatch("q", query, 0))
    vertex.call(calls.Seal("q", query, 0, {}, failed=(sealed_rows(kit, Failure(5, "no")),)))
    monkeypatch.setattr(streams, "_BATCH_FORMAT", 5)
    with pytest.raises(StoreDamagedError, match="sealed batch 0 cannot be read: format 4, and not 5"):
        vertex.call(calls.BeginBatch("q", query, 0))


@pytest.mark.parametrize(
    ("most", "pauses", "fits"), [(5, 4, True), (5, 5, False), (1, 1, True), (None, 9, True)]
)
def test_more_pauses_than_further_attempts_are_refused(most, pauses, fits):
    options = StreamOptions(max_attempts=most, backoff_ms=tuple(range(1, pauses + 1)))
    if fits:
        check_pauses(options, "here")
    else:
        with pytest.raises(ConfigError, match=r"here: backoff has 5 pauses, and with max_attempts=5"):
            check_pauses(options, "here")
    check_pauses(StreamOptions(max_attempts=2), "the default list is for any number")
