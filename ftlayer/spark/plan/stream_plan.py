"""What a wrapped stream is made of: its source, and the steps that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ftlayer.common.checks import check_function, check_ran, check_unlike
from ftlayer.common.rules.circuit import Limit
from ftlayer.errors import ConfigError, InvalidTopologyError, UnhashableKeyError, UnsupportedError
from ftlayer.functions.chains.segments import ROW_TAG, Chain
from ftlayer.functions.pickling import WAY_OUT as WAY_OUT_OF_PICKLING
from ftlayer.functions.pickling import pickling_fault
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.functions.steps import FunctionStep
from ftlayer.spark.batch.sinks import BatchFunctionSink, BatchSink, BatchWriterSink, EmitSink, stream_writer
from ftlayer.spark.circuits import WHOLE_QUERY
from ftlayer.spark.connection import FTLayerEngine
from ftlayer.spark.deliveries.ingest_reader import stream_of_ingest
from ftlayer.spark.sessions import stream_reader
from ftlayer.spark.stages.pages import SOURCE_FT, MapArrow
from ftlayer.spark.stages.task import FT, FrameStep, StagePlan, Step, Transform, plan_stages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


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
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise UnsupportedError(
            "a wrapped query needs a classic Spark session: over Spark Connect its sink could go on when its run or "
            "the server has ended, and nothing would watch it behind this program. Run the driver with spark-submit "
            "or SparkSession.builder.master(…). Over Connect you can run topologies, and read pending(), "
            "dead_letters() and deliveries()"
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
    check_names(frame.schema, f"source {name!r}")
    found = _stateful(frame, {**STATEFUL, **STATEFUL_WHEN_STREAMING})
    if found:
        raise UnsupportedError(
            f"source {name!r} is read through {found}, which keeps state over batches: {WAY_OUT}"
        )


def check_names(schema: StructType, what: str) -> None:
    """Raise `InvalidTopologyError` for a reserved name of a column, or one that two columns have for Spark."""
    for name in schema.names:
        if name.lower().startswith(FT):
            raise InvalidTopologyError(
                f"{what}: column {name!r} has a reserved name (all that start with {FT!r} are): rename it"
            )
    check_unlike(schema.names, what)


def check_functions(steps: Iterable[Step]) -> None:
    """Raise `InvalidTopologyError` for a function that cannot be sent to Spark's Python workers."""
    for step in steps:
        if isinstance(step, FunctionStep) and (fault := pickling_fault(step)) is not None:
            raise InvalidTopologyError(
                f"{step.uid!r} cannot be sent to Spark's Python workers: {fault}. {WAY_OUT_OF_PICKLING}, or keep it in "
                "an imported module"
            )


def check_columns(
    spark: SparkSession, schema: StructType, columns: Iterable[str], what: str
) -> tuple[str, ...]:
    """Return ``columns`` as the schema spells them: found as Spark finds them, by case only if it is set so.

    ``a.b`` is field ``b`` of struct ``a``, unless a column is called just that. Raises `ConfigError` naming
    the first that is not there, or could be two.
    """
    exact = str(spark.conf.get("spark.sql.caseSensitive")) == "true"
    return tuple(".".join(_path(schema, column, exact, what)) for column in columns)


def _path(schema: StructType, column: object, exact: bool, what: str) -> list[str]:
    from pyspark.sql.types import StructType

    if not isinstance(column, str):
        raise ConfigError(f"{what}: expected names of columns, got {type(column).__name__}")

    def find(fields: StructType, name: str) -> list[str]:
        return [one for one in fields.names if one == name or (not exact and one.lower() == name.lower())]

    found = find(schema, column)
    if found and "." in column:
        return found[:1]
    path: list[str] = []
    fields: Any = schema
    for part in column.split("."):
        found = find(fields, part) if isinstance(fields, StructType) else []
        if not found:
            raise ConfigError(f"{what}: there is no column {column!r}; there are {', '.join(schema.names)}")
        if len(found) > 1:
            raise ConfigError(
                f"{what}: {column!r} may be {' or '.join(map(repr, found))}, which differ in case only; rename one, "
                "or set spark.sql.caseSensitive to true"
            )
        path.append(found[0])
        fields = fields[found[0]].dataType
    return path


def is_hashable(schema: StructType, columns: tuple[str, ...]) -> bool:
    """Whether there are columns, and our hash over them is Spark's own."""
    if not columns:
        return False
    try:
        check_key(schema, columns, "key")
    except UnhashableKeyError:
        return False
    return True


def check_key(schema: StructType, columns: tuple[str, ...], what: str) -> None:
    """Raise `UnhashableKeyError` for a key whose hash would not be Spark's own."""
    from ftlayer.functions.data_sources import to_arrow_schema
    from ftlayer.records.traced import KeySelector

    for column in columns:
        kind: Any = schema
        for part in [column] if column in schema.names else column.split("."):
            kind = kind[part].dataType
        collation = _collation(kind)
        if collation:
            raise UnhashableKeyError(
                f"{what}: column {column!r} has the collation {collation}, by which Spark hashes its sort key, "
                "and Arrow does not know of it: add a column with lower(…) or collate(…, 'UTF8_BINARY') to the "
                "source and take that for the key"
            )
    KeySelector(columns).check(to_arrow_schema(schema))


def _collation(kind: Any) -> str:
    """Return the first collation in a type under which strings that differ may be equal, "" if there is none."""
    from pyspark.sql.types import ArrayType, StringType, StructType

    if isinstance(kind, StringType):
        return "" if kind.isUTF8BinaryCollation() else str(kind.collation)
    if isinstance(kind, ArrayType):
        return _collation(kind.elementType)
    if isinstance(kind, StructType):
        return next(filter(None, (_collation(field.dataType) for field in kind.fields)), "")
    return ""


def transformed_schema(spark: SparkSession, schema: StructType, step: Transform) -> StructType:
    """Try ``step`` on an empty DataFrame; return the user's columns that come out.

    Raises `UnsupportedError` for operators with state and `InvalidTopologyError` when `FT` gets lost.
    """
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from ftlayer.spark.stages.run import check_keeps_ft, with_column

    empty = spark.createDataFrame([], with_column(schema, FT, TRACKED_FT))
    result = step.function(empty)
    if not isinstance(result, DataFrame):
        raise InvalidTopologyError(
            f"transform {step.uid!r} returned a {type(result).__name__}, not a DataFrame"
        )
    found = _stateful(result, STATEFUL) or _stateful_on_stream(empty, step)
    if found:
        raise UnsupportedError(f"transform {step.uid!r} uses {found}: {WAY_OUT}")
    check_keeps_ft(result, step.uid)
    return StructType([field for field in result.schema.fields if field.name != FT])


def with_source_ft(frame: DataFrame) -> DataFrame:
    """Add the column `FT` as a source's own rows have it: null."""
    from pyspark.sql import functions

    return frame.withColumn(FT, functions.lit(None).cast(SOURCE_FT))


def _stateful_on_stream(empty: DataFrame, step: Transform) -> str:
    """Return the user's word for a step's operator with state that Spark drops from a static plan at once.

    A watermark is such a one. A function that asks for results cannot be tried on a stream; it is let pass.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql import functions

    columns = [functions.lit(None).cast(field.dataType).alias(field.name) for field in empty.schema.fields]
    reader = stream_reader(empty.sparkSession, "ftlayer_check")
    stream = reader.format("rate").load().select(*columns)
    try:
        return _stateful(step.function(stream), STATEFUL)
    except PySparkException:
        return ""


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


def all_nullable(schema: StructType) -> StructType:
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(field.name, field.dataType, True, field.metadata) for field in schema])


@dataclass(frozen=True)
class SourceSpec:
    """The wrapped source: its DataFrame, name and key; or an ingest's; or one resumed by its carriers.

    ``rules`` and ``limit`` are its own, and the layer's where it has none.
    """

    frame: DataFrame
    name: str
    key: tuple[str, ...] = ()
    ingest: str = ""
    carrier: str = ""
    rules: RetryRules = NO_RULES
    limit: Limit | None = None


@dataclass(frozen=True)
class StreamPlan:
    """A source and the steps behind it: what a `TrackedStream` holds, and a `TrackedWriter` runs.

    Attributes:
        schema: the columns behind the last step.
        schemas: the columns behind each step.
        limits: of ``max_failing``, of the operators that have one.
    """

    layer: FTLayerEngine
    source: SourceSpec
    schema: StructType
    steps: tuple[Step, ...] = ()
    schemas: tuple[StructType, ...] = ()
    limits: tuple[tuple[str, Limit], ...] = ()

    @property
    def spark(self) -> SparkSession:
        return self.source.frame.sparkSession

    def then(self, step: Step, schema: StructType) -> StreamPlan:
        """Return the plan with another step, behind which the columns are ``schema``."""
        return replace(self, steps=(*self.steps, step), schemas=(*self.schemas, schema), schema=schema)

    def limited(self, uid: str, limit: Limit) -> StreamPlan:
        return replace(self, limits=(*self.limits, (uid, limit)))

    def failing_limits(self) -> dict[str, Limit]:
        """Return how many may fail, by operator; "" for those without a limit of their own."""
        whole = self.source.limit
        return dict(self.limits) | ({} if whole is None else {WHOLE_QUERY: whole})

    def stage_schemas(self) -> tuple[StructType, ...]:
        """Return the columns after each stage of `plan_stages`."""
        schemas = []
        before = [self.source.frame.schema, *self.schemas]
        place = 0
        for stage in plan_stages(self.steps).stages:
            place += len(stage.frame_steps) + len(stage.functions)
            schemas.append(before[place])
        return tuple(schemas)


def stream_of_source(source: SourceSpec, query: str) -> str:
    """Return the name under which the vertex keeps a source's records for a query."""
    return stream_of_ingest(source.ingest) if source.ingest else f"{query}/{source.name}"


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
    def checked(rows: DataFrame, batch: int) -> None:
        check_ran(function(rows, batch), what)

    return checked


TRACKED_FT = "struct<root: bigint>"
"""The type of `FT` where a transform sees it (DDL)."""


def plain_rows(source: DataFrame, stages: StagePlan, schemas: Sequence[StructType]) -> DataFrame:
    """Apply the steps to ``source``. An exception of a function fails the query, as in Spark."""
    from ftlayer.spark.stages.run import map_in_arrow

    frame = source
    for stage, schema in zip(stages.stages, schemas, strict=True):
        frame = _frame_steps(frame, stage.frame_steps)
        if stage.functions:
            frame = map_in_arrow(frame, _run(stage.functions), schema)
    return _frame_steps(frame, stages.before_sink)


def transform_plain(frame: DataFrame, step: Transform) -> DataFrame:
    """Apply a transform to rows that are not tracked.

    One that names the column `FT` in so many words gets a null there, which is taken off again: Spark's
    optimizer leaves nothing of it in the plan.
    """
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions

    try:
        result: DataFrame = step.function(frame)
    except AnalysisException as error:
        if f"`{FT}`" not in str(error):
            raise
        nothing = functions.lit(None).cast(TRACKED_FT)
        result = step.function(frame.withColumn(FT, nothing)).drop(FT)
    return result


def _frame_steps(frame: DataFrame, steps: Sequence[FrameStep]) -> DataFrame:
    from ftlayer.spark.stages.run import apply_frame_step

    for step in steps:
        frame = transform_plain(frame, step) if isinstance(step, Transform) else apply_frame_step(frame, step)
    return frame


def _run(functions: tuple[FunctionStep, ...]) -> MapArrow:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        chain = Chain(functions)
        for batch in batches:
            yield from chain.run_untracked(batch)

    return run
