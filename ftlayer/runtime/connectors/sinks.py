"""The sinks of a topology, made ready in a task: a function a batch at a time, or a Python Data Source's writer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa

from ftlayer.common.checks import check_ran
from ftlayer.config import MIB
from ftlayer.errors import ConfigError
from ftlayer.functions.conversion import concat
from ftlayer.functions.failures import raise_signalled
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.functions.writing import call_commit, call_write, settle
from ftlayer.records.failures import RowFailure
from ftlayer.runtime.connectors.committing_sink import (
    CommittingWriterBody,
    RowRejections,
    checked_writer,
    spark_schema,
)
from ftlayer.runtime.task.contract import Settled, SinkBody
from ftlayer.topology.operators import FunctionSink, Sink, WriterSink

logger = logging.getLogger(__name__)

MAX_WRITERS = 1 << 12
"""Subtasks of a writer's sink: their numbers are the low bits of its batch ids."""

MAX_BYTES = 64 * MIB
"""Rows that a writer's sink gathers are written at this size, however few they are."""

NOTHING = Settled(0)


def open_sink(
    sink: Sink,
    subtask: int,
    parallelism: int,
    may_refuse: bool = False,
    *,
    run: str,
    checkpoint_key: bytes | None = None,
    place: str = "",
) -> SinkBody:
    """Make the sink of one subtask ready. ``run`` names the run of the job, in what is logged.

    In a graph with checkpoints ``checkpoint_key`` is the order's, and a writer's sink a `CommittingSinkBody`,
    whose writer ``may_refuse`` rows. ``place`` says in words which process this is, for the letters of those.

    Raises `ConfigError` for a writer that Spark would not take, a schema that Spark cannot read, and more than
    `MAX_WRITERS` subtasks of a writer.
    """
    if isinstance(sink.connector, FunctionSink):
        return FunctionSinkBody(sink.uid, sink.connector.function, sink.rules)
    if checkpoint_key is not None:
        rejections = RowRejections(sink.uid, subtask, place) if may_refuse else None
        return CommittingWriterBody(sink.uid, sink.connector, sink.schema, checkpoint_key, rejections)
    if parallelism > MAX_WRITERS:
        raise ConfigError(f"sink {sink.uid!r}: parallelism {parallelism}, a writer has {MAX_WRITERS} at most")
    return WriterSinkBody(sink.uid, sink.connector, sink.schema, BatchNumbers(subtask), run, sink.rules)


class FunctionSinkBody:
    """Calls the user's function with each batch at once. See `SinkBody`."""

    def __init__(
        self, uid: str, function: Callable[[pa.RecordBatch], Any], rules: RetryRules = NO_RULES
    ) -> None:
        self._uid = uid
        self._function = function
        self._rules = rules

    def write(self, batch: pa.RecordBatch, mono_ms: int) -> Settled:
        failures = settle(self._uid, batch, self._call, rules=self._rules, takes_the_rest=True)
        return Settled(batch.num_rows, failures)

    def _call(self, rows: pa.RecordBatch) -> None:
        check_ran(self._function(rows), f"sink {self._uid!r}")

    def flush(self, mono_ms: int, *, force: bool) -> Settled:
        return NOTHING

    @property
    def due_ms(self) -> int | None:
        return None

    def close(self) -> None:
        """See `SinkBody.close`."""


class BatchNumbers:
    """The batch ids of one writer: growing, and no other writer of the sink ever has them.

    An id is the time in milliseconds since 1970 (or the last id's and one more) above 12 bits for the subtask:
    unique over subtasks, over the instances that follow each other in a slot, and over runs, with 53 bits. They
    are not dense, and those of different subtasks come in no order: a writer that skips ids lower than one
    it knows is to be used with a parallelism of 1.
    """

    def __init__(self, subtask: int, wall: Callable[[], float] = time.time) -> None:
        self._subtask = subtask
        self._wall = wall
        self._last_ms = 0

    def next(self) -> int:
        self._last_ms = max(self._last_ms + 1, int(self._wall() * 1_000))
        return self._last_ms * MAX_WRITERS + self._subtask


class WriterSinkBody:
    """Gathers rows, has the writer write them, and commits what it wrote. See `SinkBody`.

    Each batch of rows is one ``write`` and one ``commit`` with its message, under a batch id of its own
    (`BatchNumbers`): a commit covers rows of one subtask. Where either raises, ``abort`` is called with the
    message (None where ``write`` gave none) and halves of the rows are tried, each under a new id. Rows of a
    batch whose ``commit`` failed half-way may be written twice.
    """

    def __init__(
        self,
        uid: str,
        connector: WriterSink,
        schema: pa.Schema,
        numbers: BatchNumbers,
        run: str,
        rules: RetryRules = NO_RULES,
    ) -> None:
        self._uid = uid
        self._rules = rules
        self._writer = checked_writer(uid, connector.writer)
        self._max_rows = connector.max_rows
        self._every_ms = connector.every_ms
        self._schema = schema
        self._spark_schema = spark_schema(uid, schema)
        self._numbers = numbers
        self._run = run
        self._gathered: list[pa.RecordBatch] = []
        self._rows = 0
        self._bytes = 0
        self._due_ms: int | None = None

    def write(self, batch: pa.RecordBatch, mono_ms: int) -> Settled:
        if batch.num_rows:
            self._gathered.append(batch)
            self._rows += batch.num_rows
            self._bytes += batch.nbytes
            if self._due_ms is None:
                self._due_ms = mono_ms + self._every_ms
        if self._bytes >= MAX_BYTES:
            return self._write_out(mono_ms, keep=0)
        if self._rows >= self._max_rows:
            return self._write_out(mono_ms, keep=self._rows % self._max_rows)
        return NOTHING

    def flush(self, mono_ms: int, *, force: bool) -> Settled:
        if self._due_ms is None or (mono_ms < self._due_ms and not force):
            return NOTHING
        return self._write_out(mono_ms, keep=0)

    @property
    def due_ms(self) -> int | None:
        return self._due_ms

    def close(self) -> None:
        """See `SinkBody.close`; stream writers have nothing to close."""

    def _write_out(self, mono_ms: int, *, keep: int) -> Settled:
        gathered = concat(self._gathered, self._schema)
        rows = self._rows - keep
        self._gathered = [gathered.slice(rows)] if keep else []
        self._rows = keep
        self._bytes = sum(batch.nbytes for batch in self._gathered)
        self._due_ms = mono_ms + self._every_ms if keep else None
        failures: list[RowFailure] = []
        for start in range(0, rows, self._max_rows):
            part = gathered.slice(start, min(self._max_rows, rows - start))
            for failure in settle(self._uid, part, self._commit, rules=self._rules):
                failures.append(replace(failure, row=start + failure.row))
        return Settled(rows, tuple(failures))

    def _commit(self, rows: pa.RecordBatch) -> None:
        number = self._numbers.next()
        message = None
        try:
            message = call_write(self._writer, [rows], self._spark_schema)
            call_commit(self._writer, [message], number)
        except BaseException:
            self._abort(message, number)
            raise

    def _abort(self, message: Any, number: int) -> None:
        try:
            self._writer.abort([message], number)
        except BaseException as error:
            raise_signalled(error)
            # The rows fail by what made the abort necessary.
            logger.warning(
                "sink %r (run %s): abort of batch %d failed; it may have left something behind",
                self._uid,
                self._run,
                number,
                exc_info=True,
            )
