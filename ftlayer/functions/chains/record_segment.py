"""Per-record functions over a batch: Arrow to Python once, the fused loop, Python to Arrow once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from ftlayer.errors import StateSerializationError
from ftlayer.functions import conversion
from ftlayer.functions.chains import fused
from ftlayer.functions.failures import I64, SegmentOutcome, SideOutput, failure_of, raise_signalled
from ftlayer.functions.keyed import NAN, convert, misfit_of
from ftlayer.functions.retry_rules import NO_RULES
from ftlayer.functions.steps import Filter, FlatMap
from ftlayer.functions.undo import LateFailure, UndoLog, UndoValues, finds_as_dict, logged_lookup
from ftlayer.records.failures import RowFailure
from ftlayer.records.kernels import native


def take_side_outputs(
    step: fused.Processing, form: conversion.Form, parents: I64, refuse: Callable[[RowFailure], None]
) -> list[SideOutput]:
    """Convert what has been put out since the last time; ``refuse`` takes what does not fit its schema.

    ``parents`` gives the input row of each place.
    """
    schemas = dict(step.side)
    return [
        _converted(step, tag, schemas[tag], form, records, parents[places], refuse)
        for tag, (records, places) in step.context._take_side().items()
    ]


def _converted(
    step: fused.Processing,
    tag: str,
    schema: pa.Schema,
    form: conversion.Form,
    records: list[Any],
    parents: I64,
    refuse: Callable[[RowFailure], None],
) -> SideOutput:
    def misfit(place: int, error: BaseException) -> None:
        gave = f"put out to {tag!r}"
        refuse(misfit_of(int(parents[place]), step.uid, gave, schema, error, step.rules))

    batch, kept = convert(records, [1] * len(records), schema, form, misfit, lax=step.rules.lax)
    return SideOutput(tag, batch, np.repeat(parents, kept))


# The loop over per-record functions in C, where records, results and functions are such that it can run them.
#
# It reads records from Arrow columns and writes results to Arrow columns, one after the other. `fuse` of
# `ftlayer.functions.chains.fused` is its reference, and does what it cannot.


_READ = frozenset({*conversion.PLAIN_CODES, pa.float32(), pa.large_string(), pa.large_binary()})

Objects = tuple[list[Any] | None, ...]
"""For each column None, or its values where the C extension cannot read them."""

Driven = tuple[list[Any], int, bytes, bool]
"""What `ChainDriver.run` returns: columns, or records; how many; int32 counts a row; whether they are columns."""


def not_plain(schema: pa.Schema) -> bool:
    for field in schema:
        if field.type not in _READ:
            return True
    return False


def objects_in(batch: pa.RecordBatch) -> Objects:
    """Return the values of columns that the C extension cannot read. Raises one of `UNREADABLE`."""
    return tuple(
        None if column.type in _READ else conversion.python_values(column) for column in batch.columns
    )


def batch_of(columns: Sequence[Any], rows: int, schema: pa.Schema, *, lax: bool) -> pa.RecordBatch:
    """Return the columns of results as a batch. Raises what `to_batch` raises for objects that do not fit."""
    arrays = []
    for field, column in zip(schema, columns, strict=True):
        made = conversion.array_of(field.type, rows, column)
        arrays.append(conversion.column_of(made, field, lax=lax) if isinstance(made, list) else made)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def records_from(columns: Sequence[Any], rows: int, schema: pa.Schema, form: conversion.Form) -> list[Any]:
    """Return results as the functions have returned them: plain values come out of Arrow as they went in."""
    made = [
        conversion.array_of(field.type, rows, column) for field, column in zip(schema, columns, strict=True)
    ]
    values = [column if isinstance(column, list) else column.to_pylist() for column in made]
    if form is conversion.DICTS:
        return [dict(zip(schema.names, record, strict=True)) for record in zip(*values, strict=True)]
    return values[0] if len(values) == 1 else list(zip(*values, strict=True))


def driver_of(
    steps: Sequence[fused.PreparedStep],
    schema: pa.Schema,
    form: conversion.Form,
    log: UndoLog | None,
    *,
    keeps: bool = False,
    lax: bool = False,
) -> native.ChainDriver | None:
    """Return what runs ``steps`` over record batches, whose results are of ``schema``; None if it cannot.

    ``form`` and ``log`` are as for `fuse`. Records may be values or dicts, and a `Reducing` needs values. ``keeps``:
    aggregates of the first `Reducing` may lie beside their keys until `write_back`; the driver alone changes its table.
    ``lax`` as for `to_batch`.
    """
    codes = conversion.codes_of(schema)
    are_dicts = form is conversion.DICTS
    if not (are_dicts or form is conversion.VALUES) or not steps or not codes:
        return None
    driven = [known for step in steps if (known := _driven(step, form, keeps)) is not None]
    if len(driven) < len(steps):
        return None
    logs = any(isinstance(step, fused.Reducing) and isinstance(step.table, UndoValues) for step in steps)
    return native.ChainDriver(
        tuple(driven),
        codes,
        bytes(field.nullable for field in schema),
        tuple(sys.intern(name) for name in schema.names) if are_dicts else None,
        () if log is None else (StateSerializationError,),
        log.entries if log is not None and logs else None,
        NAN,
        lax,
    )


def _driven(step: fused.PreparedStep, form: conversion.Form, keeps: bool) -> tuple[Any, ...] | None:
    match step:
        case fused.Processing():
            return None
        case fused.Reducing():
            return _reduce(step, keeps) if form is conversion.VALUES else None
        case Filter():
            return "filter", step.function, fused.has_run
        case FlatMap():
            return "flat_map", step.function, form.results
        case _:
            return "map", step.function


def _reduce(step: fused.Reducing, keeps: bool) -> tuple[Any, ...] | None:
    table: Any = step.table
    lookup = None
    if isinstance(table, UndoValues):
        lookup, table = logged_lookup(table), table.table
    if not finds_as_dict(table) or any(column.fields for column in step.key.columns):
        return None
    return (
        "reduce",
        step.function,
        tuple(None if step.key.width == 1 else column.position for column in step.key.columns),
        bytes(column.is_float for column in step.key.columns),
        table,
        lookup,
        step.create,
        step.own,
        _refusing(step.uid),
        keeps,
    )


def _refusing(uid: str) -> Callable[[Any], NoReturn]:
    def refuse(key: Any) -> NoReturn:
        raise fused.unhashable(uid, key) from None

    return refuse


CHUNK_ROWS = 1_000
"""Records turned into Python objects at a time: few enough to stay in the processor's cache
(2.4 µs a record with 10,000 at a time, 1.6 µs with 1,000, for two small functions)."""

MOST_RESULTS = 16 * CHUNK_ROWS
"""Results that wait as Python objects before they become Arrow columns."""


MOST_UNWRITTEN = 20_000
"""Aggregates that their table lacks between two batches, and gets before a snapshot: a few milliseconds' work."""


class RecordSegment:
    """Per-record functions, depth first: each record through all of them before the next one.

    Attributes:
        has_objects: some columns of results are made by Arrow.
    """

    def __init__(
        self,
        steps: Sequence[fused.PreparedStep],
        schema: pa.Schema,
        form: conversion.Form,
        made_by: str = "",
        log: UndoLog | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        """``schema`` is what the last of ``steps`` emits; without any, the records are only converted to it.

        ``made_by`` answers for records that do not fit the schema, if ``steps`` make no new ones; needed without any.
        ``log`` is where the state of ``steps`` notes changes: what a record that fails has changed is taken back. With
        ``keeps`` the table of the first `Reducing` may lack what has changed until `write_back`; no other part uses it.
        """
        self._log = log
        self._done = 0
        self._counts: list[int] = []
        self._parents: I64 | None = None  # of the batch that is being run
        self._steps = steps
        self._schema = schema
        self._form = form
        self._loop = fused.fuse(steps, form, log=log)
        makers = [step for step in steps if not isinstance(step, Filter)]
        maker = makers[-1] if makers else None if made_by else steps[-1]
        self._maker = made_by if maker is None else maker.uid
        self._maker_rules = NO_RULES if maker is None else maker.rules
        self._driver = driver_of(steps, schema, form, log, keeps=keeps, lax=self._maker_rules.lax)
        for step in steps if keeps and self._driver is not None else ():
            if isinstance(step, fused.Reducing) and step.state is not None:
                step.state.cache(self)
        self.has_objects = any(field.type not in conversion.PLAIN_CODES for field in schema)
        self._single = fused.is_one_to_one(steps)
        self._processing = [step for step in steps if isinstance(step, fused.Processing)]

    @property
    def progress(self) -> int:
        """How many records are done. Another thread may look, and see a number a little off between batches."""
        return self._done + self._place

    @property
    def row(self) -> int | None:
        """What the record that the functions work on comes from; None while they work on none. For any thread."""
        parents, place = self._parents, self._place
        return None if parents is None or place >= len(parents) else int(parents[place])

    def count_in(self, counts: list[int]) -> None:
        self._done += len(self._counts)
        self._counts = counts

    def count_driven(self, records: int) -> None:
        """The driver has run so many, and counts from 0 again."""
        if records:
            self._parents = None
        self._done += records

    @property
    def _place(self) -> int:
        return len(self._counts) if self._driver is None else len(self._counts) + self._driver.done

    def write_back(self) -> None:
        """See `StateCache.write_back`: put aggregates into their table that it does not have yet."""
        if self._driver is not None:
            self._driver.write_back()

    def forget(self) -> None:
        """As `write_back`, and know nothing of the table any more: others may change it until the next batch."""
        if self._driver is not None:
            self._driver.forget()

    def tend(self) -> None:
        if self._driver is not None and self._driver.unwritten > MOST_UNWRITTEN:
            self._driver.write_back()

    @cached_property
    def _checked_loop(self) -> fused.Fused:
        return fused.fuse(self._steps, self._form, checked=True, log=self._log)

    def run(self, rows: pa.RecordBatch | list[Any], parents: I64, times: I64 | None = None) -> SegmentOutcome:
        """Run rows, or records that are Python objects already, through the functions.

        ``parents`` is what each row comes from, and ``times``, by that number, its event time (ms). With a log, raises
        `LateFailure` for a row whose changes cannot be told from those of others.
        """
        if self._log is not None:
            self._log.begin_segment()
        run = _SegmentRun(self, parents, times)
        self._parents = parents
        try:
            return run.over(rows)
        finally:
            self._parents = None


class _SegmentRun:
    def __init__(self, segment: RecordSegment, parents: I64, times: I64 | None) -> None:
        self._segment = segment
        self._log = segment._log
        self._parents = parents
        self._times = self._times_by_place(times) if segment._processing else None
        self._failures: list[RowFailure] = []
        self._counts: list[int] = []
        self._out: list[Any] = []
        self._converted = 0
        self._pieces: list[tuple[pa.RecordBatch, I64]] = []

    def over(self, rows: pa.RecordBatch | list[Any]) -> SegmentOutcome:
        if isinstance(rows, list) or not self._drive(rows):
            self._segment.forget()  # the loop works on the table
            self._segment.count_in(self._counts)
            self._loop_over(rows)
        side = []
        for step in self._segment._processing:
            side += take_side_outputs(step, self._segment._form, self._parents, self._refuse)
        if len(self._pieces) == 1:
            batch, parents = self._pieces[0]
        else:
            batch = conversion.concat([batch for batch, _ in self._pieces], self._segment._schema)
            parents = np.concatenate([parents for _, parents in self._pieces])
        return SegmentOutcome(batch, parents, self._failures, side)

    def _drive(self, rows: pa.RecordBatch) -> bool:
        """Run rows in C; False: nothing is done, since they are not such that it can."""
        segment = self._segment
        driver = segment._driver
        if driver is None:
            return False
        if segment.has_objects or not_plain(rows.schema):
            self._drive_by_chunks(driver, rows)
            return True
        try:
            driven = self._run_driver(driver, rows, None)
        finally:
            segment.count_driven(driver.take_done())
        if driven is None:
            return False
        results, count, packed, are_columns = driven
        counts = np.frombuffer(packed, np.int32)
        if not are_columns:
            self._out, self._counts = results, counts.tolist()
            self._convert()
            return True
        batch = batch_of(results, count, segment._schema, lax=segment._maker_rules.lax)
        one_each = segment._single and count == rows.num_rows
        self._pieces.append((batch, self._parents if one_each else np.repeat(self._parents, counts)))
        return True

    def _drive_by_chunks(self, driver: native.ChainDriver, rows: pa.RecordBatch) -> None:
        """Run rows in C of which some values become objects by Arrow, or objects by Arrow what it takes.

        As many at a time as in the loop, for its reasons.
        """
        self._segment.count_in(self._counts)
        for start in range(0, max(rows.num_rows, 1), CHUNK_ROWS):
            chunk = rows.slice(start, CHUNK_ROWS)
            try:
                objects = objects_in(chunk)
            except conversion.UNREADABLE:
                driven = None
            else:
                try:
                    driven = self._run_driver(driver, chunk, objects)
                except BaseException:
                    self._segment.count_driven(driver.take_done())
                    raise
                driver.take_done()  # the counts of the chunk say so from here on
            if driven is None:
                self._segment.forget()
                self._take(chunk)
            else:
                self._took(driven)
            if len(self._out) >= MOST_RESULTS:
                self._convert()
        if self._out or not self._pieces:
            self._convert()

    def _run_driver(
        self, driver: native.ChainDriver, rows: pa.RecordBatch, objects: Objects | None
    ) -> Driven | None:
        first, segment = len(self._counts), self._segment

        def fail(place: int, step: int, error: BaseException, mark: int) -> None:
            if step < 0:  # As if the first function had raised it.
                (said,) = conversion.records_in_form(rows.slice(place, 1), segment._form)
                step, error = 0, said if isinstance(said, Exception) else error
            self._fail(first + place, step, error, mark)

        schema, array = rows.__arrow_c_array__()
        return driver.run(schema, array, objects, fail)

    def _as_batch(self, columns: list[Any], rows: int) -> pa.RecordBatch | None:
        """Return columns of results as a batch; None if some do not fit, which are to be found among the records."""
        try:
            return batch_of(columns, rows, self._segment._schema, lax=self._segment._maker_rules.lax)
        except BaseException as error:  # noqa: BLE001 - anything may be among what a user's function returned
            raise_signalled(error)
            return None

    def _took(self, driven: Driven) -> None:
        results, count, packed, are_columns = driven
        schema = self._segment._schema
        counts = np.frombuffer(packed, np.int32)
        batch = self._as_batch(results, count) if are_columns and not self._out else None
        self._counts += counts.tolist()
        if batch is not None:
            self._pieces.append(
                (batch, np.repeat(self._parents[self._converted : len(self._counts)], counts))
            )
            self._converted = len(self._counts)
            return
        self._out += records_from(results, count, schema, self._segment._form) if are_columns else results

    def _loop_over(self, rows: pa.RecordBatch | list[Any]) -> None:
        if isinstance(rows, list):
            self._segment._loop(rows, self._out, self._counts, self._fail, self._times)
        else:
            for start in range(0, rows.num_rows, CHUNK_ROWS):
                self._take(rows.slice(start, CHUNK_ROWS))
                if len(self._out) >= MOST_RESULTS:
                    self._convert()
        if self._out or not self._pieces:
            self._convert()

    def _take(self, chunk: pa.RecordBatch) -> None:
        segment = self._segment
        try:
            records, loop = segment._form.read(chunk), segment._loop
        except conversion.UNREADABLE:
            records, loop = conversion.records_in_form(chunk, segment._form), segment._checked_loop
        loop(records, self._out, self._counts, self._fail, self._times)

    def _times_by_place(self, times: I64 | None) -> Sequence[Any]:
        if times is None:
            return [None] * len(self._parents)
        by_place: list[int] = times[self._parents].tolist()
        return by_place

    def _fail(self, place: int, step: int, error: BaseException, mark: int) -> None:
        row = int(self._parents[place])
        if self._log is not None:
            self._log.fail(mark, row)
            self._fail_siblings(row)
        traced = self._log is None or self._log.traced
        failed = self._segment._steps[step]
        self._failures.append(failure_of(row, failed.uid, error, failed.rules, traced=traced))

    def _fail_siblings(self, row: int) -> None:
        """Turn the chain round where more than one of the records here comes from ``row``: it goes as a whole."""
        if row in self._several and self._log is not None and not self._log.alone:
            raise LateFailure(row)

    @cached_property
    def _several(self) -> set[int]:
        rows, counts = np.unique(self._parents, return_counts=True)
        return set(rows[counts > 1].tolist())

    def _refuse(self, failure: RowFailure) -> None:
        if self._log is not None:
            self._log.late(failure.row)
            self._fail_siblings(failure.row)
        self._failures.append(failure)

    def _convert(self) -> None:
        schema, form, uid = self._segment._schema, self._segment._form, self._segment._maker
        rules = self._segment._maker_rules
        parents = self._parents[self._converted : len(self._counts)]

        def misfit(place: int, error: BaseException) -> None:
            row, wanted = int(parents[place]), form.expected(schema)
            self._refuse(misfit_of(row, uid, "returned", schema, error, rules, wanted))

        batch, counts = convert(
            self._out, self._counts[self._converted :], schema, form, misfit, lax=rules.lax
        )
        if not self._segment._single or len(parents) != batch.num_rows:
            parents = np.repeat(parents, counts)
        self._pieces.append((batch, parents))
        self._converted = len(self._counts)
        self._out.clear()
