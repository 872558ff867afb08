"""Families of samples: what a metric is, and its values by labels. No library of any monitoring system."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ftlayer.histogram import Histogram

Labels = tuple[tuple[str, str], ...]


_UNITS = {"_seconds": "s", "_bytes": "By", "_ratio": "1"}


class MetricKind(StrEnum):
    """How a metric's values are to be read."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Merge(StrEnum):
    """What becomes of two values with the same labels: of two queries of one name, of two subtasks in one slot."""

    SUM = "sum"
    LARGEST = "largest"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name (of a counter without ``_total``), what its values are, and what they say.

    Durations are in seconds, sizes in bytes, ratios from 0 to 1, and names end so. ``of`` is what is counted otherwise,
    in the singular.
    """

    name: str
    kind: MetricKind
    text: str
    merge: Merge = Merge.SUM
    of: str = ""

    @property
    def unit(self) -> str:
        """The unit as UCUM has it, for OpenTelemetry; "" where there is none."""
        for ending, unit in _UNITS.items():
            if self.name.endswith(ending):
                return unit
        return f"{{{self.of}}}" if self.of else ""


class Families:
    """Samples by metric, in the order in which metrics first came. Those with the same labels become one."""

    def __init__(self) -> None:
        self._values: dict[Metric, dict[Labels, float]] = {}
        self._histograms: dict[Metric, dict[Labels, Histogram]] = {}

    def add(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Add a sample of a counter or gauge; an empty label is left out."""
        samples = self._values.setdefault(metric, {})
        key = _key(labels)
        before = samples.get(key)
        if before is None:
            samples[key] = value
        elif metric.merge is Merge.LARGEST:
            samples[key] = max(before, value)
        else:
            samples[key] = before + value

    def observe(self, metric: Metric, histogram: Histogram, labels: Mapping[str, str]) -> None:
        """Add a histogram; an empty label is left out. One of other bounds than the first replaces none: it is
        of another version of ftlayer, and is left out.
        """
        samples = self._histograms.setdefault(metric, {})
        key = _key(labels)
        mine = samples.setdefault(key, Histogram(histogram.bounds))
        if mine.bounds == histogram.bounds:
            mine.merge(histogram)

    def values(self) -> Iterator[tuple[Metric, list[tuple[dict[str, str], float]]]]:
        """Give counters and gauges with their samples."""
        for metric, samples in self._values.items():
            yield metric, [(dict(labels), value) for labels, value in samples.items()]

    def histograms(self) -> Iterator[tuple[Metric, list[tuple[dict[str, str], Histogram]]]]:
        for metric, samples in self._histograms.items():
            yield metric, [(dict(labels), histogram) for labels, histogram in samples.items()]


def _key(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted((name, value) for name, value in labels.items() if value))
