"""How old records were at sinks, as plain values."""

from __future__ import annotations

import pytest

from ftlayer.common.rules.histogram import Histogram
from ftlayer.monitor.rules.facts import latency_facts
from ftlayer.vertex.calls.jobs import HistogramDetails, JobDetails, JobKind


def _details(*seconds: float) -> HistogramDetails:
    histogram = Histogram()
    for each in seconds:
        histogram.observe(each)
    return HistogramDetails.of(histogram)


def test_each_source_and_sink_that_a_marker_came_between() -> None:
    job = JobDetails(
        *("shop", "shop", JobKind.TOPOLOGY, "run-1", "acker", "running", False, 0, 0),
        histograms={
            "end_to_end|orders|out": _details(0.02, 0.02, 0.4),
            "end_to_end|orders|never": _details(),
            "persist|orders": _details(0.1),
        },
    )
    (found,) = latency_facts(job)
    assert (found["source"], found["sink"], found["count"]) == ("orders", "out", 3)
    assert found["mean_seconds"] == pytest.approx(0.44 / 3)
    assert 0.01 < found["p50_seconds"] <= 0.025
    assert 0.25 < found["p99_seconds"] <= 0.5
