"""The sinks of a topology, made ready in a task: a function a batch at a time, or a Python Data Source's writer."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ftlayer.checkpoint.letters import LETTER_BYTES, ChainLetter, LetterKind
from ftlayer.checkpoint.snapshots import Committable, SinkPart
from ftlayer.common.checks import check_ran, named_type
from ftlayer.common.failures import RowsRejected
from ftlayer.common.printable import described, text_of
from ftlayer.config import MIB
from ftlayer.errors import ConfigError, JobError, SinkRowError
from ftlayer.functions.conversion import concat
from ftlayer.functions.failures import raise_signalled, rejections_of
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.functions.writing import call_commit, call_write, settle
from ftlayer.records.failures import RowFailure
from ftlayer.records.ipc import as_stream, may_share, row_alone
from ftlayer.runtime.protocol.messages import seal
from ftlayer.runtime.task.contract import Settled, SinkBody
from ftlayer.topology.operators import FunctionSink, Sink, WriterSink
from ftlayer.vertex.calls import Attempt

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)


@dataclass
class RowRejections:
    """Makes letters, as yet of no checkpoint, of the rows that the writer of one subtask's sink refuses.

    A refused row is dead at once: it is part of a write that is to be whole with this checkpoint. ``uid`` is the
    sink's, and its chain's; ``place`` says in words which process this is.
    """

    uid: str
    subtask: int
    place: str
    wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    draw: Callable[[int], bytes] = os.urandom

    def take_out(
        self, batches: Sequence[pa.RecordBatch], rejected: RowsRejected
    ) -> tuple[list[pa.RecordBatch], list[ChainLetter]]:
        """Return what is left of ``batches`` without the rows that ``rejected`` numbers, and letters of these.

        Rows are numbered from 0 through all batches. Raises `ConfigError` for none, and for a row that is not there:
        the writer would be called without end.
        """
        rows = sum(batch.num_rows for batch in batches)
        failures = {failure.row: failure for failure in rejections_of(rejected, rows, self.uid)}
        left: list[pa.RecordBatch] = []
        letters: list[ChainLetter] = []
        start = 0
        for batch in batches:
            mine = [number - start for number in failures if start <= number < start + batch.num_rows]
            letters += [self._letter(batch, row, failures[start + row]) for row in mine]
            start += batch.num_rows
            keep = np.ones(batch.num_rows, np.bool_)
            keep[mine] = False
            rest = batch.filter(pa.array(keep)) if mine else batch
            left += [rest] if rest.num_rows else []
        return left, letters

    def _letter(self, batch: pa.RecordBatch, row: int, failure: RowFailure) -> ChainLetter:
        alone = row_alone(batch, row, shares=may_share(batch.schema))
        now_ms = self.wall_ms()
        attempt = Attempt(1, now_ms, failure.reason, self.uid, self.place, failure.traceback)
        return ChainLetter(
            letter=self.draw(LETTER_BYTES),
            checkpoint=0,
            chain=self.uid,
            subtask=self.subtask,
            input=0,
            kind=LetterKind.ROW,
            operator=self.uid,
            key=b"",
            payload=as_stream(alone).to_pybytes(),
            event_time_ms=None,
            attempts=(attempt,),
            first_failed_ms=now_ms,
            died_ms=now_ms,
        )


def checked_writer(sink: str, writer: Any) -> Any:
    from pyspark.sql.datasource import DataSourceStreamWriter

    if not isinstance(writer, DataSourceStreamWriter):
        raise ConfigError(
            f"sink {sink!r}: expected a DataSourceStreamWriter or a DataSourceStreamArrowWriter of "
            f"pyspark.sql.datasource, got {named_type(writer)}"
        )
    return writer


def spark_schema(sink: str, schema: pa.Schema) -> StructType:
    """Return the schema as plain writers get to see it; `ConfigError` for a type that Spark lacks."""
    from pyspark.errors import PySparkException

    from ftlayer.functions.data_sources import from_arrow_schema

    try:
        return from_arrow_schema(schema)
    except PySparkException as error:
        raise ConfigError(f"sink {sink!r}: Spark has no type for a column of ({schema}): {error}") from error


MAX_BYTES = 64 * MIB
"""Rows that a writer's sink gathers, or that wait for a barrier, are written at this size, however few they are."""

NOTHING = Settled(0)


@dataclass(frozen=True, slots=True)
class _Interval:
    checkpoint: int
    batches: list[pa.RecordBatch]
    bytes: int


@dataclass(slots=True)
class _Written:
    """A message of the writer; ``checkpoint`` None: its barrier has not come yet."""

    checkpoint: int | None
    message: Any
    sealed: bytes


@dataclass(slots=True)
class _Refused:
    checkpoint: int | None
    letter: ChainLetter


class CommittingWriterBody:
    """`ftlayer.runtime.barrier_mode.task.mode.CommittingSinkBody`.

    The rows of an interval are one ``write``, in the thread that runs what `precommit` returned: ``every_ms`` and
    ``max_rows`` of the sink mean nothing here. If more than `MAX_BYTES` of rows wait, they are written at once in the
    loop's thread, and the interval has several messages. The writer is one object, used by one thread at a time.

    A message belongs to the checkpoint whose barrier came behind its rows, and goes into every snapshot from there on
    until it is committed. If ``write`` raises, its rows wait for the next checkpoint, and are written again from the
    first one: what a writer leaves behind that raises is its own to clean up.

    By `RowsRejected` a writer refuses rows, if a policy says what becomes of them: they are dead letters of the same
    checkpoint, and it gets the others again, in another ``write``. Letters go on as messages do.
    """

    due_ms: int | None = None

    refused = 0

    def __init__(
        self,
        uid: str,
        connector: WriterSink,
        schema: pa.Schema,
        key: bytes,
        rejections: RowRejections | None = None,
    ) -> None:
        """``key`` seals messages; ``rejections`` makes letters of refused rows, None: none may be.

        Raises `ConfigError` for what is no writer, or a schema that Spark lacks.
        """
        self._uid = uid
        self._writer = checked_writer(uid, connector.writer)
        self._spark_schema = spark_schema(uid, schema)
        self._key = key
        self._rejections = rejections
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_bytes = 0
        # Held while the writer is used; the other one guards what follows, for moments.
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        self._aside: deque[_Interval] = deque()
        self._aside_bytes = 0
        self._written: list[_Written] = []
        self._refused: list[_Refused] = []
        self._doomed: list[_Written] = []
        self._discarded = False

    def write(self, batch: pa.RecordBatch, mono_ms: int) -> Settled:
        """Settles nothing: no record is acknowledged. Raises `JobError` if the writer does."""
        if batch.num_rows:
            self._gathered.append(batch)
            self._gathered_bytes += batch.nbytes
            with self._lock:
                waiting = self._gathered_bytes + self._aside_bytes
            if waiting >= MAX_BYTES:
                self._write_early()
        return NOTHING

    def flush(self, mono_ms: int, *, force: bool) -> Settled:
        """What is written outside of a checkpoint would never be committed."""
        return NOTHING

    def precommit(self, checkpoint: int) -> Callable[[], SinkPart]:
        """What is returned raises `JobError` if the writer raises."""
        with self._lock:
            for kept in chain[_Written | _Refused](self._written, self._refused):
                if kept.checkpoint is None:
                    kept.checkpoint = checkpoint
            if self._gathered:
                self._aside.append(_Interval(checkpoint, self._gathered, self._gathered_bytes))
                self._aside_bytes += self._gathered_bytes
        self._gathered, self._gathered_bytes = [], 0
        return partial(self._write_up_to, checkpoint)

    def completed(self, checkpoint: int) -> None:
        with self._lock:
            self._written = [one for one in self._written if _is_behind(one, checkpoint)]
            self._refused = [one for one in self._refused if _is_behind(one, checkpoint)]

    def discard(self, restored: int) -> None:
        """If the writer is at work, its thread aborts when that is over."""
        self._gathered = []
        with self._lock:
            self._discarded = True
            self._aside.clear()
            self._doomed += [one for one in self._written if _is_behind(one, restored)]
            self._written = []
        self._abort_doomed()

    def close(self) -> None:
        """Raises `JobError` if there are rows that no checkpoint holds."""
        if self._gathered or self._aside:
            raise JobError(f"sink {self._uid!r}: rows came behind the last checkpoint, and would be lost")

    def _write_early(self) -> None:
        with self._writing:
            self._write_aside(None)
            self._write_rows(None, self._gathered)
            self._gathered, self._gathered_bytes = [], 0

    def _write_up_to(self, checkpoint: int) -> SinkPart:
        try:
            with self._writing:
                self._write_aside(checkpoint)
        finally:
            self._abort_doomed()
        with self._lock:
            return SinkPart(
                tuple(
                    Committable(self._uid, one.sealed, one.checkpoint)
                    for one in self._written
                    if one.checkpoint is not None and one.checkpoint <= checkpoint
                ),
                tuple(
                    replace(one.letter, checkpoint=one.checkpoint)
                    for one in self._refused
                    if one.checkpoint is not None and one.checkpoint <= checkpoint
                ),
            )

    def _write_aside(self, checkpoint: int | None) -> None:
        """Write the intervals up to a checkpoint (None: all), each for itself: another one may complete without it."""
        while True:
            with self._lock:
                part = self._aside[0] if self._aside else None
            if part is None or (checkpoint is not None and part.checkpoint > checkpoint):
                return
            self._write_rows(part.checkpoint, part.batches)
            with self._lock:
                if self._aside:  # or it was discarded meanwhile
                    self._aside_bytes -= self._aside.popleft().bytes

    def _write_rows(self, checkpoint: int | None, batches: Sequence[pa.RecordBatch]) -> None:
        """Have rows written, again without those that are refused until none is; keep the message and the letters."""
        letters: list[ChainLetter] = []
        while batches:
            try:
                message = call_write(self._writer, batches, self._spark_schema)
            except MemoryError:
                raise
            except RowsRejected as rejected:
                batches, more = self._without(batches, rejected)
                letters += more
            except BaseException as error:
                raise_signalled(error)
                raise self._failed(error) from error
            else:
                self._put(checkpoint, message)
                break
        with self._lock:
            self._refused += [_Refused(checkpoint, letter) for letter in letters]
            self.refused += len(letters)

    def _without(
        self, batches: Sequence[pa.RecordBatch], rejected: RowsRejected
    ) -> tuple[list[pa.RecordBatch], list[ChainLetter]]:
        if self._rejections is None:
            refused = SinkRowError(
                f"write refused {rejected}: nothing says what becomes of such rows; give "
                "CheckpointConfig(failures=FailurePolicy(…)), or on_failure=FailurePolicy(…) to the sink"
            )
            raise self._failed(refused) from refused
        try:
            return self._rejections.take_out(batches, rejected)
        except ConfigError as error:
            # From the error that no restart mends: the job ends by it.
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> JobError:
        return JobError(f"sink {self._uid!r}: write failed: {described(error)}")

    def _put(self, checkpoint: int | None, message: Any) -> None:
        """Keep a message; one that cannot travel is aborted, and that it cannot is raised."""
        try:
            sealed = seal(message, self._key)
        except BaseException as error:
            raise_signalled(error)
            self._abort([message], checkpoint or 0)
            raise JobError(
                f"sink {self._uid!r}: its message cannot be sent to the driver: {text_of(error)}"
            ) from error
        with self._lock:
            doomed = self._doomed if self._discarded else self._written
            doomed.append(_Written(checkpoint, message, sealed))

    # ------------------------------------------------------------ either thread

    def _abort_doomed(self) -> None:
        """Abort what will not be committed, unless the writer is in use: its user calls this behind."""
        while True:
            with self._lock:
                if not self._doomed:
                    return
            if not self._writing.acquire(blocking=False):
                return
            try:
                with self._lock:
                    doomed, self._doomed = self._doomed, []
                by_checkpoint: dict[int, list[Any]] = {}
                for one in doomed:
                    by_checkpoint.setdefault(one.checkpoint or 0, []).append(one.message)
                for checkpoint, messages in by_checkpoint.items():
                    self._abort(messages, checkpoint)
            finally:
                self._writing.release()

    def _abort(self, messages: list[Any], checkpoint: int) -> None:
        try:
            self._writer.abort(messages, checkpoint)
        except BaseException as error:
            raise_signalled(error)
            # No one is left to tell.
            logger.warning(
                "sink %r: abort of what was written for checkpoint %d failed; it may have left something behind",
                self._uid,
                checkpoint,
                exc_info=True,
            )


def _is_behind(kept: _Written | _Refused, checkpoint: int) -> bool:
    return kept.checkpoint is None or kept.checkpoint > checkpoint


MAX_WRITERS = 1 << 12
"""Subtasks of a writer's sink: their numbers are the low bits of its batch ids."""


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


@dataclass
class FunctionSinkBody:
    """Calls the user's function with each batch at once. See `SinkBody`."""

    uid: str
    function: Callable[[pa.RecordBatch], Any]
    rules: RetryRules = NO_RULES

    def write(self, batch: pa.RecordBatch, mono_ms: int) -> Settled:
        failures = settle(self.uid, batch, self._call, rules=self.rules, takes_the_rest=True)
        return Settled(batch.num_rows, failures)

    def _call(self, rows: pa.RecordBatch) -> None:
        check_ran(self.function(rows), f"sink {self.uid!r}")

    def flush(self, mono_ms: int, *, force: bool) -> Settled:
        return NOTHING

    @property
    def due_ms(self) -> int | None:
        return None

    def close(self) -> None: ...


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
        """Stream writers have nothing to close."""

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
