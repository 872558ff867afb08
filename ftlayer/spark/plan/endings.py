"""Where the rows of a wrapped query go: a function, a stream writer, or another query."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftlayer.checks import check_function, check_ran
from ftlayer.functions.chains.batch_segment import ROW_TAG
from ftlayer.spark.batch.sinks import BatchFunctionSink, BatchSink, BatchWriterSink, EmitSink, stream_writer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from ftlayer.spark.plan.stream_plan import StreamPlan


@dataclass(frozen=True)
class Ending:
    """Where the rows go.

    Attributes:
        sink: takes them from a query that is tracked.
        plain: makes Spark's writer of them, with `FTStatus.OFF`.
        rejects: the sink may refuse rows.
        carrier: the column with their ids, where they go to another query; else "".
    """

    sink: BatchSink
    plain: Callable[[DataFrame], Any]
    rejects: bool = False
    carrier: str = ""


def function_ending(
    plan: StreamPlan, name: str, function: Callable[[DataFrame, int], Any], tagged: bool
) -> Ending:
    """Hand the rows to a function of (DataFrame, batch id); ``tagged``: with the column ``_ft_row``."""
    check_function(function, "sink: function(rows, batch id)", takes=2)
    operator = getattr(function, "__name__", "sink")

    def plain(rows: DataFrame) -> Any:
        from pyspark.sql import functions

        if tagged:
            rows = rows.withColumn(ROW_TAG, functions.lit(None).cast("bigint"))
        return rows.writeStream.foreachBatch(_ran(function, f"sink {operator!r}"))

    sink = BatchFunctionSink(function, operator, tagged, plan.source.rules, query=name)
    return Ending(sink, plain, rejects=tagged)


def writer_ending(
    plan: StreamPlan, name: str, source: str | type, options: dict[str, str], bisect: bool
) -> Ending:
    """Hand the rows to a Python Data Source's stream writer; ``bisect``: rows that it does not take fail."""
    writer = stream_writer(plan.spark, source, plan.schema, options)
    format_name = source if isinstance(source, str) else source.name()  # type: ignore[attr-defined]
    sink = BatchWriterSink(writer, format_name, bisect, plan.source.rules, query=name)
    return Ending(sink, lambda rows: rows.writeStream.format(format_name).options(**options), rejects=bisect)


def emit_ending(name: str, function: Callable[[DataFrame, int], Any], carrier: str) -> Ending:
    """Hand the rows, with their carriers, to a function that brings them to another query."""
    check_function(function, "emit: function(rows, batch id)", takes=2)

    def plain(rows: DataFrame) -> Any:
        from pyspark.sql import functions

        carried = rows.withColumn(carrier, functions.lit(None).cast("binary"))
        return carried.writeStream.foreachBatch(_ran(function, "emit: the function"))

    return Ending(EmitSink(function, carrier, query=name), plain, carrier=carrier)


def _ran(function: Callable[[DataFrame, int], Any], what: str) -> Callable[[DataFrame, int], None]:
    """Return ``function``, failing where it has not run (`check_ran`)."""

    def checked(rows: DataFrame, batch: int) -> None:
        check_ran(function(rows, batch), what)

    return checked
