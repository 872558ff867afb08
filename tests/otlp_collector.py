"""A collector for OTLP over HTTP, as far as tests need one: it keeps what it is sent, decoded, or refuses it."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

WAIT_S = 120.0
_KINDS = {"/v1/metrics": ExportMetricsServiceRequest, "/v1/traces": ExportTraceServiceRequest}


class Collector:
    """Listens on a free port. ``status`` is what it answers with; with another than 200 it keeps nothing."""

    def __init__(self) -> None:
        self.status = 200
        self.requests = 0
        self.headers: list[dict[str, str]] = []
        self.received: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.requests += 1
                if collector.status == 200:
                    collector.headers.append(dict(self.headers))
                    collector.received.append(_KINDS[self.path].FromString(body))
                self.send_response(collector.status)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def until(self, ready: Any) -> Any:
        """Wait until ``ready()`` returns something."""
        deadline = time.monotonic() + WAIT_S
        while not (found := ready()):
            assert time.monotonic() < deadline, (self.requests, self.received[-1:])
            time.sleep(0.02)
        return found

    # ------------------------------------------------------------ metrics

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last request that had some, by name."""
        for request in reversed(self.received):
            if isinstance(request, ExportMetricsServiceRequest):
                ((scope,),) = [each.scope_metrics for each in request.resource_metrics]
                return {metric.name: metric for metric in scope.metrics}
        return {}

    def resource(self) -> dict[str, str]:
        """Return what the sender of the last request calls itself."""
        if isinstance(self.received[-1], ExportMetricsServiceRequest):
            resource = self.received[-1].resource_metrics[0].resource
        else:
            resource = self.received[-1].resource_spans[0].resource
        return attributes(resource)

    # ------------------------------------------------------------ traces

    def spans(self) -> list[Any]:
        """Return all spans that came."""
        return [
            span
            for request in list(self.received)
            if isinstance(request, ExportTraceServiceRequest)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def attributes(what: Any) -> dict[str, Any]:
    """Return the attributes of a point, span or resource."""
    found = {}
    for each in what.attributes:
        kind = each.value.WhichOneof("value")
        found[each.key] = getattr(each.value, kind)
    return found
