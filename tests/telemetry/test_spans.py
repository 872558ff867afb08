"""Spans on their way to a collector."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from ftlayer.common import telemetry as sdk
from ftlayer.common.rules.telemetry_settings import Tracing
from ftlayer.common.telemetry import EndedSpan, SpanError, open_spans

TRACE = 5 << 64 | 7


def _span(**fields: Any) -> EndedSpan:
    return EndedSpan(TRACE, 9, 0, "orders", 1_000, 2_000, {"ftlayer.slot": 3, "ftlayer.root": "0a"}, **fields)


def test_a_collector_gets_spans_as_they_were(collector: Any) -> None:
    export = open_spans(Tracing(0.5, f"{collector.url}/v1/traces"), "ftlayer-slot", "1.2")
    assert export is not None
    export.send(_span())
    export.send(EndedSpan(TRACE, 10, 9, "parse", 3, 4, error=SpanError("no price", "parse", "Traceback …")))
    export.close()
    attributes = sys.modules["otlp_collector"].attributes
    first, second = collector.spans()
    assert first.trace_id == second.trace_id == TRACE.to_bytes(16)
    assert (first.span_id, first.parent_span_id) == ((9).to_bytes(8), b"")
    assert (first.name, first.start_time_unix_nano, first.end_time_unix_nano) == ("orders", 1_000, 2_000)
    assert attributes(first) == {"ftlayer.slot": 3, "ftlayer.root": "0a"}
    assert first.kind == first.SPAN_KIND_PRODUCER
    assert (second.span_id, second.parent_span_id) == ((10).to_bytes(8), first.span_id)
    assert (second.kind, second.status.code) == (second.SPAN_KIND_INTERNAL, second.status.STATUS_CODE_ERROR)
    assert second.status.message == "no price"
    (event,) = second.events
    assert (event.name, event.time_unix_nano) == ("exception", 4)
    assert attributes(event) == {
        "exception.message": "no price",
        "exception.stacktrace": "Traceback …",
        "ftlayer.operator": "parse",
    }
    assert collector.resource()["service.name"] == "ftlayer-slot"


def test_the_sdk_says_nothing_of_what_we_push_and_all_of_what_others_do(
    collector: Any, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400
    export = open_spans(Tracing(1.0, f"{collector.url}/v1/traces"), "ftlayer-slot", "1.2")
    assert export is not None
    export.send(_span())
    export.close()
    assert [record.name for record in caplog.records] == ["ftlayer.common.telemetry"]
    assert "traces are not taken at" in caplog.text
    logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").error("of another one")
    assert "of another one" in caplog.text


def test_a_collector_that_is_down_keeps_nothing_waiting() -> None:
    export = open_spans(Tracing(1.0, "http://127.0.0.1:9/v1/traces"), "ftlayer-slot", "1.2")
    assert export is not None
    for _ in range(5_000):  # more than wait for a collector
        export.send(_span())
    export.close()


def test_without_the_sdk_nothing_is_traced_and_the_log_says_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sdk, "_is_there", lambda module: False)
    assert open_spans(Tracing(1.0, "http://c/v1/traces"), "ftlayer-slot", "1.2") is None
    assert "traces for http://c/v1/traces need OpenTelemetry's SDK" in caplog.text
    assert "pip install '.[otel]'" in caplog.text
