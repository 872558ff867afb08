"""A rate is kept in every stretch of time, and what waits gets through."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftlayer.functions.token_bucket import BURST_MS, TokenBucket

RATES = st.floats(0.001, 1e6)
ROUNDING = 1e-6


@given(RATES, st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 1_000)), max_size=60))
def test_in_any_stretch_no_more_than_its_rate_and_a_burst(rate: float, looks: list[tuple[int, int]]) -> None:
    """Each look: so many ms later, and how many are wanted."""
    begun = now = 1_000_000
    bucket = TokenBucket(rate, now)
    went: list[tuple[int, int]] = []
    for pause, wanted in looks:
        now += pause
        records = min(wanted, bucket.available(now))
        bucket.take(records)
        went.append((now, records))
    for place, (start, _) in enumerate(went):
        total = 0
        for end, records in went[place:]:
            total += records
            assert total <= (rate * (end - start) / 1_000 + bucket.capacity) * (1 + ROUNDING)
    total = 0
    for end, records in went:
        total += records
        assert total <= rate * (end - begun) / 1_000 * (1 + ROUNDING) + ROUNDING, "no burst at the beginning"


@given(RATES, st.floats(0, 1), st.integers(0, 100))
def test_after_the_wait_it_has_what_was_waited_for(rate: float, share: float, spent: int) -> None:
    bucket = TokenBucket(rate, 0)
    now = BURST_MS
    bucket.take(min(spent, bucket.available(now)))
    wanted = max(1.0, share * bucket.capacity)
    for _ in range(3):  # one, and what floating point costs
        now += bucket.wait_ms(wanted)
        if bucket.available(now) >= int(wanted):
            return
    raise AssertionError(f"{bucket.available(now)} of {wanted} by {now}")


@given(RATES, st.integers(1, 200))
def test_taking_all_that_is_allowed_gets_the_whole_rate(rate: float, turns: int) -> None:
    bucket = TokenBucket(rate, 0)
    now, records = 0, 0
    for _ in range(turns):
        now += bucket.wait_ms(max(1.0, bucket.capacity / 2))
        there = bucket.available(now)
        bucket.take(there)
        records += there
    assert records >= rate * now / 1_000 * (1 - ROUNDING) - 2
