"""Where the good rows of a batch go: a user's function, a Python Data Source's writer, or another query."""

from __future__ import annotations

import logging
import operator as op
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from ftlayer.common.checks import check_ran
from ftlayer.common.failures import FailException, RetryLater, RowsRejected
from ftlayer.common.printable import text_of
from ftlayer.common.rules.restart import is_of_no_row, lasting
from ftlayer.errors import ConfigError, FTLayerError, QueryError, UnsupportedError, error_for_code
from ftlayer.functions.chains.segments import ROW_TAG
from ftlayer.functions.failures import failure_of, this_process
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.functions.writing import call_commit, call_write, check_writer, settle
from ftlayer.records.failures import RowFailure
from ftlayer.spark.stages.task import task_place
from ftlayer.vertex.calls import Failure

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from ftlayer.spark.stages.run import StagesResult


_MAX_CHARS = 4_000

_NO_PAUSE = (
    "a RetryLater of a sink is an error as any other: the batch is tried again as the restart strategy says, whatever "
    "`after` says. To have single records tried again, raise RowsRejected from a sink with tagged=True"
)


def words_of(error: BaseException) -> str:
    """Return class and text of an error, and of Spark's the telling part of the text: without the JVM's stack.

    The texts of ftlayer's own errors say what they are about, save those that a user's function raises.
    """
    text = text_of(error)
    cut = text.find("\n\tat ")
    text = text[: cut if cut > 0 else _MAX_CHARS][:_MAX_CHARS]
    from_spark = type(error).__module__.partition(".")[0] in ("pyspark", "py4j")
    if from_spark or (isinstance(error, FTLayerError) and not isinstance(error, FailException)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def error_of_sink(error: BaseException, sink: str) -> FTLayerError:
    """Return the error to raise from what a sink has raised: it names the sink and the class.

    It is of the same class if that is one of ftlayer's, or derives from one, else a `QueryError`. What starting again
    cannot mend is of the class that says so.
    """
    final = lasting(error)
    raised = final or error
    said = words_of(raised)
    if not said.startswith(type(raised).__name__):
        said = f"{type(raised).__name__}: {said}"
    note = f" ({_NO_PAUSE})" if isinstance(error, RetryLater) else ""
    kind = error_for_code(raised.code) if isinstance(raised, FTLayerError) else QueryError
    return kind(f"{sink} raised {said}{note}")


# ---------------------------------------------------------------- an end in order, which no log should call a fault


# Spark logs what a stopped query raises as an error unless it finds this in the text (`StreamExecution`).
_SIGN = (
    "py4j.protocol.Py4JJavaError: An error occurred while calling the batch: java.lang.InterruptedException"
)


class StoppedError(Exception):
    """Raised to Spark, and to no user, in place of whatever a batch of a query that was told to stop has raised."""

    def __init__(self, query: str) -> None:
        super().__init__(f"{query} was told to stop, and its batch is given up ({_SIGN})")


class _Stops(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], StoppedError))


_STOPS = _Stops()


def hide_stops() -> None:
    """Have Py4J, which logs each exception that goes back to the JVM as an error, pass over `StoppedError`."""
    logging.getLogger("py4j.clientserver").addFilter(_STOPS)


_MASK = (1 << 64) - 1


def rejections(rejected: RowsRejected, operator: str, rules: RetryRules = NO_RULES) -> tuple[Failure, ...]:
    """Return the failures of the records that a sink has named by their rows' ``_ft_row``.

    Raises `ConfigError` for what is no such name.
    """
    found = []
    place = this_process("the driver")
    for key, error in rejected.errors.items():
        try:
            root = op.index(key) & _MASK
        except TypeError:
            raise _no_row(operator, key) from rejected
        if isinstance(error, str):
            failure = RowFailure(0, operator, error, "")
        else:
            failure = failure_of(0, operator, error, rules)
        found.append(Failure.of(root, failure, place))
    if not found:
        raise ConfigError(
            f"sink {operator!r} raised RowsRejected without a row: name one at least, or return"
        )
    return tuple(found)


def unknown_row(operator: str, root: int) -> ConfigError:
    return _no_row(operator, root - (1 << 64) if root >> 63 else root)


def _no_row(operator: str, key: object) -> ConfigError:
    return ConfigError(
        f"sink {operator!r} raised RowsRejected for {key!r}, which is the _ft_row of no row that it was given"
    )


class BatchSink(Protocol):
    """Takes the good rows of a batch. May be called again with the same batch id after a crash."""

    def write(self, batch: int, result: StagesResult, incarnation: int) -> tuple[Failure, ...]:
        """Write the rows; returns when they are written, or with the records that it does not take.

        If there are any, nothing of this call counts: it is called again without them. What a user's sink raises
        goes up as the error that `error_of_sink` makes of it.
        """
        ...


@dataclass(frozen=True)
class BatchFunctionSink:
    """A user's function of (DataFrame, batch id), as ``foreachBatch`` takes it.

    ``tagged``: it gets the column `ROW_TAG`, and may raise `RowsRejected`.
    """

    function: Callable[[DataFrame, int], Any]
    operator: str = "sink"
    tagged: bool = False
    rules: RetryRules = NO_RULES
    query: str = "query"

    def write(self, batch: int, result: StagesResult, incarnation: int) -> tuple[Failure, ...]:
        try:
            returned = self.function(result.tagged_rows() if self.tagged else result.good_rows(), batch)
        except RowsRejected as rejected:
            if not self.tagged:
                raise ConfigError(
                    f"sink {self.operator!r} raised RowsRejected, and its rows have no names: give "
                    f"sink(…, tagged=True), and name them by their column {ROW_TAG!r}"
                ) from rejected
            return rejections(rejected, self.operator, self.rules)
        except BaseException as error:
            raise error_of_sink(error, f"{self.query}: sink {self.operator!r}") from error
        check_ran(returned, f"sink {self.operator!r}")
        return ()


@dataclass(frozen=True)
class EmitSink:
    """A user's function that hands rows to another query; ``column`` holds the carrier of each."""

    function: Callable[[DataFrame, int], Any]
    column: str
    query: str = "query"

    def write(self, batch: int, result: StagesResult, incarnation: int) -> tuple[Failure, ...]:
        try:
            returned = self.function(result.emitted_rows(self.column, incarnation), batch)
        except BaseException as error:
            raise error_of_sink(error, f"{self.query}: the function of emit") from error
        check_ran(returned, "emit: the function")
        return ()


@dataclass(frozen=True)
class BatchWriterSink:
    """A Python Data Source's stream writer (plain or Arrow), driven from here.

    Tasks call ``write`` and hand their commit message back through Spark; the driver calls ``commit``
    with the messages of the winning attempts, or ``abort`` with those there are. ``bisect``: where ``write`` raises,
    tasks look for the rows that it does not take.
    """

    writer: Any
    operator: str = "writer"
    bisect: bool = False
    rules: RetryRules = NO_RULES
    query: str = "query"

    def write(self, batch: int, result: StagesResult, incarnation: int) -> tuple[Failure, ...]:
        from pyspark import cloudpickle

        from ftlayer.spark.stages.run import map_in_arrow

        rows = result.tagged_rows() if self.bisect else result.good_rows()
        task = WriteTask(self.writer, result.schema, self.operator if self.bisect else "", self.rules)
        messages: list[Any] = []
        failures: list[Failure] = []
        taken = 0
        try:
            for row in map_in_arrow(rows, task, "written binary").collect():
                written, rejected, rest = cloudpickle.loads(row[0])
                messages += written
                failures += rejected
                taken += rest
            if not failures:
                call_commit(self.writer, messages, batch)
        except BaseException as error:
            self.writer.abort(messages, batch)
            raise error_of_sink(error, f"{self.query}: writer {self.operator!r}") from error
        if failures:
            # Also what is good was found by halves, and may be of a record that has a bad row elsewhere.
            self.writer.abort(messages, batch)
            if not (batch or taken) and is_of_no_row(
                [each.traceback for each in failures], dead=any(each.fatal for each in failures)
            ):
                wrong = QueryError(
                    f"{self.query}: writer {self.operator!r} could write no row of the first batch: "
                    f"{failures[0].reason}"
                )
                wrong.is_programs = True
                raise wrong
        # A record may have several rows that are not taken.
        return tuple({failure.root: failure for failure in reversed(failures)}.values())


@dataclass(frozen=True)
class WriteTask:
    """Writes one partition; yields one row: its commit messages and the records that failed, pickled.

    ``bisects`` is the operator that rows fail in, if they may: the rows then have the column `ROW_TAG`, and the
    partition is held in memory.
    """

    writer: Any
    schema: StructType
    bisects: str = ""
    rules: RetryRules = NO_RULES

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark.serializers import CloudPickleSerializer

        make_pickler: Any = CloudPickleSerializer
        written = self._write_by_halves(list(batches)) if self.bisects else (self._write(batches), [], 0)
        # As Spark does: the message's class may be of the main program, which tasks cannot import.
        packed = make_pickler().dumps(written)
        yield pa.RecordBatch.from_arrays([pa.array([packed], pa.binary())], names=["written"])

    def _write(self, batches: Iterable[pa.RecordBatch]) -> list[Any]:
        return [call_write(self.writer, batches, self.schema)]

    def _write_by_halves(self, batches: list[pa.RecordBatch]) -> tuple[list[Any], list[Failure], int]:
        if not sum(batch.num_rows for batch in batches):
            return self._write([]), [], 0
        rows = pa.concat_batches(batches)
        tags = rows.column(ROW_TAG).to_numpy().view(np.uint64)
        messages: list[Any] = []

        def write(part: pa.RecordBatch) -> None:
            messages.extend(self._write([part]))

        failed = settle(self.bisects, rows.drop_columns([ROW_TAG]), write, rules=self.rules)
        place = task_place()
        failures = [Failure.of(int(tags[failure.row]), failure, place) for failure in failed]
        return messages, failures, rows.num_rows - len(failed)


def stream_writer(
    spark: SparkSession, source: str | type, schema: StructType, options: dict[str, str]
) -> Any:
    from pyspark.sql.datasource import CaseInsensitiveDict, DataSource

    cls = data_source_class(spark, source) if isinstance(source, str) else source
    if not isinstance(cls, type) or not issubclass(cls, DataSource):
        raise ConfigError(f"write_stream: {cls!r} is not a pyspark.sql.datasource.DataSource")
    writer = cls(CaseInsensitiveDict(options)).streamWriter(schema, False)
    check_writer(writer, "write_stream")
    return writer


def data_source_class(spark: SparkSession, name: str) -> type:
    """Find the class of a registered Python Data Source; `UnsupportedError` for any other format."""
    from py4j.protocol import Py4JJavaError
    from pyspark import cloudpickle
    from pyspark.errors import PySparkException

    manager = spark._jsparkSession.sessionState().dataSourceManager()
    try:
        builder = manager.lookupDataSource(name)
        # A Scala sequence of signed bytes, fetched as text: a call for each would take seconds.
        numbers = builder.dataSourceCls().command().mkString(",").split(",")
    except (Py4JJavaError, PySparkException) as error:
        raise UnsupportedError(
            f"write_stream({name!r}): no Python Data Source of this name is registered "
            f"(spark.dataSource.register); for Spark's own formats use sink(lambda rows, batch: rows.write…)"
        ) from error
    cls: type = cloudpickle.loads(bytes(int(number) & 0xFF for number in numbers))
    return cls
