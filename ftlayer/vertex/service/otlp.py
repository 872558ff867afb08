"""Pushes the metrics of a vertex or a board to an OpenTelemetry collector, beside what Prometheus asks for."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping

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

from ftlayer import __version__
from ftlayer.common.rules.histogram import Histogram
from ftlayer.common.rules.telemetry_settings import interval_s, target_of
from ftlayer.common.telemetry import CollectorNews, is_usable, pushing, resource_of
from ftlayer.errors import FTLayerError
from ftlayer.vertex.metrics.catalogue import OTLP_EXPORTS, Families, Labels, Metric, MetricKind

logger = logging.getLogger(__name__)


# Families of samples as OpenTelemetry's SDK has them, to be given to its exporter.
#
# The SDK's instruments take single observations, and these are totals already: so its data is made here, as its bridges
# from Prometheus do. Names are ``ftlayer.`` and the rest of Prometheus' name without its unit, which is told as such;
# what a collector writes to Prometheus has the very names of the endpoint again, and the same labels.


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


LAST_PUSH_S = 3.0
"""How long the end of a process waits for its last push."""


class OtlpMetrics:
    """Pushes what ``gather`` returns, on a thread of its own, while the ``with`` block runs and a collector is named.

    Pushes that fail are counted; the next one has all totals again.
    """

    def __init__(
        self,
        gather: Callable[[], Families],
        endpoint: str | None,
        service: str,
        *,
        interval_s: float | None = None,
    ) -> None:
        """``endpoint`` is a collector's base URL, None: as the variables of OpenTelemetry say; ``service`` its name."""
        self._gather = gather
        self._endpoint = endpoint
        self._service = service
        self._interval_s = interval_s
        self._shown = ""
        self._push: Callable[[Families], bool] = lambda families: False
        self._close: Callable[[], None] = lambda: None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._counts = {"done": 0, "failed": 0}
        self._pid = os.getpid()

    def __enter__(self) -> OtlpMetrics:
        """Begin to push; `ConfigError` where the SDK is missing and an option asks for it, and for odd variables."""
        target = target_of("metrics", self._endpoint, os.environ)
        if target is not None and is_usable(target, "metrics"):
            if self._interval_s is None:
                self._interval_s = interval_s(os.environ)
            self._shown = target.shown
            self._open(target.endpoint)
            self._thread = threading.Thread(target=self._run, name="ftlayer-otlp", daemon=True)
            self._thread.start()
            logger.info("metrics are pushed to %s every %g s", self._shown, self._interval_s)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Push once more, wait for that a little, and end. In a forked process: do nothing."""
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        self._stop.set()
        thread.join(LAST_PUSH_S)
        self._close()

    def counted(self) -> Families:
        """Gather, and add how many pushes there were where there are any. Any thread."""
        families = self._gather()
        if self._shown:
            for outcome, count in self._counts.items():
                families.add(OTLP_EXPORTS, count, {"outcome": outcome})
        return families

    def _open(self, endpoint: str | None) -> None:
        # Late: it is there with the extra alone, and takes 0.2 s.
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import MetricExportResult

        exporter = OTLPMetricExporter(endpoint)
        resource = resource_of(self._service, __version__)
        starts = Starts(time.time_ns())

        def push(families: Families) -> bool:
            data = metrics_data(families, resource, __version__, starts, time.time_ns())
            with pushing():
                return exporter.export(data) is MetricExportResult.SUCCESS

        self._push, self._close = push, exporter.shutdown

    def _run(self) -> None:
        news = CollectorNews("metrics", self._shown)
        while True:
            is_last = self._stop.wait(self._interval_s)
            is_taken = self._push_once()
            self._counts["done" if is_taken else "failed"] += 1
            news.note(is_taken=is_taken)
            if is_last:
                return

    def _push_once(self) -> bool:
        try:
            return self._push(self.counted())
        except FTLayerError as error:
            logger.warning("metrics cannot be gathered: %s", error)
        except Exception:
            # The end of a thread would go unseen; this is counted, and said.
            logger.exception("metrics cannot be pushed")
        return False
