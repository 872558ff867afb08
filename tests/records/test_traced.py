"""Which records are traced, and the ids of their spans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from ftlayer.errors import ConfigError
from ftlayer.records.ids import mix64
from ftlayer.records.traced import Sampler, attempt_span, mixed, record_span, span_within, trace_of

ORIGINS = st.integers(1, 2**64 - 1)


@given(ORIGINS)
def test_one_number_is_mixed_as_many_are(origin: int) -> None:
    assert mixed(origin) == int(mix64(np.array([origin], np.uint64))[0])


@given(st.lists(ORIGINS, max_size=30), st.floats(0, 1, exclude_min=True))
def test_a_trace_is_picked_as_opentelemetry_picks_by_its_id(origins: list[int], ratio: float) -> None:
    picked = Sampler(ratio).mask(np.array(origins, np.uint64)).tolist()
    theirs = TraceIdRatioBased(ratio)
    decisions = [theirs.should_sample(None, trace_of(origin), "").decision for origin in origins]
    assert picked == [decision is Decision.RECORD_AND_SAMPLE for decision in decisions]


def test_about_the_share_is_picked() -> None:
    origins = np.arange(1, 100_001, dtype=np.uint64)
    assert 900 < np.count_nonzero(Sampler(0.01).mask(origins)) < 1_100
    assert Sampler(1.0).mask(origins).all()


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.1, float("nan")])
def test_what_is_no_share(ratio: float) -> None:
    with pytest.raises(ConfigError, match="the share of records that are traced"):
        Sampler(ratio)


@given(ORIGINS)
def test_ids_have_their_sizes_and_differ(origin: int) -> None:
    ids = [record_span(origin), attempt_span(origin), span_within(attempt_span(origin), 7, 0, 2**70)]
    assert all(0 < span < 2**64 for span in ids)
    assert len(set(ids)) == 3
    assert 0 < trace_of(origin) < 2**128
