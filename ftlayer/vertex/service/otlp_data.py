"""Families of samples as OpenTelemetry's SDK has them, to be given to its exporter.

The SDK's instruments take single observations, and these are totals already: so its data is made here, as its bridges
from Prometheus do. Names are ``ftlayer.`` and the rest of Prometheus' name without its unit, which is told as such;
what a collector writes to Prometheus has the very names of the endpoint again, and the same labels.

Imported late: the SDK is there with the extra alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    HistogramDataPoint,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as OtlpHistogram
from opentelemetry.sdk.metrics.export import Metric as OtlpMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from ftlayer.common.rules.histogram import Histogram
from ftlayer.vertex.metrics.catalogue import Families, Labels, Metric, MetricKind

_CUMULATIVE = AggregationTemporality.CUMULATIVE

Series = tuple[Metric, Labels]


class Starts:
    """Since when each total counts: since the push before its first one, and anew whenever it has gone down."""

    def __init__(self, began_ns: int) -> None:
        """``began_ns`` (Unix): what is there at the first push has counted since then at the earliest."""
        self._last_ns = began_ns
        self._before: dict[Series, tuple[int, float]] = {}
        self._now: dict[Series, tuple[int, float]] = {}

    def since(self, series: Series, total: float) -> int:
        """Return since when (Unix, ns) a total counts that is told in this push."""
        since_ns, before = self._before.get(series, (self._last_ns, 0.0))
        if total < before:
            since_ns = self._last_ns
        self._now[series] = since_ns, total
        return since_ns

    def pushed(self, now_ns: int) -> None:
        """What comes from now on is of another push. A series that was not in this one begins anew."""
        self._last_ns = now_ns
        self._before, self._now = self._now, {}


def metrics_data(
    families: Families, resource: Resource, version: str, starts: Starts, now_ns: int
) -> MetricsData:
    """Return all samples as they are at ``now_ns`` (Unix)."""
    metrics = [*_values(families, starts, now_ns), *_histograms(families, starts, now_ns)]
    scope = ScopeMetrics(InstrumentationScope("ftlayer", version), metrics, "")
    starts.pushed(now_ns)
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def otlp_name(metric: Metric) -> str:
    """Return a metric's name without its unit, in the namespace ``ftlayer``."""
    name = metric.name.removeprefix("ftlayer_")
    return f"ftlayer.{name.removesuffix('_seconds').removesuffix('_bytes')}"


def _values(families: Families, starts: Starts, now_ns: int) -> Iterator[OtlpMetric]:
    for metric, samples in families.values():
        is_total = metric.kind is MetricKind.COUNTER
        points = [
            NumberDataPoint(
                labels,
                starts.since(_series(metric, labels), value) if is_total else 0,
                now_ns,
                _number(metric, value),
            )
            for labels, value in samples
        ]
        data = Sum(points, _CUMULATIVE, is_monotonic=True) if is_total else Gauge(points)
        yield OtlpMetric(otlp_name(metric), metric.text, metric.unit, data)


def _histograms(families: Families, starts: Starts, now_ns: int) -> Iterator[OtlpMetric]:
    for metric, samples in families.histograms():
        points = [
            _point(labels, histogram, starts.since(_series(metric, labels), histogram.count), now_ns)
            for labels, histogram in samples
        ]
        yield OtlpMetric(otlp_name(metric), metric.text, metric.unit, OtlpHistogram(points, _CUMULATIVE))


def _point(labels: dict[str, str], histogram: Histogram, since_ns: int, now_ns: int) -> HistogramDataPoint:
    exemplars = [
        Exemplar({"root": f"{each.root:016x}"}, each.value, each.at_ms * 1_000_000)
        for each in histogram.exemplars
        if each is not None
    ]
    return HistogramDataPoint(
        labels,
        since_ns,
        now_ns,
        histogram.count,
        histogram.total,
        histogram.counts,
        histogram.bounds,
        None,  # type: ignore[arg-type]  # the protocol has them optional, and they are not known
        None,  # type: ignore[arg-type]
        exemplars,
    )


def _number(metric: Metric, value: float) -> int | float:
    """Return a count as a whole number, as the protocol has both."""
    return value if metric.unit in ("s", "1") else int(value)


def _series(metric: Metric, labels: Mapping[str, str]) -> Series:
    return metric, tuple(sorted(labels.items()))
