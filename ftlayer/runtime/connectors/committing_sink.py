"""A Python Data Source's writer in a graph with checkpoints: it writes before one, and the driver commits behind it."""

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
from ftlayer.common.checks import named_type
from ftlayer.common.failures import RowsRejected
from ftlayer.common.printable import described, text_of
from ftlayer.config import MIB
from ftlayer.errors import ConfigError, JobError, SinkRowError
from ftlayer.functions.failures import raise_signalled, rejections_of
from ftlayer.functions.writing import call_write
from ftlayer.records.failures import RowFailure
from ftlayer.records.ipc import as_stream, may_share, row_alone
from ftlayer.runtime.protocol.messages import seal
from ftlayer.runtime.task.contract import Settled
from ftlayer.topology.operators import WriterSink
from ftlayer.vertex.calls import Attempt

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)


class RowRejections:
    """Makes letters of the rows that the writer of one subtask's sink refuses.

    A refused row is dead at once: it is part of a write that is to be whole with this checkpoint. Its letter has no
    checkpoint yet.
    """

    def __init__(
        self,
        uid: str,
        subtask: int,
        place: str,
        *,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        draw: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """``uid`` is the sink's, and its chain's; ``place`` says in words which process this is."""
        self._uid = uid
        self._subtask = subtask
        self._place = place
        self._wall_ms = wall_ms
        self._draw = draw

    def take_out(
        self, batches: Sequence[pa.RecordBatch], rejected: RowsRejected
    ) -> tuple[list[pa.RecordBatch], list[ChainLetter]]:
        """Return what is left of ``batches`` without the rows that ``rejected`` numbers, and letters of these.

        Rows are numbered from 0 through all batches. Raises `ConfigError` for none, and for a row that is not there:
        the writer would be called without end.
        """
        rows = sum(batch.num_rows for batch in batches)
        failures = {failure.row: failure for failure in rejections_of(rejected, rows, self._uid)}
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
        now_ms = self._wall_ms()
        attempt = Attempt(1, now_ms, failure.reason, self._uid, self._place, failure.traceback)
        return ChainLetter(
            letter=self._draw(LETTER_BYTES),
            checkpoint=0,
            chain=self._uid,
            subtask=self._subtask,
            input=0,
            kind=LetterKind.ROW,
            operator=self._uid,
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
"""Rows that wait for a barrier, or for the end of a checkpoint before, are written at this size."""

NOTHING = Settled(0)


@dataclass(frozen=True, slots=True)
class _Interval:
    """Rows between two barriers; ``checkpoint`` is the second one's."""

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
    """The letter of a row that the writer has refused; ``checkpoint`` as in `_Written`."""

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
        """Make it ready. ``key`` seals the messages.

        ``rejections`` makes letters of rows that the writer refuses; None: it may refuse none. Raises `ConfigError`
        for what is no writer, or a schema that Spark lacks.
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
