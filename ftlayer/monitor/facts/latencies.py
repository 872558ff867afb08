"""How old records were at the sinks of a topology, as plain values."""

from __future__ import annotations

from collections.abc import Iterator

from ftlayer.monitor.facts.common import Facts
from ftlayer.vertex.calls.jobs import JobDetails

END_TO_END = "end_to_end"
"""What such histograms are called in `JobDetails.histograms`; ``|<source>|<sink>`` follows."""


def latency_facts(job: JobDetails) -> list[Facts]:
    """Return for each source and sink how many markers came in this run, and in what time half and 99 % of them did.

    Durations are in seconds; quantiles are as exact as the histogram's buckets.
    """
    return list(_latencies(job))


def _latencies(job: JobDetails) -> Iterator[Facts]:
    for name, details in sorted(job.histograms.items()):
        metric, *parts = name.split("|")
        if metric != END_TO_END or len(parts) != 2 or not any(details.counts):
            continue
        histogram = details.histogram()
        yield {
            "source": parts[0],
            "sink": parts[1],
            "count": histogram.count,
            "mean_seconds": histogram.total / histogram.count,
            "p50_seconds": histogram.quantile(0.5),
            "p99_seconds": histogram.quantile(0.99),
        }
