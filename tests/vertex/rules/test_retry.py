"""Rule 9: pauses, attempts, and how much is kept of a failure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftlayer.common.rules.restart import next_attempt
from ftlayer.vertex.calls import Failure, StreamOptions
from ftlayer.vertex.rules import streams
from ftlayer.vertex.rules.streams import cut, shortened, stored_attempt

ids = st.integers(1, 2**64 - 1)
RAISED = Failure(1, "it raised")


@given(origin=ids, attempt=st.integers(1, 20), jitter=st.floats(0, 1), wall=st.integers(0, 2**42))
def test_rule_9_a_pause_is_its_entry_less_a_drawn_share(origin, attempt, jitter, wall):
    options = StreamOptions(max_attempts=10, backoff_ms=(1_000, 5_000), jitter=jitter)
    after = next_attempt(options, origin, attempt, RAISED, wall_ms=wall)
    if attempt >= 10:
        assert after is None
        return
    assert after is not None
    pause = 1_000 if attempt == 1 else 5_000
    assert after.attempt == attempt + 1
    assert wall + pause * (1 - jitter) - 1 <= after.not_before_ms <= wall + pause
    assert after == next_attempt(options, origin, attempt, RAISED, wall_ms=wall)
    assert next_attempt(options, origin, attempt, Failure(1, "r", fatal=True), wall_ms=wall) is None


def test_rule_9_the_drawn_share_spreads_over_records_and_attempts():
    options = StreamOptions(max_attempts=10, backoff_ms=(1_000_000,), jitter=1.0)
    times = {
        next_attempt(options, origin, attempt, RAISED, wall_ms=0).not_before_ms // 100_000
        for origin in range(1, 50)
        for attempt in range(1, 4)
    }
    assert times == set(range(10))


def test_no_backoff_means_no_pause():
    options = StreamOptions(backoff_ms=())
    assert next_attempt(options, 1, 1, RAISED, wall_ms=5).not_before_ms == 5


@given(st.text(max_size=400), st.integers(150, 300))
def test_a_text_is_cut_in_its_middle_and_says_so(text, limit):
    short = cut(text, limit)
    assert len(short) <= limit
    if len(text) <= limit:
        assert short == text
    else:
        assert "left out" in short
        assert (short[:20], short[-20:]) == (text[:20], text[-20:])


def test_a_history_keeps_the_first_and_the_newest_attempts():
    history = ()
    for attempt in range(40):
        added = stored_attempt(attempt + 1, attempt, Failure(1, "r" * 5_000, "op"), lambda text: b"")
        history = (*shortened(history), added)
    assert len(history) == streams.MAX_HISTORY
    assert [entry.wall_ms for entry in history] == [0, *range(40 - streams.MAX_HISTORY + 1, 40)]
    assert len(history[0].reason) == streams.MAX_REASON


def test_a_long_traceback_is_bounded_in_the_store(vertex):
    vertex.open()
    vertex.persist([1])
    vertex.fail(1, traceback="x" * 100_000)
    (record,) = vertex.list("waiting")
    assert len(record.traceback) == streams.MAX_TRACEBACK


@given(
    origin=ids,
    attempt=st.integers(1, 20),
    most=st.none() | st.integers(1, 12),
    after_ms=st.none() | st.integers(0, 2**40),
    uses_attempt=st.booleans(),
    fatal=st.booleans(),
    wall=st.integers(0, 2**42),
)
def test_a_failure_may_ask_for_a_pause_and_for_its_attempt_back(
    origin, attempt, most, after_ms, uses_attempt, fatal, wall
):
    options = StreamOptions(max_attempts=most, backoff_ms=(1_000,), jitter=0.5)
    cause = Failure(1, "r", fatal=fatal, after_ms=after_ms, uses_attempt=uses_attempt)
    after = next_attempt(options, origin, attempt, cause, wall_ms=wall)
    used_up = uses_attempt and most is not None and attempt >= most
    assert (after is None) == (fatal or used_up)
    if after is None:
        return
    assert after.attempt == attempt + uses_attempt
    if after_ms is None:
        assert wall + 499 <= after.not_before_ms <= wall + 1_000
    else:
        assert after.not_before_ms == wall + after_ms  # exactly: no jitter shortens it
