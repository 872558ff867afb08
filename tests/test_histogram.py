"""Durations by bucket."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.common.rules.histogram import BATCH_BOUNDS, LATENCY_BOUNDS, Exemplar, Histogram
from ftlayer.errors import ConfigError
from ftlayer.vertex.calls.jobs import HistogramDetails

BOUNDS = (0.01, 0.1, 1.0)
OBSERVATIONS = st.lists(st.tuples(st.floats(-1, 100), st.integers(1, 1000), st.integers(0, 5)), max_size=30)


def _filled(observations: Sequence[tuple[float, int, int]], start_ms: int = 0) -> Histogram:
    histogram = Histogram(BOUNDS)
    for at_ms, (seconds, count, root) in enumerate(observations, start_ms):
        histogram.observe(seconds, count, root=root, at_ms=at_ms)
    return histogram


def _content(histogram: Histogram) -> tuple[object, ...]:
    return histogram.bounds, histogram.counts, pytest.approx(histogram.total), histogram.exemplars


def test_an_observation_belongs_to_the_first_bound_that_is_not_below_it() -> None:
    histogram = Histogram(BOUNDS)
    for seconds in (0.0, 0.01, 0.0100001, 0.1, 1.0, 1.5):
        histogram.observe(seconds)
    assert histogram.counts == [2, 2, 1, 1]
    assert histogram.count == 6
    assert histogram.total == pytest.approx(2.6200001)


def test_a_negative_duration_is_none() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(-5.0, 3, root=7, at_ms=1)
    assert (histogram.counts, histogram.total) == ([3, 0, 0, 0], 0.0)
    assert histogram.exemplars[0] == Exemplar(0.0, 7, 1)


def test_a_bucket_keeps_its_last_exemplar_and_what_has_no_root_is_none() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(0.5, root=1, at_ms=10)
    histogram.observe(0.6, root=2, at_ms=20)
    histogram.observe(0.7, at_ms=30)
    assert histogram.exemplars == [None, None, Exemplar(0.6, 2, 20), None]


def test_other_bounds_are_not_added() -> None:
    with pytest.raises(ValueError, match="cannot be added"):
        Histogram(LATENCY_BOUNDS).merge(Histogram(BATCH_BOUNDS))


@pytest.mark.parametrize(
    ("bounds", "counts", "exemplars"),
    [
        ((1.0, 2.0), (1, 2), ()),
        ((1.0,), (1, 2), (None,)),
        ((2.0, 1.0), (1, 2, 3), ()),
        ((float("nan"), 1.0), (1, 2, 3), ()),
        ((1.0,), (1, -2), ()),
    ],
)
def test_details_that_do_not_fit_are_refused(bounds: Any, counts: Any, exemplars: Any) -> None:
    with pytest.raises(ConfigError, match="expected"):
        HistogramDetails(bounds, counts, 0.0, exemplars)


@given(OBSERVATIONS, OBSERVATIONS)
def test_two_that_are_merged_are_as_one_that_saw_it_all(
    first: list[tuple[float, int, int]], second: list[tuple[float, int, int]]
) -> None:
    one, other = _filled(first), _filled(second, len(first))
    one.merge(other)
    assert _content(one) == _content(_filled(first + second))


@given(OBSERVATIONS)
def test_details_bring_all_of_it(observations: list[tuple[float, int, int]]) -> None:
    histogram = _filled(observations)
    details = HistogramDetails.of(histogram)
    read = details.histogram()
    assert _content(read) == _content(histogram)
    read.observe(0.5, root=9, at_ms=99)
    assert HistogramDetails.of(histogram) == details


@given(OBSERVATIONS, st.floats(0, 1), st.floats(0, 1))
def test_a_quantile_is_in_the_bucket_of_the_observation_that_it_is_asked_for(
    observations: Any, one: float, other: float
) -> None:
    histogram = _filled(observations)
    if not observations:
        assert math.isnan(histogram.quantile(one))
        return
    low, high = sorted((one, other))
    assert histogram.quantile(low) <= histogram.quantile(high)
    values = sorted(max(seconds, 0.0) for seconds, count, _ in observations for _ in range(count))
    exact = values[max(math.ceil(high * len(values)) - 1, 0)]
    bucket = bisect_left(BOUNDS, exact)
    lower, upper = (0.0, *BOUNDS)[bucket], (*BOUNDS, BOUNDS[-1])[bucket]
    assert lower <= histogram.quantile(high) <= upper or histogram.quantile(high) == pytest.approx(lower)


def test_observations_of_a_bucket_are_spread_evenly_over_it() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(0.05, 10)
    assert histogram.quantile(0.5) == pytest.approx(0.055)
    histogram.observe(7.0, 90)
    assert histogram.quantile(0.99) == 1.0
