"""Traces of a wrapped query: a batch is a trace, its phases are its spans."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping

import numpy as np

from ftlayer import __version__
from ftlayer.records.traced import Sampler, record_span, span_within, trace_of
from ftlayer.telemetry.settings import tracing_of
from ftlayer.telemetry.spans import EndedSpan, program_spans
from ftlayer.vertex.calls.jobs import BatchDetails

Times = tuple[float, float]
"""From and to, in ms since a batch's begin."""


class BatchTraces:
    """Makes spans of the batches of one start of a query. For the batch's thread."""

    def __init__(
        self, sampler: Sampler, query: str, execution: str, send: Callable[[EndedSpan], None]
    ) -> None:
        """``query`` is what people call it, ``execution`` names this start."""
        self._sampler = sampler
        self._query = query
        self._execution = execution
        self._send = send

    def through(self, batch: BatchDetails, phases: Mapping[str, Times]) -> None:
        """A batch is through: send its spans, if it is one of the share that is traced."""
        name = hashlib.blake2b(f"{self._execution}/{batch.batch}".encode(), digest_size=8).digest()
        origin = int.from_bytes(name, "little") or 1
        if not self._sampler.mask(np.array([origin], np.uint64))[0]:
            return
        began_ms = batch.at_ms - batch.duration_ms
        counts: dict[str, str | int | bool] = {
            "ftlayer.batch.rows": batch.rows,
            "ftlayer.batch.from_vertex": batch.delivered,
            "ftlayer.batch.failed": batch.failed,
            "ftlayer.batch.died": batch.dead,
        }
        told: dict[str, str | int | bool] = {"ftlayer.query": self._query, "ftlayer.batch": batch.batch}
        whole = record_span(origin)
        spans = [(whole, 0, "batch", (0.0, batch.duration_ms), {**told, **counts})]
        for place, (phase, times) in enumerate(phases.items()):
            spans.append((span_within(whole, place + 1), whole, phase, times, told))
        for span, parent, title, (start_ms, end_ms), attributes in spans:
            start_ns, end_ns = (int((began_ms + ms) * 1e6) for ms in (start_ms, end_ms))
            self._send(EndedSpan(trace_of(origin), span, parent, title, start_ns, end_ns, attributes))


def batch_traces(query: str, execution: str) -> BatchTraces | None:
    """Return what traces a query's batches, as OpenTelemetry's variables say; None where nothing is traced.

    Raises as `tracing_of`.
    """
    tracing = tracing_of(os.environ)
    spans = None if tracing is None else program_spans(tracing, "ftlayer-driver", __version__)
    if tracing is None or spans is None:
        return None
    return BatchTraces(Sampler(tracing.ratio), query, execution, spans.send)
