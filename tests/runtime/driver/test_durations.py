"""Durations that slots count and the driver's meter adds up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.histogram import LATENCY_BOUNDS, Histogram
from ftlayer.runtime.driver.meter import Meter
from ftlayer.runtime.protocol.durations import counters_of, histograms_of

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
