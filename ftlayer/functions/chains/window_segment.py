"""Windows of built-in aggregates over a batch: rows go into their windows, and nothing comes out before timers fire."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ftlayer.functions.aggregates.per_record import AggregatePlan, overflow_error
from ftlayer.functions.aggregates.table import AggregateTable
from ftlayer.functions.chains.fused import Processing
from ftlayer.functions.chains.record_segment import RecordSegment
from ftlayer.functions.conversion import VALUES
from ftlayer.functions.failures import I64, SegmentOutcome, failure_of
from ftlayer.functions.retry_rules import RetryRules
from ftlayer.functions.undo.log import UndoLog
from ftlayer.functions.windows.function import WindowAggregates
from ftlayer.records.failures import RowFailure


@dataclass(frozen=True)
class Aggregating:
    uid: str
    plan: AggregatePlan
    schema: pa.Schema
    table: AggregateTable
    rules: RetryRules


class AggregateSegment:
    def __init__(self, step: Aggregating, log: UndoLog | None) -> None:
        """``log`` is where the changes of a batch are noted, to be taken back as a whole."""
        self._step = step
        self._log = log
        self.progress = 0

    def run(self, rows: pa.RecordBatch, parents: I64, times: I64 | None = None) -> SegmentOutcome:
        """Add rows; ``parents`` is what each comes from. Times make no difference.

        A row with which a sum would overflow fails, and changes nothing.
        """
        step, log = self._step, self._log
        mixed = log is not None and log.has_changes
        if not mixed:
            step.table.compact()
        columns, refused, kept = step.table.add(rows, undo=log is not None)
        if log is not None and kept is not None:
            log.add((step.table.restore, kept, None))
        batch = pa.RecordBatch.from_arrays([*step.plan.key_results(rows), *columns], schema=step.schema)
        self.progress += rows.num_rows
        if not refused:
            return SegmentOutcome(batch, parents, [])
        keep = np.ones(rows.num_rows, np.bool_)
        keep[[row for row, _ in refused]] = False
        failures = [self._failure(int(parents[row]), number) for row, number in refused]
        if log is not None:
            log.refused(failures, parents, mixed=mixed)
        return SegmentOutcome(batch.filter(pa.array(keep)), parents[keep], failures)

    def _failure(self, row: int, number: int) -> RowFailure:
        error = overflow_error(self._step.plan.aggregates[number])
        return failure_of(row, self._step.uid, error, self._step.rules, traced=False)


@dataclass(frozen=True)
class Windowing:
    """A process function of windows, and the table of their aggregates."""

    processing: Processing
    table: WindowAggregates

    @property
    def uid(self) -> str:
        return self.processing.uid


class WindowSegment:
    """Built-in aggregates of windows.

    Attributes:
        by_record: runs the process function for the rows that are too late for all their windows.
    """

    def __init__(self, step: Windowing, log: UndoLog | None) -> None:
        """``log`` is where the changes of a batch are noted, to be taken back as a whole."""
        self._step = step
        self._log = log
        self._done = 0
        self.by_record = RecordSegment([step.processing], step.processing.schema, VALUES, log=log)

    @property
    def progress(self) -> int:
        return self._done + self.by_record.progress

    def run(self, rows: pa.RecordBatch, parents: I64, times: I64 | None = None) -> SegmentOutcome:
        """Add rows to their windows; ``parents`` is what each comes from, ``times``, by that number, its event time.

        A row with which a sum would overflow fails, and changes nothing.
        """
        table = self._step.table
        if times is None:
            return self.by_record.run(rows, parents, None)
        if not table.takes(times[parents]):
            table.give_back()
            return self.by_record.run(rows, parents, times)
        mixed = self._log is not None and self._log.has_changes
        if not mixed:
            table.compact()
        failures: list[RowFailure] = []
        late = [np.empty(0, np.int64)]
        watermark_ms = self._step.processing.context.watermark
        for begin in range(0, rows.num_rows, table.rows_at_once):
            chunk = rows.slice(begin, table.rows_at_once)
            own = parents[begin : begin + chunk.num_rows]
            assigned = table.assign(times[own], watermark_ms)
            late.append(begin + assigned.late)
            refused = table.add_to(chunk, assigned, watermark_ms, self._log)
            failures += [self._failure(int(own[row]), number) for row, number in refused]
            self._done += chunk.num_rows - len(assigned.late)
        if self._log is not None:
            self._log.refused(failures, parents, mixed=mixed)
        rest = np.concatenate(late)
        outcome = self.by_record.run(rows.take(pa.array(rest)), parents[rest], times)
        return SegmentOutcome(outcome.batch, outcome.parents, [*failures, *outcome.failures], outcome.side)

    def _failure(self, row: int, number: int) -> RowFailure:
        processing = self._step.processing
        error = overflow_error(self._step.table.plan.aggregates[number])
        return failure_of(row, processing.uid, error, processing.rules, traced=False)
