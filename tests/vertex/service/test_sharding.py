"""One answer out of those of several shards."""

from __future__ import annotations

import math

import pytest

from ftlayer.vertex.calls import Hour
from ftlayer.vertex.service.sharding import add_hours

NONE = math.nan


def _hour(end_ms: int, **series: tuple[float, ...]) -> Hour:
    return Hour(10_000, end_ms, series)


def _same(hour: Hour, other: Hour) -> bool:
    assert hour.series.keys() == other.series.keys()
    for name, points in hour.series.items():
        assert list(points) == pytest.approx(list(other.series[name]), nan_ok=True), name
    return (hour.step_ms, hour.end_ms) == (other.step_ms, other.end_ms)


def test_points_are_added_and_of_ages_and_shares_the_largest_is_taken() -> None:
    a = _hour(100_000, pending=(NONE, 1.0, 2.0), oldest_seconds=(NONE, 5.0, 15.0), used_share=(0.1, 0.1, 0.1))
    b = _hour(
        100_003, pending=(NONE, NONE, 4.0), oldest_seconds=(NONE, 9.0, 2.0), used_share=(0.3, NONE, 0.0)
    )
    both = _hour(
        100_000, pending=(NONE, 1.0, 6.0), oldest_seconds=(NONE, 9.0, 15.0), used_share=(0.3, 0.1, 0.1)
    )
    assert _same(add_hours(a, b), both)
    assert _same(add_hours(b, a), both)


def test_a_shard_that_is_a_step_ahead_waits_for_the_other() -> None:
    a, b = _hour(90_001, pending=(1.0, 2.0, 3.0)), _hour(100_000, pending=(20.0, 30.0, 40.0))
    both = _hour(90_001, pending=(1.0, 22.0, 33.0))
    assert _same(add_hours(a, b), both)
    assert _same(add_hours(b, a), both)


def test_a_series_that_one_shard_has_is_kept() -> None:
    assert _same(add_hours(_hour(0, x=(1.0,)), _hour(0, y=(2.0,))), _hour(0, x=(1.0,), y=(2.0,)))
