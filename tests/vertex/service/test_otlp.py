"""Metrics that are pushed to an OpenTelemetry collector: what it gets, and what happens while it is down."""

from __future__ import annotations

import logging
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality

from ftlayer import __version__
from ftlayer.common import telemetry as sdk
from ftlayer.common.rules.histogram import Histogram
from ftlayer.config import VertexOptions
from ftlayer.errors import ConfigError, VertexUnavailableError
from ftlayer.vertex.metrics import catalogue
from ftlayer.vertex.metrics.catalogue import Families, Metric, MetricKind
from ftlayer.vertex.service.embedded import EmbeddedVertex
from ftlayer.vertex.service.otlp import OtlpMetrics
from ftlayer.vertex.service.otlp_data import Starts, otlp_name

LABELS = {"topology": "shop", "source": "orders"}


def _families(done: int = 7) -> Families:
    families = Families()
    families.add(catalogue.RECORDS["completed"], done, LABELS)
    families.add(catalogue.VERTEX["used_share"], 0.25, {})
    histogram = Histogram((0.1, 1.0))
    histogram.observe(0.05, 3, root=0xABC, at_ms=1_700_000_000_000)
    histogram.observe(7.0)
    families.observe(catalogue.COMPLETION, histogram, LABELS)
    return families


def _all_metrics() -> list[Metric]:
    found = [value for value in vars(catalogue).values() if isinstance(value, Metric)]
    for table in (catalogue.RECORDS, catalogue.VERTEX, catalogue.BATCH_ROWS):
        found += table.values()
    return found


def _prometheus_name(metric: Metric) -> str:
    """Name a metric as a collector's Prometheus exporter does: by its name, its unit and its kind."""
    name = re.sub(r"[^a-zA-Z0-9]", "_", otlp_name(metric))
    unit = {"s": "seconds", "By": "bytes", "1": "ratio"}.get(metric.unit, "")
    if unit and not name.endswith(f"_{unit}"):
        name = f"{name}_{unit}"
    return name


def test_names_come_back_as_the_endpoint_has_them_and_no_two_are_one() -> None:
    metrics = _all_metrics()
    assert len(metrics) > 40
    assert [_prometheus_name(metric) for metric in metrics] == [metric.name for metric in metrics]
    assert len({otlp_name(metric) for metric in metrics}) == len({metric.name for metric in metrics})
    assert otlp_name(catalogue.COMPLETION) == "ftlayer.record_completion"
    assert [catalogue.COMPLETION.unit, catalogue.PENDING.unit, catalogue.VERTEX["used_bytes"].unit] == [
        "s",
        "{record}",
        "By",
    ]


@given(st.lists(st.dictionaries(st.sampled_from("ab"), st.integers(0, 5)), max_size=12))
def test_a_total_counts_since_the_push_before_its_first_one_or_before_it_went_down(pushes: Any) -> None:
    metric = Metric("ftlayer_x", MetricKind.COUNTER, "x")
    starts = Starts(0)
    began: dict[str, int] = {}
    before: dict[str, int] = {}
    for now, totals in enumerate(pushes, 1):
        for name, total in totals.items():
            if name not in before or total < before[name]:
                began[name] = now - 1
            assert starts.since((metric, (("n", name),)), total) == began[name]
        before = totals
        starts.pushed(now)


def test_a_collector_gets_totals_histograms_with_exemplars_and_who_it_is(
    collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=me")
    with OtlpMetrics(_families, collector.url, "ftlayer-vertex", interval_s=0.05) as pushed:
        collector.until(lambda: len(collector.received) >= 2)
        counted = dict(pushed.counted().values())[catalogue.OTLP_EXPORTS]
    assert [labels["outcome"] for labels, _ in counted] == ["done", "failed"]
    assert counted[0][1] >= 1
    attributes = sys.modules["otlp_collector"].attributes
    metrics = collector.metrics()
    completed = metrics["ftlayer.records_completed"]
    assert (completed.unit, completed.sum.is_monotonic) == ("{record}", True)
    assert completed.sum.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    (point,) = completed.sum.data_points
    assert (point.as_int, attributes(point)) == (7, LABELS)
    assert 0 < point.start_time_unix_nano < point.time_unix_nano
    (used,) = metrics["ftlayer.store_used_ratio"].gauge.data_points
    assert used.as_double == 0.25
    completion = metrics["ftlayer.record_completion"]
    assert completion.unit == "s"
    assert completion.histogram.aggregation_temporality == completed.sum.aggregation_temporality
    (point,) = completion.histogram.data_points
    assert (list(point.explicit_bounds), list(point.bucket_counts), point.count) == ([0.1, 1.0], [3, 0, 1], 4)
    assert point.sum == pytest.approx(7.15)
    assert not point.HasField("min")
    (exemplar,) = point.exemplars
    assert exemplar.as_double == 0.05
    assert exemplar.time_unix_nano == 1_700_000_000_000_000_000
    assert [each.value.string_value for each in exemplar.filtered_attributes] == ["0000000000000abc"]
    resource = collector.resource()
    assert (resource["service.name"], resource["service.version"]) == ("ftlayer-vertex", __version__)
    assert resource["deployment.environment.name"] == "test"
    assert len(resource["service.instance.id"]) == 36
    assert collector.headers[-1]["x-tenant"] == "me"


def test_a_collector_that_refuses_is_said_once_counted_and_told_all_later(
    collector: Any, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400  # not one that is tried again at once
    with (
        caplog.at_level(logging.INFO, logger="ftlayer"),
        OtlpMetrics(_families, collector.url, "ftlayer-vertex", interval_s=0.02) as pushed,
    ):
        collector.until(lambda: collector.requests >= 3)
        collector.status = 200
        collector.until(lambda: collector.received)
        counts = dict(pushed.counted().values())[catalogue.OTLP_EXPORTS]
    assert {labels["outcome"]: value for labels, value in counts}["failed"] >= 3
    assert collector.metrics()["ftlayer.records_completed"].sum.data_points[0].as_int == 7
    said = [record.getMessage() for record in caplog.records if record.name.startswith("ftlayer")]
    assert sum("are not taken" in line for line in said) == 1
    assert sum("are taken" in line for line in said) == 1


def test_a_collector_that_is_down_keeps_nothing_waiting_and_is_one_line_of_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end does not wait for tries that are under way."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with OtlpMetrics(_families, "http://127.0.0.1:9", "ftlayer-vertex", interval_s=0.01) as pushed:

        def failed() -> float:
            counts = dict(pushed.counted().values())[catalogue.OTLP_EXPORTS]
            return {labels["outcome"]: value for labels, value in counts}["failed"]

        deadline = time.monotonic() + 120
        while failed() < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "metrics are not taken at http://127.0.0.1:9" in caplog.text


def test_what_cannot_be_gathered_is_a_push_that_failed(collector: Any) -> None:
    moments: list[int] = []

    def gather() -> Families:
        moments.append(1)
        if len(moments) < 3:
            raise VertexUnavailableError("the vertex is stopping")
        return _families()

    with OtlpMetrics(gather, collector.url, "ftlayer-vertex", interval_s=0.02):
        collector.until(lambda: collector.received)
    assert len(moments) >= 3


def test_without_the_sdk_an_option_is_refused_and_a_variable_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sdk, "_is_there", lambda module: False)
    with pytest.raises(ConfigError, match=r"pip install '\.\[otel\]'"):
        OtlpMetrics(_families, "http://c:4318", "ftlayer-vertex").__enter__()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318")
    with OtlpMetrics(_families, None, "ftlayer-vertex") as pushed:
        assert catalogue.OTLP_EXPORTS not in dict(pushed.counted().values())
    assert "pip install '.[otel]'" in caplog.text


def test_an_embedded_vertex_pushes_where_the_variables_say(
    collector: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shop-vertex")
    with EmbeddedVertex(VertexOptions(tmp_path / "vertex")):
        collector.until(lambda: collector.received)
    assert collector.resource()["service.name"] == "shop-vertex"
    assert {"ftlayer.build_info", "ftlayer.tracked_roots", "ftlayer.store_used"} <= collector.metrics().keys()
