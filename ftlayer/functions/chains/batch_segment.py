"""A function a batch at a time, and the search for the records that it cannot take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.common.printable import text_of
from ftlayer.errors import ResultRowError
from ftlayer.functions.chains.async_segment import AsyncSegment, RateLimiter, paced
from ftlayer.functions.chains.fused import MAX_FUSED, PreparedStep
from ftlayer.functions.chains.record_segment import RecordSegment
from ftlayer.functions.chains.window_segment import AggregateSegment, Aggregating, Windowing, WindowSegment
from ftlayer.functions.conversion import Form, cast_strictly, check_values, concat, no_such
from ftlayer.functions.current import current_tries
from ftlayer.functions.failures import (
    I64,
    SegmentOutcome,
    SideOutput,
    failed_rows,
    failure_of,
    raise_signalled,
    without_rows,
)
from ftlayer.functions.steps import MapAsync, MapBatches, RecordStep
from ftlayer.functions.undo.log import UndoLog
from ftlayer.records.failures import RowFailure
from ftlayer.records.ids import attempts_of, first_failed_of

ROW_TAG = "_ft_row"
"""The column of a tagged `MapBatches`: the input row's number, int32."""

ATTEMPT_TAG = "_ft_attempt"
"""A further one, which a result may leave out: which run of the row's record this is, from 1, int32."""

FIRST_FAILED_TAG = "_ft_first_failed_at"
"""And another: when the record first failed, a timestamp (UTC, ms), null if it has not."""


class BatchSegment:
    """A function a batch at a time. Where it raises, halves are tried, so that just the culprits fail."""

    def __init__(self, step: MapBatches) -> None:
        self._step = step

    def run(self, rows: pa.RecordBatch, parents: I64, times: I64 | None = None) -> SegmentOutcome:
        """Run rows through the function; ``parents`` is what each comes from. Times make no difference."""
        failures: list[RowFailure] = []
        done: list[tuple[pa.RecordBatch, I64]] = []
        self._run(rows, parents, done, failures)
        if len(done) == 1:
            return SegmentOutcome(*done[0], failures)
        whole = concat([result for result, _ in done], self._step.schema)
        origins: I64 = np.concatenate([part for _, part in done]) if done else np.zeros(0, np.int64)
        return SegmentOutcome(whole, origins, failures)

    def _run(
        self,
        batch: pa.RecordBatch,
        parents: I64,
        done: list[tuple[pa.RecordBatch, I64]],
        failures: list[RowFailure],
    ) -> None:
        if not batch.num_rows:
            return
        try:
            result, rows = self._call(batch, parents)
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
            raise_signalled(error)
            if batch.num_rows == 1:
                failures.append(failure_of(int(parents[0]), self._step.uid, error, self._step.rules))
                return
            half = batch.num_rows // 2
            self._run(batch.slice(0, half), parents[:half], done, failures)
            self._run(batch.slice(half), parents[half:], done, failures)
        else:
            done.append((result, parents[rows]))

    def _call(self, batch: pa.RecordBatch, parents: I64) -> tuple[pa.RecordBatch, I64]:
        """Call the function; return its result and the row of ``batch`` that each of its rows comes from."""
        step = self._step
        if step.tagged:
            batch = _tagged(batch, parents)
        given: Any = batch.to_pandas() if step.kind == "pandas" else batch
        result = step.function(given)
        try:
            return self._checked(result, batch)
        except Exception as error:
            raise ResultRowError(text_of(error)) from error

    def _checked(self, result: Any, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, I64]:
        step = self._step
        if step.kind == "pandas":
            result = self._from_pandas(result)
        if not isinstance(result, pa.RecordBatch):
            raise TypeError(f"{step.uid!r} returned a {type(result).__name__}, not a pyarrow.RecordBatch")
        self._check_columns(result.schema.names)
        rows: I64
        if step.tagged:
            tags = result.column(ROW_TAG).cast(pa.int32())
            if tags.null_count:
                raise ValueError(f"{step.uid!r} returned rows whose {ROW_TAG!r} is null")
            rows = tags.to_numpy().astype(np.int64)
            if len(rows) and (rows.min() < 0 or rows.max() >= batch.num_rows):
                raise ValueError(f"{step.uid!r} returned {ROW_TAG!r} values that were not among its input's")
        elif result.num_rows != batch.num_rows:
            raise ValueError(
                f"{step.uid!r} got {batch.num_rows} rows and returned {result.num_rows}: without tagged=True "
                "a row comes from the row in its place; use flat_map or filter, or tagged=True and keep "
                f"the column {ROW_TAG!r}"
            )
        else:
            rows = np.arange(batch.num_rows, dtype=np.int64)
        columns = []
        for field in step.schema:
            columns.append(cast_strictly(result.column(field.name), field.type, f"column {field.name!r}"))
            if not field.nullable and columns[-1].null_count:
                raise ValueError(f"column {field.name!r} is null and may not be")
        return pa.RecordBatch.from_arrays(columns, schema=step.schema), rows

    def _check_columns(self, names: Sequence[str]) -> None:
        step = self._step
        if step.tagged and ROW_TAG not in names:
            raise ValueError(f"{step.uid!r} is tagged and returned no column {ROW_TAG!r}")
        missing = [name for name in step.schema.names if name not in names]
        if missing:
            raise ValueError(f"{step.uid!r} returned no column {missing[0]!r}, which its schema has")
        known = {*step.schema.names, *((ROW_TAG, ATTEMPT_TAG, FIRST_FAILED_TAG) if step.tagged else ())}
        if not step.rules.lax and not known.issuperset(names):
            extra = next(name for name in names if name not in known)
            raise ValueError(
                f"{step.uid!r} returned more than its schema has: {no_such('column', extra, step.schema.names)}"
            )

    def _from_pandas(self, result: Any) -> pa.RecordBatch:
        """Convert as the schema says: inference would not know a map, nor an empty list's type."""
        step = self._step
        import pandas as pd

        if not isinstance(result, pd.DataFrame):
            raise TypeError(f"{step.uid!r} returned a {type(result).__name__}, not a pandas.DataFrame")
        self._check_columns(list(result.columns))
        schema = step.schema.append(pa.field(ROW_TAG, pa.int32())) if step.tagged else step.schema
        columns = []
        for field in schema:
            series, what = result[field.name], f"column {field.name!r}"
            if series.dtype == object:
                check_values(series[series.notna()].tolist(), field.type, what, lax=step.rules.lax)
                columns.append(pa.array(series, field.type, from_pandas=True))
            else:
                columns.append(cast_strictly(pa.array(series, from_pandas=True), field.type, what))
        return pa.RecordBatch.from_arrays(columns, schema=schema)


def _tagged(batch: pa.RecordBatch, parents: I64) -> pa.RecordBatch:
    tries = current_tries(parents)
    failed_ms = first_failed_of(tries)
    columns = [
        pa.array(np.arange(batch.num_rows, dtype=np.int32)),
        pa.array(attempts_of(tries)),
        pa.array(failed_ms, mask=failed_ms == 0).cast(pa.timestamp("ms", tz="UTC")),
    ]
    for name, column in zip((ROW_TAG, ATTEMPT_TAG, FIRST_FAILED_TAG), columns, strict=True):
        batch = batch.append_column(name, column)
    return batch


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
        if len(segments) == 1:
            return outcome
        rows, parents = outcome.batch, outcome.parents
        failures += outcome.failures
        side += outcome.side
    return SegmentOutcome(rows, parents, failures, side)
