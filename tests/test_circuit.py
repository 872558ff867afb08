"""The rules of the circuit breaker against a plain model, over any outcomes and times."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.common.rules.circuit import (
    FIRST_PAUSE_MS,
    LEAST_RECORDS,
    LONGEST_PAUSE_MS,
    WINDOW_MS,
    CircuitBreaker,
    CircuitState,
    Limit,
)
from ftlayer.errors import ConfigError

steps = st.tuples(st.integers(0, 90_000), st.integers(0, 100), st.floats(0, 1))


@given(st.sampled_from(["5%", "50%", 0, 7]), st.lists(steps, max_size=40))
def test_it_pauses_when_too_many_fail_and_tries_again(
    limit: Any, given: list[tuple[int, int, float]]
) -> None:
    breaker = CircuitBreaker(Limit.of(limit, "here"))
    share = float(limit.strip("%")) / 100 if isinstance(limit, str) else None
    now = 0
    window: list[tuple[int, int, int]] = []
    pause, until = 0, 0
    state = CircuitState.CLOSED
    for wait, records, part in given:
        now += wait
        failed = int(records * part)
        if state is CircuitState.OPEN and now >= until:
            state = CircuitState.HALF_OPEN
        assert breaker.may_try(now) == (state is not CircuitState.OPEN)
        assert breaker.state is state
        if state is CircuitState.CLOSED:
            second, minute = now // 1_000, WINDOW_MS // 1_000
            window = [each for each in window if each[0] > second - minute] + [(second, records, failed)]
            all_records, all_failed = sum(r for _, r, _ in window), sum(f for _, _, f in window)
            if share is None:
                trips = all_failed > limit
            else:
                trips = all_records >= LEAST_RECORDS and all_failed > share * all_records
            if trips and failed:
                state, pause, until, window = CircuitState.OPEN, FIRST_PAUSE_MS, now + FIRST_PAUSE_MS, []
        elif state is CircuitState.HALF_OPEN and records:
            if failed > (limit if share is None else share * records):
                pause = min(2 * pause, LONGEST_PAUSE_MS)
                state, until = CircuitState.OPEN, now + pause
            else:
                state = CircuitState.CLOSED
        assert breaker.outcome(records, failed, now) is state
        status = breaker.status(now)
        assert status.state is state
        assert status.next_trial_in_ms == (until - now if state is CircuitState.OPEN else 0)


@given(st.integers(LEAST_RECORDS, 1_000), st.integers(1, 20))
def test_while_all_fails_trials_come_less_and_less_often(records: int, trials: int) -> None:
    breaker = CircuitBreaker(Limit.of("10%", "here"))
    now = 0
    breaker.outcome(records, records, now)
    for number in range(trials):
        pause = breaker.status(now).next_trial_in_ms
        assert pause == min(FIRST_PAUSE_MS * 2**number, LONGEST_PAUSE_MS)
        assert not breaker.may_try(now + pause - 1)
        now += pause
        assert breaker.may_try(now)
        breaker.outcome(1, 1, now)
    assert breaker.opened == trials + 1
    now += LONGEST_PAUSE_MS
    assert breaker.may_try(now)
    assert breaker.outcome(records, 0, now) is CircuitState.CLOSED
    assert breaker.outcome(records, records, now) is CircuitState.OPEN
    assert breaker.status(now).next_trial_in_ms == FIRST_PAUSE_MS


@pytest.mark.parametrize(
    "given", ["5", "0%", "100%", "-1%", "many", "9" * 400 + "%", -1, 1 << 80, True, 0.05, None]
)
def test_what_is_no_limit_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="here: max_failing"):
        Limit.of(given, "here")


def test_limits_say_what_they_are() -> None:
    assert str(Limit.of("2.5 %", "here")) == "2.5%"
    assert str(Limit.of(100, "here")) == str(Limit.of("100 / min", "here")) == "100/min"
