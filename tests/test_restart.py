"""Restart strategies on a clock that is an argument."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.common.rules.restart import (
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    RestartStrategy,
    note_success,
    pause_after,
    restart_of,
)
from ftlayer.errors import ConfigError

gaps = st.lists(st.integers(0, 400), max_size=30)


def times_of(gaps: list[int]) -> list[int]:
    now, times = 1_000, []
    for gap in gaps:
        now += gap
        times.append(now)
    return times


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (FixedDelay(3, "1s"), "in 1 s, 2 of 3"),
        (ExponentialDelay("500ms", attempts=4), "in 1 s, 2 of 4 in a row"),
        (ExponentialDelay(attempts=None), "in 2 s"),
        (FailureRate(5, "1h", "50ms"), "in 0.05 s, 2 of 5 within 1h"),
    ],
)
def test_a_restart_says_when_it_is_and_how_many_there_may_be(
    strategy: RestartStrategy, expected: str
) -> None:
    pause_after(strategy, 1)
    assert restart_of(strategy, pause_after(strategy, 2) or 0) == expected


def test_no_restart_gives_up() -> None:
    assert NoRestart().on_failure(5) is None


@given(st.integers(1, 5), gaps)
def test_a_fixed_delay_counts_all_failures(attempts: int, gaps: list[int]) -> None:
    strategy = FixedDelay(attempts, "30ms")
    answers = [pause_after(strategy, time) for time in times_of(gaps)]
    assert answers == [30 if place < attempts else None for place in range(len(gaps))]


@given(gaps, st.sets(st.integers(0, 29)), st.integers(1, 300), st.none() | st.integers(1, 6))
def test_an_exponential_delay_doubles_and_starts_anew_after_a_success_and_a_quiet_time(
    gaps: list[int], successes: set[int], reset: int, attempts: int | None
) -> None:
    strategy = ExponentialDelay("10ms", "75ms", reset / 1_000, attempts)
    pause, in_a_row = 10, 0
    for place, time in enumerate(times_of(gaps)):
        if place in successes:
            note_success(strategy)
        if place and place in successes and gaps[place] >= reset:
            pause, in_a_row = 10, 0
        in_a_row += 1
        expected = None if attempts is not None and in_a_row > attempts else pause
        assert pause_after(strategy, time) == expected
        pause = min(2 * pause, 75)


def test_an_exponential_delay_without_a_bound_of_attempts_goes_on() -> None:
    strategy = ExponentialDelay(attempts=None)
    assert [pause_after(strategy, 0) for _ in range(500)][-1] == 60_000


@given(gaps, st.sets(st.integers(0, 29)), st.integers(1, 4), st.integers(1, 500))
def test_a_failure_rate_forgets_what_is_older_than_the_interval_at_a_success(
    gaps: list[int], successes: set[int], most: int, interval: int
) -> None:
    strategy = FailureRate(most, interval / 1_000, "7ms")
    counted: list[int] = []
    for place, time in enumerate(times_of(gaps)):
        if place in successes:
            note_success(strategy)
            counted = [earlier for earlier in counted if time - earlier < interval]
        counted.append(time)
        assert pause_after(strategy, time) == (7 if len(counted) <= most else None)


@pytest.mark.parametrize("strategy", [FixedDelay(), ExponentialDelay(), FailureRate()])
def test_what_fails_slowly_and_never_succeeds_is_given_up(strategy: Any) -> None:
    hour = 3_600_000
    assert None in [strategy.on_failure(place * hour) for place in range(20)]


def test_a_strategy_of_ones_own_need_not_know_of_successes() -> None:
    note_success(NoRestart())


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: FixedDelay(0), "attempts"),
        (lambda: FixedDelay(delay="soon"), "delay"),
        (lambda: FixedDelay(delay=0), "delay"),
        (lambda: ExponentialDelay(initial_delay=-1), "initial_delay"),
        (lambda: ExponentialDelay(initial_delay="2m", max_delay="1m"), "max_delay"),
        (lambda: ExponentialDelay(max_delay="x"), "max_delay"),
        (lambda: ExponentialDelay(reset_after=True), "reset_after"),
        (lambda: ExponentialDelay(attempts=0), "attempts"),
        (lambda: ExponentialDelay(jitter=1.5), "jitter"),
        (lambda: FailureRate(0), "max_failures"),
        (lambda: FailureRate(interval=0), "interval"),
        (lambda: FailureRate(delay=""), "delay"),
    ],
)
def test_options_that_make_no_sense_are_named(make: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make()


@given(st.floats(0, 1), st.integers(1, 20))
def test_jitter_moves_a_pause_by_its_part_at_most(jitter: float, failures: int) -> None:
    steady, jittery = (
        ExponentialDelay("100ms", "5s", attempts=None),
        ExponentialDelay("100ms", "5s", attempts=None, jitter=jitter),
    )
    for now in range(failures):
        pause, moved = pause_after(steady, now), pause_after(jittery, now)
        assert pause is not None
        assert moved is not None
        assert abs(moved - pause) <= pause * jitter + 1


def test_jitter_makes_pauses_differ() -> None:
    assert len({ExponentialDelay("1h", "1h", jitter=0.1).on_failure(0) for _ in range(10)}) > 1
