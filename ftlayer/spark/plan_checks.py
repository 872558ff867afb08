"""What is refused when a query is wrapped, before anything runs: each with its name and a way out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ftlayer.errors import ConfigError, InvalidTopologyError, UnsupportedError
from ftlayer.spark.stage_task import FT, SOURCE_FT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from ftlayer.spark.steps import Transform

STATEFUL = {
    "EventTimeWatermark": "withWatermark",
    "DeduplicateWithinWatermark": "dropDuplicatesWithinWatermark",
    "FlatMapGroupsWithState": "flatMapGroupsWithState",
    "FlatMapGroupsInPandasWithState": "applyInPandasWithState",
    "TransformWithState": "transformWithState",
    "TransformWithStateInPySpark": "transformWithState",
    "TransformWithStateInPandas": "transformWithStateInPandas",
}
"""Spark's logical operators that keep state over batches, and how a user knows them."""

STATEFUL_WHEN_STREAMING = {"Deduplicate": "dropDuplicates", "Aggregate": "a streaming aggregation"}

WAY_OUT = (
    "a record that is replayed comes later and would be taken for late, or for a duplicate, and be lost. "
    "Do it behind the sink: write the rows, and let a plain query aggregate them; or deduplicate in the "
    "sink by its key"
)


def check_session(spark: Any) -> None:
    """Raise `UnsupportedError` for a Spark Connect session."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise UnsupportedError(
            "a wrapped query needs a classic Spark session: its driver has to run the batch protocol beside Spark, "
            "and Spark Connect gives no access to it. Run the driver with spark-submit or "
            "SparkSession.builder.master(…). Over Connect you can read pending(), dead_letters() and deliveries()"
        )


def check_source(frame: DataFrame, name: str) -> None:
    """Check what `FTLayer.source` wraps: a stream of rows with no state and no reserved names."""
    from pyspark.sql import DataFrame

    if not isinstance(frame, DataFrame):
        raise InvalidTopologyError(
            f"source {name!r}: expected a streaming DataFrame (spark.readStream.….load()), "
            f"got {type(frame).__name__}"
        )
    check_session(frame.sparkSession)
    if not frame.isStreaming:
        raise InvalidTopologyError(
            f"source {name!r}: the DataFrame is not a stream; read it with spark.readStream"
        )
    reserved = [column for column in frame.columns if column.startswith(FT)]
    if reserved:
        raise InvalidTopologyError(
            f"source {name!r}: column {reserved[0]!r} has a reserved name (all that start with {FT!r} are): "
            "rename it before wrapping"
        )
    duplicates = {column for column in frame.columns if frame.columns.count(column) > 1}
    if duplicates:
        raise InvalidTopologyError(f"source {name!r}: two columns are named {min(duplicates)!r}; rename one")
    found = _stateful(frame, {**STATEFUL, **STATEFUL_WHEN_STREAMING})
    if found:
        raise UnsupportedError(
            f"source {name!r} is read through {found}, which keeps state over batches: {WAY_OUT}"
        )


def check_columns(schema: StructType, columns: Iterable[str], what: str) -> None:
    """Raise `ConfigError` naming the first of ``columns`` that is not there."""
    for column in columns:
        if not isinstance(column, str):
            raise ConfigError(f"{what}: expected names of columns, got {type(column).__name__}")
        if column.split(".")[0] not in schema.names:
            raise ConfigError(f"{what}: there is no column {column!r}; there are {', '.join(schema.names)}")


def check_transform(function: Any, uid: str) -> None:
    """Raise `InvalidTopologyError` for what cannot be called."""
    if not callable(function):
        raise InvalidTopologyError(f"transform {uid!r}: expected a function of a DataFrame")


def transformed_schema(spark: SparkSession, schema: StructType, step: Transform) -> StructType:
    """Try ``step`` on an empty DataFrame; return the user's columns that come out.

    Raises `UnsupportedError` for operators with state and `InvalidTopologyError` when `FT` gets lost.
    """
    from pyspark.sql.types import StructType

    from ftlayer.spark.stage_run import check_keeps_ft

    extra: Any = StructType.fromDDL(f"{FT} struct<root: bigint>")
    empty = spark.createDataFrame([], StructType([*schema.fields, *extra.fields]))
    result = step.function(empty)
    found = _stateful(result, STATEFUL)
    if found:
        raise UnsupportedError(f"transform {step.uid!r} uses {found}: {WAY_OUT}")
    check_keeps_ft(result, step.uid)
    return StructType([field for field in result.schema.fields if field.name != FT])


def with_source_ft(frame: DataFrame) -> DataFrame:
    """Add the column `FT` as a source's own rows have it: null."""
    from pyspark.sql import functions

    return frame.withColumn(FT, functions.lit(None).cast(SOURCE_FT))


def _stateful(frame: Any, names: dict[str, str]) -> str:
    """Return the user's word for the first operator of ``names`` in the analyzed plan, "" if there is none."""
    todo = [frame._jdf.queryExecution().analyzed()]
    while todo:
        node = todo.pop()
        found = names.get(str(node.nodeName()))
        if found:
            return found
        children = node.children()
        todo.extend(children.apply(i) for i in range(children.size()))
    return ""
