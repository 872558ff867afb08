"""The segments of a chain that take a batch at a time, and how all segments are made and run, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.common.printable import text_of
from ftlayer.common.rules.restart import TRACEBACK
from ftlayer.errors import QueryError, ResultRowError
from ftlayer.functions import conversion
from ftlayer.functions.aggregates import AggregatePlan, AggregateTable, overflow_error
from ftlayer.functions.chains.fused import MAX_FUSED, PreparedStep, Processing
from ftlayer.functions.chains.record_segment import CHUNK_ROWS, RecordSegment
from ftlayer.functions.conversion import DICTS
from ftlayer.functions.current import UNTRACKED, Known, current_tries, for_calls, running
from ftlayer.functions.failures import (
    I64,
    SegmentOutcome,
    SideOutput,
    failed_rows,
    failure_of,
    raise_signalled,
    without_rows,
)
from ftlayer.functions.keyed import convert, misfit_of
from ftlayer.functions.retry_rules import RetryRules
from ftlayer.functions.steps import FunctionStep, MapAsync, MapBatches, RecordStep
from ftlayer.functions.token_bucket import TokenBucket
from ftlayer.functions.undo import UndoLog
from ftlayer.functions.windows import WindowAggregates
from ftlayer.records.failures import RowFailure
from ftlayer.records.ids import attempts_of, first_failed_of


class RateLimiter:
    """Lets ``rate`` calls a second go. A forked child begins with an empty bucket of its own."""

    def __init__(
        self,
        rate: float,
        now_ms: Callable[[], float] = lambda: time.monotonic_ns() / 1_000_000,
        sleep: Callable[[float], None] = time.sleep,
        sleep_async: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        """``sleep`` and ``sleep_async`` take seconds."""
        self._rate = rate
        self._now_ms = now_ms
        self._sleep = sleep
        self._sleep_async = sleep_async
        self._begin()

    def wait(self) -> None:
        while (seconds := self._take()) is not None:
            self._sleep(seconds)

    async def wait_async(self) -> None:
        """As `wait`. One caller at a time."""
        while (seconds := self._take()) is not None:
            await self._sleep_async(seconds)

    def _take(self) -> float | None:
        """Let a call go; otherwise return for how many seconds to wait before the next look."""
        if self._pid != os.getpid():
            self._begin()
        if self._bucket.available(self._now_ms()):
            self._bucket.take(1)
            return None
        return self._bucket.wait_ms() / 1_000

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._bucket = TokenBucket(self._rate, self._now_ms())


def paced(step: RecordStep, pace: RateLimiter) -> RecordStep:
    function = step.function

    def call(record: Any) -> Any:
        pace.wait()
        return function(record)

    return replace(step, function=call)


_NONE = object()
"""In the place of a result that there is none of."""

_loops: dict[int, asyncio.AbstractEventLoop] = {}
_starting = threading.Lock()


class AsyncSegment:
    """A `MapAsync`. A batch is through when all its calls are: none is under way between two batches.

    So a barrier, a snapshot or the end of a task finds every record done or failed, as behind a plain function. The
    calls run in one event loop of the process, in a thread of its own, which is the same for all batches: sessions
    and connection pools may live in it.

    Attributes:
        progress: how many calls have come to their end. Another thread may look.
    """

    def __init__(self, step: MapAsync, form: conversion.Form, pace: RateLimiter | None = None) -> None:
        self._step = step
        self._pace = pace
        self._form = form
        self.progress = 0

    def run(self, rows: pa.RecordBatch | list[Any], parents: I64, times: I64 | None = None) -> SegmentOutcome:
        records = rows if isinstance(rows, list) else conversion.records_in_form(rows, self._form)
        calls = _Calls(self._step, records, parents, self._count, self._pace)
        asyncio.run_coroutine_threadsafe(calls.make(), _loop()).result()
        return self._outcome(calls, parents)

    def _count(self) -> None:
        self.progress += 1

    def _outcome(self, calls: _Calls, parents: I64) -> SegmentOutcome:
        step, failures = self._step, calls.failures
        good = [place for place, result in enumerate(calls.results) if result is not _NONE]
        came = parents[good]

        def misfit(place: int, error: BaseException) -> None:
            row, wanted = int(came[place]), self._form.expected(step.schema)
            failures.append(misfit_of(row, step.uid, "returned", step.schema, error, step.rules, wanted))

        results = [calls.results[place] for place in good]
        batch, counts = convert(
            results, [1] * len(results), step.schema, self._form, misfit, lax=step.rules.lax
        )
        return SegmentOutcome(batch, np.repeat(came, counts), failures)


class _Calls:
    """The calls for the records of one batch. Used by the event loop alone, and read when all have ended.

    Attributes:
        results: of each call; `_NONE` where it failed.
        failures: one for each that failed.
    """

    def __init__(
        self,
        step: MapAsync,
        records: Sequence[Any],
        parents: I64,
        count: Callable[[], None],
        pace: RateLimiter | None,
    ) -> None:
        self.results: list[Any] = [_NONE] * len(records)
        self.failures: list[RowFailure] = []
        self._step = step
        self._records = records
        self._parents: list[int] = parents.tolist()
        self._count = count
        self._pace = pace
        self._waiting = asyncio.Lock()
        self._begin = for_calls()
        self._left = iter(range(len(records)))

    async def make(self) -> None:
        await asyncio.gather(*(self._work() for _ in range(min(self._step.in_flight, len(self._records)))))

    async def _work(self) -> None:
        for place in self._left:
            await self._wait()
            row = self._parents[place]
            self._begin(row)
            try:
                self.results[place] = await self._call(self._records[place])
            except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
                self.failures.append(failure_of(row, self._step.uid, error, self._step.rules))
            self._count()

    async def _wait(self) -> None:
        if self._pace is not None:
            async with self._waiting:
                await self._pace.wait_async()

    async def _call(self, record: Any) -> Any:
        if isinstance(record, Exception):  # Python cannot hold it
            raise record
        limit = asyncio.timeout(self._step.timeout_ms / 1_000)
        try:
            async with limit:
                result = await self._step.function(record)
        except TimeoutError as error:
            if not limit.expired():
                raise  # the function's own
            raise self._too_late() from error
        if limit.expired():  # it took no notice of its cancellation
            raise self._too_late()
        return result

    def _too_late(self) -> TimeoutError:
        return TimeoutError(f"{self._step.uid!r} gave no result in {self._step.timeout_ms} ms")


def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process. A fork has none of its parent's threads, and gets its own."""
    with _starting:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(loop,), name="ftlayer-async", daemon=True).start()
        return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop for good: a task of a function's own that raises one of these ends it, and has it as its result."""
    while True:
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            loop.run_forever()


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
        self._step = step
        self._log = log
        self._done = 0
        self.by_record = RecordSegment([step.processing], step.processing.schema, conversion.VALUES, log=log)

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
        failures: list[RowFailure] = []
        done: list[tuple[pa.RecordBatch, I64]] = []
        self._run(rows, parents, done, failures)
        if len(done) == 1:
            return SegmentOutcome(*done[0], failures)
        whole = conversion.concat([result for result, _ in done], self._step.schema)
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
            columns.append(
                conversion.cast_strictly(result.column(field.name), field.type, f"column {field.name!r}")
            )
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
            said = conversion.no_such("column", extra, step.schema.names)
            raise ValueError(f"{step.uid!r} returned more than its schema has: {said}")

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
                conversion.check_values(series[series.notna()].tolist(), field.type, what, lax=step.rules.lax)
                columns.append(pa.array(series, field.type, from_pandas=True))
            else:
                columns.append(conversion.cast_strictly(pa.array(series, from_pandas=True), field.type, what))
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
    form: conversion.Form,
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


def _alone(
    step: BatchStep, form: conversion.Form, paces: Mapping[str, RateLimiter], log: UndoLog | None
) -> Segment:
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

    An input row with a failure anywhere in the chain yields nothing. It waits between the records of functions with a
    rate limit.
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
