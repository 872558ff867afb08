"""Spans that have ended, and their way to a collector by OpenTelemetry's SDK."""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftlayer.common.printable import shown_url
from ftlayer.common.rules.telemetry_settings import OtlpTarget, Tracing
from ftlayer.errors import ConfigError, install

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

_EXPORTER = "opentelemetry.exporter.otlp.proto.http"


def is_usable(target: OtlpTarget, what: str) -> bool:
    """Whether the SDK is there; ``what`` would go to ``target``.

    Raises `ConfigError` where it is missing and an option asks for it. A variable may be meant for all programs of a
    machine, and stops none: the log says what is missing.
    """
    if target.problem:
        logger.warning("%s are not sent. %s", what, target.problem)
        return False
    if _is_there(_EXPORTER) and _is_there("opentelemetry.sdk"):
        return True
    missing = f"{what} for {target.shown} need OpenTelemetry's SDK, which is not installed: {install('otel')}"
    if target.is_asked_for:
        raise ConfigError(missing)
    logger.warning("%s (or set OTEL_SDK_DISABLED=true here)", missing)
    return False


def resource_of(service: str, version: str) -> Resource:
    """Return what this process is called: ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` come first.

    ``service.instance.id`` is drawn, one for each process.
    """
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    ours = {"service.name": service, "service.version": version, "service.instance.id": str(uuid.uuid4())}
    return Resource.create({**ours, **OTELResourceDetector().detect().attributes})


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False


# The SDK's exporter says four lines for each push that fails. They are kept out of the log where the push is ours, and
# stay in it for what else of the program uses that exporter.

_NOISY = (
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.common.http",
    "urllib3.connectionpool",
)

_pushing = threading.local()


class CollectorNews:
    """Says once that a collector takes nothing, and once that it does again. For one thread at a time."""

    def __init__(self, what: str, where: str) -> None:
        self._what = what
        self._where = where
        self._was_taken = True

    def note(self, *, is_taken: bool) -> None:
        if self._was_taken and not is_taken:
            text = "%s are not taken at %s; it is tried again, and nothing else waits for it"
            logger.warning(text, self._what, self._where)
        elif is_taken and not self._was_taken:
            logger.info("%s are taken at %s again", self._what, self._where)
        self._was_taken = is_taken


@contextmanager
def pushing() -> Iterator[None]:
    """Keep out of the log what the SDK's exporter says in this thread, for as long as the ``with`` block runs."""
    for name in _NOISY:
        logging.getLogger(name).addFilter(_is_of_others)  # the same one again is no second one
    _pushing.now = True
    try:
        yield
    finally:
        _pushing.now = False


def _is_of_others(record: logging.LogRecord) -> bool:
    return not getattr(_pushing, "now", False)


LAST_SPANS_S = 1.0
"""How long the end of a process waits for its last spans to go out."""

_lock = threading.Lock()
_of_program: dict[tuple[int, str], SpanExport] = {}


@dataclass(frozen=True, slots=True)
class SpanError:
    message: str
    operator: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class EndedSpan:
    """A span that has ended: ids of 128 and 64 bits, times in Unix ns; ``parent`` is 0 for the first one of a trace."""

    trace: int
    span: int
    parent: int
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, str | int | bool] = field(default_factory=dict)
    error: SpanError | None = None


class SpanExport:
    """Sends spans to a collector from a thread of the SDK's, which drops them where it has too many. Any thread."""

    def __init__(self, endpoint: str, service: str, version: str) -> None:
        """``endpoint`` is the full URL for traces; headers, certificates and so on are the variables'."""
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._make = _maker(service, version)
        self._processor = BatchSpanProcessor(_exporter(endpoint))

    def send(self, span: EndedSpan) -> None:
        self._processor.on_end(self._make(span))

    def close(self) -> None:
        """Let what was sent go out, and wait for that a little."""
        closing = threading.Thread(target=self._processor.shutdown, name="ftlayer-spans", daemon=True)
        closing.start()
        closing.join(LAST_SPANS_S)


def open_spans(tracing: Tracing, service: str, version: str) -> SpanExport | None:
    """Return what sends the spans of this process; None where the SDK is missing, which the log says."""
    if not is_usable(OtlpTarget(tracing.endpoint, tracing.endpoint, False, tracing.problem), "traces"):
        return None
    logger.info("traces of %g of all records go to %s", tracing.ratio, shown_url(tracing.endpoint))
    return SpanExport(tracing.endpoint, service, version)


def program_spans(tracing: Tracing, service: str, version: str) -> SpanExport | None:
    """Return what sends spans until the program ends: one for an endpoint. None as `open_spans`."""
    pid = os.getpid()

    def close_own(spans: SpanExport) -> None:
        # A forked process has not its threads.
        if pid == os.getpid():
            spans.close()

    with _lock:
        found = _of_program.get((pid, tracing.endpoint))
        if found is None:
            found = open_spans(tracing, service, version)
            if found is not None:
                _of_program[pid, tracing.endpoint] = found
                atexit.register(close_own, found)
        return found


def _exporter(endpoint: str) -> SpanExporter:
    """Return the SDK's exporter, with our words in the log in place of its own."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    class Exporter(OTLPSpanExporter):
        news = CollectorNews("traces", shown_url(endpoint))

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            with pushing():
                result = super().export(spans)
            self.news.note(is_taken=result is SpanExportResult.SUCCESS)
            return result

    return Exporter(endpoint)


def _maker(service: str, version: str) -> Callable[[EndedSpan], ReadableSpan]:
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    resource, scope = resource_of(service, version), InstrumentationScope("ftlayer", version)
    sampled = TraceFlags(TraceFlags.SAMPLED)

    def make(span: EndedSpan) -> ReadableSpan:
        error, events = span.error, []
        if error is not None:
            said = {"exception.message": error.message, "ftlayer.operator": error.operator}
            if error.traceback:
                said["exception.stacktrace"] = error.traceback
            events.append(Event("exception", said, span.end_ns))
        return ReadableSpan(
            name=span.name,
            context=SpanContext(span.trace, span.span, is_remote=False, trace_flags=sampled),
            parent=SpanContext(span.trace, span.parent, is_remote=True) if span.parent else None,
            resource=resource,
            attributes=span.attributes,
            events=events,
            kind=SpanKind.INTERNAL if span.parent else SpanKind.PRODUCER,
            status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, error.message),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=scope,
        )

    return make
