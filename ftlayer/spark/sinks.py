"""Where the good rows of a batch go: a user's function, a Python Data Source's writer, or another query."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from ftlayer.errors import ConfigError, UnsupportedError
from ftlayer.functions.writers import call_write

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from ftlayer.spark.stage_run import StagesResult


class Sink(Protocol):
    """Takes the good rows of a batch. May be called again with the same batch id after a crash."""

    def write(self, batch: int, result: StagesResult, incarnation: int) -> None:
        """Write the rows; returns when they are written."""
        ...


@dataclass(frozen=True)
class FunctionSink:
    """A user's function of (DataFrame, batch id), as ``foreachBatch`` takes it."""

    function: Callable[[DataFrame, int], Any]

    def write(self, batch: int, result: StagesResult, incarnation: int) -> None:
        """Call the function."""
        self.function(result.good_rows(), batch)


@dataclass(frozen=True)
class EmitSink:
    """A user's function that hands rows to another query; ``column`` holds the carrier of each."""

    function: Callable[[DataFrame, int], Any]
    column: str

    def write(self, batch: int, result: StagesResult, incarnation: int) -> None:
        """Call the function with the rows and their carriers."""
        self.function(result.emitted_rows(self.column, incarnation), batch)


@dataclass(frozen=True)
class WriterSink:
    """A Python Data Source's stream writer (plain or Arrow), driven from here.

    Tasks call ``write`` and hand their commit message back through Spark; the driver calls ``commit``
    with the messages of the winning attempts, or ``abort`` with those there are.
    """

    writer: Any

    def write(self, batch: int, result: StagesResult, incarnation: int) -> None:
        """Write and commit the rows."""
        from pyspark import cloudpickle

        rows = result.good_rows()
        messages: list[Any] = []
        try:
            written = rows.mapInArrow(write_partition(self.writer, rows.schema), "message binary")
            messages.extend(cloudpickle.loads(row[0]) for row in written.collect())
            self.writer.commit(messages, batch)
        except Exception:
            self.writer.abort(messages, batch)
            raise


def write_partition(
    writer: Any, schema: StructType
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the task that writes one partition and yields its pickled commit message."""
    from pyspark.serializers import CloudPickleSerializer

    make_pickler: Any = CloudPickleSerializer

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        message = call_write(writer, batches, schema)
        # As Spark does: the message's class may be of the main program, which tasks cannot import.
        packed = make_pickler().dumps(message)
        yield pa.RecordBatch.from_arrays([pa.array([packed], pa.binary())], names=["message"])

    return write


def stream_writer(
    spark: SparkSession, source: str | type, schema: StructType, options: dict[str, str]
) -> Any:
    """Make the stream writer of a Python Data Source, given as its class or its registered name."""
    from pyspark.sql.datasource import CaseInsensitiveDict, DataSource

    cls = data_source_class(spark, source) if isinstance(source, str) else source
    if not issubclass(cls, DataSource):
        raise ConfigError(f"write_stream: {cls!r} is not a pyspark.sql.datasource.DataSource")
    return cls(CaseInsensitiveDict(options)).streamWriter(schema, False)


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
