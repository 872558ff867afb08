"""Spans of attempts, as the vertex sees them: from the registration of a root to its end."""

from __future__ import annotations

from ftlayer.records.traced import attempt_span, record_span, trace_of
from ftlayer.telemetry.spans import EndedSpan, SpanError
from ftlayer.vertex.rules.followed import EndedAttempt


def span_of(attempt: EndedAttempt) -> EndedSpan:
    """Return the span of an attempt, below the record's at its source."""
    cause = attempt.cause
    return EndedSpan(
        trace_of(attempt.origin),
        attempt_span(attempt.root),
        record_span(attempt.origin),
        f"attempt {attempt.number}",
        attempt.began_ms * 1_000_000,
        attempt.ended_ms * 1_000_000,
        {
            "ftlayer.stream": attempt.stream,
            "ftlayer.attempt": attempt.number,
            "ftlayer.outcome": str(attempt.outcome),
            "ftlayer.root": f"{attempt.root:016x}",
            "ftlayer.origin": f"{attempt.origin:016x}",
            **({} if cause is None or not cause.place else {"ftlayer.place": cause.place}),
        },
        None if cause is None else SpanError(cause.reason, cause.operator, cause.traceback),
    )
