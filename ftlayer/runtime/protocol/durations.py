"""Durations as counters: slots count them by bucket, and the driver's meter adds up counters of all instances.

A histogram's counters are ``<name>/<part>/<bucket>`` and ``<name>/<part>/us``, its sum in microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ftlayer.histogram import Exemplar, Histogram

END_TO_END = "end_to_end"
"""From the moment at which a source had read records until a sink was done with them, by ``"<source>|<sink>"``."""

PERSIST = "persist"
"""From a slot's call that stores records to the vertex's answer, by the uid of the source's chain."""

_SUM = "us"


def counters_of(name: str, histograms: Mapping[str, Histogram]) -> dict[str, int]:
    """Return histograms, by part, as counters. What has no observation is left out."""
    counters: dict[str, int] = {}
    for part, histogram in histograms.items():
        counters[f"{name}/{part}/{_SUM}"] = round(histogram.total * 1e6)
        for bucket, count in enumerate(histogram.counts):
            if count:
                counters[f"{name}/{part}/{bucket}"] = count
    return counters


def exemplars_of(name: str, histograms: Mapping[str, Histogram]) -> dict[str, Exemplar]:
    """Return the exemplars of histograms, by part, under the name of their bucket's counter."""
    return {
        f"{name}/{part}/{bucket}": exemplar
        for part, histogram in histograms.items()
        for bucket, exemplar in enumerate(histogram.exemplars)
        if exemplar is not None
    }


def histograms_of(
    name: str,
    counters: Mapping[str, int],
    bounds: Sequence[float],
    exemplars: Mapping[str, Exemplar] = MappingProxyType({}),
) -> dict[str, Histogram]:
    """Return the histograms of a name, by part, out of counters that were added up, and exemplars by counter."""
    found: dict[str, Histogram] = {}
    for key, value in counters.items():
        if not key.startswith(f"{name}/"):
            continue
        part, _, bucket = key.removeprefix(f"{name}/").rpartition("/")
        histogram = found.setdefault(part, Histogram(bounds))
        if bucket == _SUM:
            histogram.total = value / 1e6
        else:
            histogram.counts[int(bucket)] = value
            histogram.exemplars[int(bucket)] = exemplars.get(key)
    return found
