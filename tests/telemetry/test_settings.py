"""Where metrics and traces go, by the option and by OpenTelemetry's variables."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.common.rules.telemetry_settings import (
    OtlpTarget,
    Tracing,
    check_endpoint,
    interval_s,
    target_of,
    tracing_of,
)
from ftlayer.common.telemetry import is_usable, open_spans
from ftlayer.errors import ConfigError

BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"
OWN = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"


@pytest.mark.parametrize(
    ("endpoint", "environ", "target"),
    [
        (None, {}, None),
        (None, {BASE: ""}, None),
        (None, {BASE: "http://c:4318"}, OtlpTarget(None, "http://c:4318", False)),
        (None, {BASE: "http://c:4318", OWN: "http://m/x"}, OtlpTarget(None, "http://m/x", False)),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c"}, None),
        (None, {"OTEL_METRICS_EXPORTER": "otlp"}, OtlpTarget(None, "http://localhost:4318", False)),
        (None, {BASE: "http://c", "OTEL_METRICS_EXPORTER": "none"}, None),
        (None, {BASE: "http://c", "OTEL_METRICS_EXPORTER": "prometheus"}, None),
        (
            None,
            {BASE: "http://c", "OTEL_METRICS_EXPORTER": "prometheus, otlp"},
            OtlpTarget(None, "http://c", False),
        ),
        (None, {BASE: "http://c", "OTEL_SDK_DISABLED": "True"}, None),
        ("http://c:4318/", {}, OtlpTarget("http://c:4318/v1/metrics", "http://c:4318/", True)),
        ("http://c", {BASE: "http://other"}, OtlpTarget("http://c/v1/metrics", "http://c", True)),
        ("http://c", {"OTEL_SDK_DISABLED": "true"}, None),
        (
            None,
            {BASE: "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            OtlpTarget(None, "http://c", False),
        ),
    ],
)
def test_where_metrics_go(endpoint: str | None, environ: dict[str, str], target: OtlpTarget | None) -> None:
    assert target_of("metrics", endpoint, environ) == target


def test_each_signal_has_variables_of_its_own() -> None:
    environ = {"OTEL_TRACES_EXPORTER": "none", BASE: "http://c"}
    assert target_of("traces", None, environ) is None
    assert target_of("metrics", None, environ) is not None


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"])
def test_another_protocol_stops_no_program_and_is_said_where_it_would_be_used(
    variable: str, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {BASE: "http://c:4317", variable: "grpc"}
    target = target_of("metrics", None, environ)
    assert target is not None
    assert not is_usable(target, "metrics")
    assert (
        f"metrics are not sent. {variable}: ftlayer speaks http/protobuf, and it says 'grpc'" in caplog.text
    )
    assert target_of("metrics", None, {variable: "grpc"}) is None
    assert target_of("metrics", None, environ | {"OTEL_METRICS_EXPORTER": "none"}) is None


def test_traces_are_not_sent_by_another_protocol_either(caplog: pytest.LogCaptureFixture) -> None:
    tracing = tracing_of({BASE: "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", **RATIO})
    assert tracing is not None
    assert open_spans(tracing, "ftlayer-slot", "1.2") is None
    assert "traces are not sent. OTEL_EXPORTER_OTLP_PROTOCOL" in caplog.text


@pytest.mark.parametrize("endpoint", ["", "localhost:4318", "ftp://c", "http://", 7])
def test_what_is_no_collector(endpoint: Any) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint: expected the URL of a collector"):
        check_endpoint(endpoint, "otlp_endpoint")


def test_how_often() -> None:
    assert interval_s({}) == 60.0
    assert interval_s({"OTEL_METRIC_EXPORT_INTERVAL": "250"}) == 0.25
    for text in ("0", "-5", "soon", "inf", "nan"):
        with pytest.raises(ConfigError, match="OTEL_METRIC_EXPORT_INTERVAL: expected milliseconds"):
            interval_s({"OTEL_METRIC_EXPORT_INTERVAL": text})


RATIO = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"}


@pytest.mark.parametrize(
    ("environ", "tracing"),
    [
        ({BASE: "http://c:4318"}, None),
        (RATIO, None),
        ({BASE: "http://c:4318/", **RATIO}, Tracing(0.01, "http://c:4318/v1/traces")),
        (
            {BASE: "http://c", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/spans", **RATIO},
            Tracing(0.01, "http://t/spans"),
        ),
        ({**RATIO, "OTEL_TRACES_EXPORTER": "otlp"}, Tracing(0.01, "http://localhost:4318/v1/traces")),
        ({BASE: "http://c", **RATIO, "OTEL_TRACES_EXPORTER": "none"}, None),
        ({BASE: "http://c", **RATIO, "OTEL_TRACES_SAMPLER_ARG": "0"}, None),
        (
            {BASE: "http://c", "OTEL_TRACES_SAMPLER": "parentbased_traceidratio"},
            Tracing(1.0, "http://c/v1/traces"),
        ),
        ({BASE: "http://c", "OTEL_TRACES_SAMPLER": "always_on"}, None),
        ({BASE: "http://c", "OTEL_TRACES_SAMPLER": "xray"}, None),
    ],
)
def test_what_is_traced(environ: dict[str, str], tracing: Tracing | None) -> None:
    assert tracing_of(environ) == tracing


@pytest.mark.parametrize("share", ["2", "-1", "some", "nan"])
def test_a_share_that_is_none(share: str) -> None:
    with pytest.raises(ConfigError, match="OTEL_TRACES_SAMPLER_ARG: expected the share of records"):
        tracing_of({BASE: "http://c", **RATIO, "OTEL_TRACES_SAMPLER_ARG": share})


def test_a_password_is_not_told() -> None:
    target = target_of("metrics", "https://ada:secret@collector:4318/otlp", {})
    assert target is not None
    assert (target.endpoint, target.shown) == (
        "https://ada:secret@collector:4318/otlp/v1/metrics",
        "https://collector:4318/otlp",
    )
    with pytest.raises(ConfigError) as caught:
        check_endpoint("ftp://ada:secret@collector", "otlp_endpoint")
    assert "secret" not in str(caught.value)
