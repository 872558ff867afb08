"""A chain cut into segments: per-record functions that share a loop, and what takes a batch at a time between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import pyarrow as pa

from ftlayer.functions.chains.async_segment import AsyncSegment, RateLimiter, paced
from ftlayer.functions.chains.batch_segment import BatchSegment
from ftlayer.functions.chains.fused import MAX_FUSED
from ftlayer.functions.chains.prepared import PreparedStep
from ftlayer.functions.chains.record_segment import RecordSegment
from ftlayer.functions.chains.window_segment import AggregateSegment, Aggregating, Windowing, WindowSegment
from ftlayer.functions.conversion import Form
from ftlayer.functions.failures import I64, RowFailure, SegmentOutcome, SideOutput, failed_rows, without_rows
from ftlayer.functions.steps import MapAsync, MapBatches, RecordStep
from ftlayer.functions.undo.log import UndoLog

Segment = RecordSegment | BatchSegment | AsyncSegment | AggregateSegment | WindowSegment

BatchStep = MapBatches | MapAsync | Aggregating | Windowing
"""What takes a batch at a time, or many of its records."""


NO_PACES: Mapping[str, RateLimiter] = {}


def segments_of(
    steps: Sequence[PreparedStep | BatchStep],
    form: Form,
    made_by: str = "",
    paces: Mapping[str, RateLimiter] = NO_PACES,
    log: UndoLog | None = None,
    *,
    keeps: bool = False,
) -> list[Segment]:
    """Group neighbouring per-record functions, so that records become Python objects once for all of them.

    ``made_by`` is the uid of the operator whose records, not checked yet, go into the first. ``paces`` are those by
    which the functions of these uids are called; without one, the caller sees to a step's ``rate_limit``. ``log`` is
    where the state of steps notes changes. ``keeps``: the steps alone use their tables (`RecordSegment`).
    """
    segments: list[Segment] = []
    for is_batch, group in groupby(steps, key=lambda step: isinstance(step, BatchStep)):
        neighbours = list(group)
        if is_batch:
            segments.extend(
                _alone(step, form, paces, log) for step in neighbours if isinstance(step, BatchStep)
            )
        else:
            per_record = [_paced(step, paces) for step in neighbours if not isinstance(step, BatchStep)]
            for start in range(0, len(per_record), MAX_FUSED):
                fused = per_record[start : start + MAX_FUSED]
                segments.append(RecordSegment(fused, fused[-1].schema, form, made_by, log, keeps=keeps))
    return segments


def _alone(step: BatchStep, form: Form, paces: Mapping[str, RateLimiter], log: UndoLog | None) -> Segment:
    if isinstance(step, Aggregating):
        return AggregateSegment(step, log)
    if isinstance(step, Windowing):
        return WindowSegment(step, log)
    if isinstance(step, MapBatches):
        return BatchSegment(step)
    return AsyncSegment(step, form, paces.get(step.uid))


def _paced(step: PreparedStep, paces: Mapping[str, RateLimiter]) -> PreparedStep:
    pace = paces.get(step.uid)
    return step if pace is None or not isinstance(step, RecordStep) else paced(step, pace)


def run_segments(
    segments: Sequence[Segment],
    rows: pa.RecordBatch | list[Any],
    parents: I64,
    times: I64 | None = None,
    log: UndoLog | None = None,
) -> SegmentOutcome:
    """Run rows (Python objects, if a `RecordSegment` is the first) through all segments.

    What came of an input row that failed in one of them goes no further, but what came out already is still there:
    `SegmentOutcome.failures` names the row. With ``log`` such a row has changed no state. Raises `LateFailure` where it
    has, and others behind it have seen that.
    """
    failures: list[RowFailure] = []
    side: list[SideOutput] = []
    for segment in segments:
        if failures:
            rows, parents = without_rows(rows, parents, failed_rows(failures))
        outcome = segment.run(rows, parents, times)
        if log is not None and outcome.failures and not isinstance(segment, RecordSegment):
            log.late(min(failure.row for failure in outcome.failures))
        rows, parents = outcome.batch, outcome.parents
        failures += outcome.failures
        side += outcome.side
    return SegmentOutcome(rows, parents, failures, side)
