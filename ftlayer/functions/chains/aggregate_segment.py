"""Built-in aggregates of keys over a batch: a row out for each row in, with what the aggregates of its key are then."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ftlayer.functions.aggregates.per_record import overflow_error
from ftlayer.functions.aggregates.table import AggregateTable
from ftlayer.functions.aggregates.typed import AggregatePlan
from ftlayer.functions.failures import RowFailure, failure_of
from ftlayer.functions.outcome import I64, SegmentOutcome
from ftlayer.functions.retry_rules import RetryRules
from ftlayer.functions.undo.log import UndoLog


@dataclass(frozen=True)
class Aggregating:
    """A `KeyedAggregate` and its table."""

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
        self._done = 0

    @property
    def progress(self) -> int:
        """How many rows are done. Another thread may look."""
        return self._done

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
        self._done += rows.num_rows
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
