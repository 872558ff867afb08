"""The functions of a stage, run over one Arrow batch in a Python worker; a record that raises fails alone.

A row of the result names the input row it comes from (``parents``). An input row with a failure
anywhere in the chain yields nothing: all or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ftlayer.common.rules.restart import TRACEBACK
from ftlayer.errors import QueryError
from ftlayer.functions.chains.record_segment import CHUNK_ROWS, RecordSegment
from ftlayer.functions.chains.segments import RateLimiter, run_segments, segments_of
from ftlayer.functions.conversion import DICTS
from ftlayer.functions.current import UNTRACKED, Known, running
from ftlayer.functions.failures import I64, failed_rows, without_rows
from ftlayer.functions.steps import FunctionStep, MapAsync, MapBatches
from ftlayer.records.failures import RowFailure

CALLED_ROWS = 65_536
"""Where calls overlap, so many rows go through a chain at once at most …"""

CALLED_BYTES = 8 << 20
"""… and about so many bytes of them."""


def rows_at_once(functions: Sequence[FunctionStep], batch: pa.RecordBatch) -> int:
    """Return how many rows of ``batch`` go through a chain at once.

    The slowest call of those that are made together is waited for: with an asynchronous function they are as many as
    the batch has, within bounds. A function of batches gets no more than `CHUNK_ROWS`, whatever is beside it.
    """
    kinds = {type(step) for step in functions}
    if MapAsync not in kinds or MapBatches in kinds:
        return CHUNK_ROWS
    a_row: int = max(batch.nbytes // max(batch.num_rows, 1), 1)
    return max(CHUNK_ROWS, min(CALLED_ROWS, CALLED_BYTES // a_row))


@dataclass(frozen=True)
class ChainResult:
    """Rows out, the input row of each (ascending within one chunk), and what failed."""

    batches: list[tuple[pa.RecordBatch, I64]]
    failures: list[RowFailure]

    def without_failed(self) -> ChainResult:
        if not self.failures:
            return self
        failed = failed_rows(self.failures)
        kept = [without_rows(batch, parents, failed) for batch, parents in self.batches]
        return ChainResult([(batch, parents) for batch, parents in kept if batch.num_rows], self.failures)


class Chain:
    """Functions made ready to run, whose records are dicts; made once for a task.

    It waits between the records of functions with a rate limit.
    """

    def __init__(
        self, functions: Sequence[FunctionStep], pace: Callable[[float], RateLimiter] = RateLimiter
    ) -> None:
        paces = {step.uid: pace(step.rate_limit) for step in functions if step.rate_limit is not None}
        self._functions = tuple(functions)
        self._segments = segments_of(functions, DICTS, paces=paces)

    def run(self, batch: pa.RecordBatch, known: Known = UNTRACKED) -> ChainResult:
        """Run ``batch`` through the functions; what one raises fails its record and goes no further.

        ``known`` is what functions may ask of its rows (`ftlayer.functions.current`).
        """
        done = ChainResult([], [])
        with running(known, self._row):
            rows = rows_at_once(self._functions, batch)
            for start in range(0, batch.num_rows, rows):
                chunk = batch.slice(start, rows)
                parents: I64 = np.arange(start, start + chunk.num_rows, dtype=np.int64)
                outcome = run_segments(self._segments, chunk, parents)
                done.failures.extend(outcome.failures)
                done.batches.append((outcome.batch, outcome.parents))
        return done.without_failed()

    def _row(self) -> int | None:
        rows = (segment.row for segment in self._segments if isinstance(segment, RecordSegment))
        return next((row for row in rows if row is not None), None)

    def run_untracked(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Run ``batch`` without tracking; raise the first failure as a `QueryError`."""
        at_once = rows_at_once(self._functions, batch)
        for start in range(0, batch.num_rows, at_once):
            result = self.run(batch.slice(start, at_once))
            if result.failures:
                first = result.failures[0]
                raise QueryError(f"{first.operator!r} failed: {first.reason}\n{TRACEBACK}\n{first.traceback}")
            for rows, _ in result.batches:
                yield rows
