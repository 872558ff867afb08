"""BucketRotation: never before the timeout, and not later than rule 8 says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.errors import ConfigError
from ftlayer.vertex.acker import BucketRotation

STEPS = st.lists(
    st.tuples(st.integers(-20, 60) | st.integers(0, 5000), st.sampled_from(["advance", "stamp", "both"])),
    max_size=120,
)


@given(timeout_ms=st.integers(6, 300), buckets=st.integers(2, 7), start=st.integers(0, 10**12), steps=STEPS)
@settings(max_examples=300, deadline=None)
def test_never_early(timeout_ms: int, buckets: int, start: int, steps: list[tuple[int, str]]) -> None:
    """Whatever the clock does (jumps, goes back), and however rarely it is advanced."""
    rotation = BucketRotation(timeout_ms, buckets, first_bucket=10)
    now = start
    latest = 0
    stamped: dict[int, list[int]] = {}
    for step, what in steps:
        now = max(0, now + step)
        latest = max(latest, now)
        if what in ("advance", "both"):
            for bucket in rotation.advance(now):
                assert all(time + timeout_ms <= latest for time in stamped.pop(bucket))
        if what in ("stamp", "both"):
            bucket = rotation.bucket_at(now)
            assert 10 <= bucket < 10 + buckets
            # A clock that went back stands still: the entry's time starts at the latest time seen.
            stamped.setdefault(bucket, []).append(latest)


@given(
    timeout_ms=st.integers(6, 300),
    buckets=st.integers(2, 7),
    start=st.integers(0, 10**12),
    steps=st.lists(st.integers(0, 60) | st.integers(0, 5000), max_size=120),
)
@settings(max_examples=300, deadline=None)
def test_not_late_when_advanced_before_stamping(
    timeout_ms: int, buckets: int, start: int, steps: list[int]
) -> None:
    rotation = BucketRotation(timeout_ms, buckets)
    now = start
    stamped: dict[int, list[int]] = {}
    for step in steps:
        now += step
        for bucket in rotation.advance(now):
            del stamped[bucket]
        # timeout x (1 + 1 / (buckets - 1)), in whole numbers
        alive = [time for times in stamped.values() for time in times]
        assert all((now - time) * (buckets - 1) < timeout_ms * buckets for time in alive)
        stamped.setdefault(rotation.bucket_at(now), []).append(now)


@given(timeout_ms=st.integers(6, 300), buckets=st.integers(2, 7), now=st.integers(0, 10**6))
def test_next_expiry_is_the_first_time_with_something_to_expire(
    timeout_ms: int, buckets: int, now: int
) -> None:
    rotation = BucketRotation(timeout_ms, buckets)
    assert rotation.next_expiry_ms() is None
    bucket = rotation.bucket_at(now)
    due = rotation.next_expiry_ms()
    assert due is not None
    assert rotation.advance(due - 1) == []
    assert rotation.advance(due) == [bucket]
    assert rotation.next_expiry_ms() is None


def test_a_jump_of_the_clock_expires_all_buckets_oldest_first() -> None:
    rotation = BucketRotation(30_000, buckets=4, first_bucket=7)
    buckets = [rotation.bucket_at(now) for now in (0, 10_000, 20_000)]
    assert rotation.advance(10**9) == buckets
    assert rotation.advance(10**9) == []


def test_refuses_senseless_options() -> None:
    with pytest.raises(ConfigError, match="buckets: expected at least 2"):
        BucketRotation(1000, 1)
    with pytest.raises(ConfigError, match="timeout_ms: expected at least 2"):
        BucketRotation(1, 3)
    with pytest.raises(ConfigError, match="not within 1 to 65535"):
        BucketRotation(1000, 3, first_bucket=65534)
    with pytest.raises(ConfigError, match="not within 1 to 65535"):
        BucketRotation(1000, 3, first_bucket=0)
