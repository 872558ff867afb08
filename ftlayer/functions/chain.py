"""The functions of a stage, run over one Arrow batch in a Python worker; a record that raises fails alone.

A row of the result names the input row it comes from (``parents``). An input row with a failure
anywhere in the chain yields nothing: all or nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.errors import FailException, QueryError
from ftlayer.functions.conversion import check_whole, concat, records_of, text_of, to_batch
from ftlayer.functions.fused import fuse
from ftlayer.functions.steps import Filter, FunctionStep, MapBatches, Record, RecordStep

ROW_TAG = "_ft_row"
"""The column of a tagged `MapBatches`: the input row's number, int32."""

CHUNK_ROWS = 1_000
"""Records turned into Python objects at a time: few enough to stay in the processor's cache
(2.4 µs a record with 10,000 at a time, 1.6 µs with 1,000, for two small functions)."""

MAX_FUSED = 16
"""Per-record functions in one loop: Python compiles at most 20 nested blocks, and a flat_map is one."""

MAX_REASON = 512
MAX_TRACEBACK = 4_096

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowFailure:
    """Input row ``row`` failed in ``operator``."""

    row: int
    operator: str
    reason: str
    traceback: str
    fatal: bool = False


@dataclass(frozen=True)
class ChainResult:
    """Rows out, the input row of each (ascending within one chunk), and what failed."""

    batches: list[tuple[pa.RecordBatch, I64]]
    failures: list[RowFailure]

    def without_failed(self) -> ChainResult:
        """Leave out every row of a failed input row."""
        if not self.failures:
            return self
        failed = np.array(sorted({failure.row for failure in self.failures}), dtype=np.int64)
        kept = []
        for batch, parents in self.batches:
            keep = ~np.isin(parents, failed)
            if keep.all():
                kept.append((batch, parents))
            elif keep.any():
                kept.append((batch.filter(pa.array(keep)), parents[keep]))
        return ChainResult(kept, self.failures)


def failure_of(row: int, operator: str, error: BaseException) -> RowFailure:
    """Describe ``error``, raised by ``operator`` for input row ``row``, within bounds."""
    said = text_of(error)
    if isinstance(error, FailException):
        reason = said or "FailException"
    else:
        reason = f"{type(error).__name__}: {said}"
    # The first frame is ours; the user's own code starts below it.
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    if len(text) > MAX_TRACEBACK:
        half = MAX_TRACEBACK // 2
        text = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    return RowFailure(row, operator, _encodable(reason[:MAX_REASON]), _encodable(text))


def _encodable(text: str) -> str:
    """Replace lone surrogates (from undecodable file names, say), which UTF-8 cannot carry."""
    return text.encode("utf-8", "backslashreplace").decode()


class Chain:
    """Functions made ready to run; made once for a task."""

    def __init__(self, functions: Sequence[FunctionStep]) -> None:
        self._segments = _segments(functions)

    def run(self, batch: pa.RecordBatch) -> ChainResult:
        """Run ``batch`` through the functions; an `Exception` of one fails its record and goes no further.

        What is no `Exception` (`KeyboardInterrupt`, `SystemExit`), and `MemoryError`, cannot be pinned on a
        record and goes up: the task fails.
        """
        done = ChainResult([], [])
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            chunk = batch.slice(start, CHUNK_ROWS)
            parents: I64 = np.arange(start, start + chunk.num_rows, dtype=np.int64)
            for segment in self._segments:
                chunk, parents, failures = segment(chunk, parents)
                done.failures.extend(failures)
            done.batches.append((chunk, parents))
        return done.without_failed()

    def run_untracked(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Run ``batch`` without tracking; raise the first failure as a `QueryError`."""
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            result = self.run(batch.slice(start, CHUNK_ROWS))
            if result.failures:
                first = result.failures[0]
                raise QueryError(f"{first.operator!r} failed: {first.reason}\n{first.traceback}")
            for rows, _ in result.batches:
                yield rows


_Segment = Callable[[pa.RecordBatch, I64], tuple[pa.RecordBatch, I64, list[RowFailure]]]


def _segments(functions: Sequence[FunctionStep]) -> list[_Segment]:
    """Group neighbouring per-record functions, so that records become Python objects once for all of them."""
    segments: list[_Segment] = []
    for is_batch, group in groupby(functions, key=lambda step: isinstance(step, MapBatches)):
        steps = list(group)
        if is_batch:
            segments.extend(_BatchSegment(step) for step in steps if isinstance(step, MapBatches))
        else:
            record_steps = [step for step in steps if not isinstance(step, MapBatches)]
            for start in range(0, len(record_steps), MAX_FUSED):
                segments.append(_RecordSegment(record_steps[start : start + MAX_FUSED]))
    return segments


class _RecordSegment:
    """Per-record functions, depth first: each record through all of them before the next one."""

    def __init__(self, steps: Sequence[RecordStep]) -> None:
        self._loop = fuse(steps)
        self._uids = [step.uid for step in steps]
        self._schema = steps[-1].schema
        makers = [step.uid for step in steps if not isinstance(step, Filter)]
        self._maker = makers[-1] if makers else steps[-1].uid

    def __call__(self, batch: pa.RecordBatch, parents: I64) -> tuple[pa.RecordBatch, I64, list[RowFailure]]:
        failures: list[RowFailure] = []
        out: list[Record] = []
        counts: list[int] = []

        def fail(place: int, step: int, error: Exception) -> None:
            failures.append(failure_of(int(parents[place]), self._uids[step], error))

        self._loop(records_of(batch), out, counts, fail)
        try:
            result = to_batch(out, self._schema)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - anything may be among what a user's function returned
            result, counts = self._convert_one_by_one(out, counts, parents, failures)
        return result, np.repeat(parents, counts), failures

    def _convert_one_by_one(
        self, out: list[Record], counts: list[int], parents: I64, failures: list[RowFailure]
    ) -> tuple[pa.RecordBatch, list[int]]:
        """Find the records whose result does not fit the schema: they fail, the others go on."""
        uid = self._maker
        good: list[pa.RecordBatch] = []
        kept: list[int] = []
        start = 0
        for position, count in enumerate(counts):
            rows = out[start : start + count]
            start += count
            try:
                good.append(to_batch(rows, self._schema))
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - as above
                misfit = TypeError(
                    f"what {uid!r} returned does not fit its schema ({_describe(self._schema)}): "
                    f"{text_of(error)}; "
                    "a function returns a dict with these columns (flat_map: an iterable of them)"
                )
                failures.append(failure_of(int(parents[position]), uid, misfit))
                kept.append(0)
            else:
                kept.append(count)
        return concat(good, self._schema), kept


class _BatchSegment:
    """A function a batch at a time. Where it raises, halves are tried, so that just the culprits fail."""

    def __init__(self, step: MapBatches) -> None:
        self._step = step

    def __call__(self, batch: pa.RecordBatch, parents: I64) -> tuple[pa.RecordBatch, I64, list[RowFailure]]:
        failures: list[RowFailure] = []
        done: list[tuple[pa.RecordBatch, I64]] = []
        self._run(batch, parents, done, failures)
        if len(done) == 1:
            return (*done[0], failures)
        whole = concat([result for result, _ in done], self._step.schema)
        rows: I64 = np.concatenate([part for _, part in done]) if done else np.zeros(0, np.int64)
        return whole, rows, failures

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
            result, rows = self._call(batch)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises fails its records
            if batch.num_rows == 1:
                failures.append(failure_of(int(parents[0]), self._step.uid, error))
                return
            half = batch.num_rows // 2
            self._run(batch.slice(0, half), parents[:half], done, failures)
            self._run(batch.slice(half), parents[half:], done, failures)
        else:
            done.append((result, parents[rows]))

    def _call(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, I64]:
        """Call the function; return its result and the row of ``batch`` that each of its rows comes from."""
        step = self._step
        if step.tagged:
            tags = pa.array(np.arange(batch.num_rows, dtype=np.int32))
            batch = batch.append_column(ROW_TAG, tags)
        given: Any = batch.to_pandas() if step.kind == "pandas" else batch
        result = step.function(given)
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
        return result.select(step.schema.names).cast(step.schema), rows

    def _check_columns(self, names: Sequence[str]) -> None:
        step = self._step
        if step.tagged and ROW_TAG not in names:
            raise ValueError(f"{step.uid!r} is tagged and returned no column {ROW_TAG!r}")
        missing = [name for name in step.schema.names if name not in names]
        if missing:
            raise ValueError(f"{step.uid!r} returned no column {missing[0]!r}, which its schema has")

    def _from_pandas(self, result: Any) -> pa.RecordBatch:
        """Convert as the schema says: inference would not know a map, nor an empty list's type."""
        step = self._step
        import pandas as pd

        if not isinstance(result, pd.DataFrame):
            raise TypeError(f"{step.uid!r} returned a {type(result).__name__}, not a pandas.DataFrame")
        self._check_columns(list(result.columns))
        schema = step.schema.append(pa.field(ROW_TAG, pa.int32())) if step.tagged else step.schema
        for field in schema:
            if pa.types.is_integer(field.type) and result[field.name].dtype == object:
                check_whole(list(result[field.name]), field.name)
        return pa.RecordBatch.from_pandas(result, schema=schema, preserve_index=False)


def _describe(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
