"""Durations that slots count and the driver's meter adds up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.common.rules.histogram import LATENCY_BOUNDS, Histogram
from ftlayer.runtime.driver.rules.job_status import Meter
from ftlayer.runtime.protocol.messages import counters_of, exemplars_of, histograms_of

TIMES = st.tuples(
    st.sampled_from(["a", "b"]), st.sampled_from(["orders", "with/slash"]), st.floats(0, 100), st.booleans()
)


@given(st.lists(TIMES, max_size=40))
def test_what_instances_have_counted_is_one_histogram(times: list[tuple[str, str, float, bool]]) -> None:
    meter = Meter()
    slots: dict[str, dict[str, Histogram]] = {"a": {}, "b": {}}
    whole: dict[str, Histogram] = {}
    for moment, (slot, source, seconds, beats) in enumerate(times):
        slots[slot].setdefault(source, Histogram()).observe(seconds)
        whole.setdefault(source, Histogram()).observe(seconds)
        if beats:
            meter.update(slot, counters_of("persist", slots[slot]) | {"persisted": moment}, moment)
    for slot, histograms in slots.items():
        meter.update(slot, counters_of("persist", histograms), 1_000)
    found = histograms_of("persist", meter.totals, LATENCY_BOUNDS)
    assert found.keys() == whole.keys()
    for source, histogram in whole.items():
        assert found[source].counts == histogram.counts
        assert found[source].total == pytest.approx(histogram.total, abs=2e-6)


@given(st.lists(st.tuples(st.sampled_from(["orders|out", "b"]), st.floats(0, 100), st.integers(0, 9))))
def test_exemplars_go_beside_the_counters_of_their_buckets(times: list[tuple[str, float, int]]) -> None:
    histograms: dict[str, Histogram] = {}
    for moment, (part, seconds, root) in enumerate(times):
        histograms.setdefault(part, Histogram()).observe(seconds, root=root, at_ms=moment)
    told = counters_of("latency", histograms), exemplars_of("latency", histograms)
    found = histograms_of("latency", told[0], LATENCY_BOUNDS, told[1])
    assert {part: each.exemplars for part, each in found.items()} == {
        part: each.exemplars for part, each in histograms.items()
    }
