"""A wrapped stream: records what the user asks of it; `sink`, `write_stream` and `emit` turn it into a query."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from ftlayer.common import checks
from ftlayer.common.rules.circuit import Limit
from ftlayer.errors import ConfigError, InvalidTopologyError
from ftlayer.functions.data_sources import from_arrow_schema, to_arrow_schema
from ftlayer.functions.retry_rules import FailureOptions, RetryRules, rules_of
from ftlayer.functions.steps import Filter, FlatMap, Map, MapAsync, MapBatches, Record, result_schema
from ftlayer.spark.plan import stream_plan
from ftlayer.spark.stages.task import Repartition, Step, Transform, check_unique

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from ftlayer.spark.query.writer import TrackedWriter

# What Spark says where a session is missing: the classic one, and Spark Connect's.
_NO_SESSION = ("SESSION_OR_CONTEXT_NOT_EXISTS", "NO_ACTIVE_OR_DEFAULT_SESSION")


_WORDS = {
    "start awaittermination trigger outputmode option options queryname execute run": "end the stream first. "
    ".sink(function, checkpoint=…), .write_stream(source, checkpoint=…) and .emit(…) return a writer, which has "
    ".trigger(…), .option(…) and .start(); .start() returns the query, which has .awaitTermination()",
    "writestream foreachbatch foreach totable addsink sinkto write": "end it with .sink(function, checkpoint=…), whose "
    "function(rows, batch_id) is that of foreachBatch, or with .write_stream(source, checkpoint=…), then .start() it",
    "groupby groupbykey reduce reducebykey aggregate agg sum min max count mean avg window withwatermark join distinct "
    "dropduplicates dropduplicateswithinwatermark": "a wrapped query keeps no state over batches: a record that is "
    "replayed would come too late for it. Aggregate in the function of .sink(…), or take a StreamEnvironment, whose "
    "streams have .key_by(…) and, behind it, .reduce(…), .aggregate(…), .window(…) and .join(…)",
    "show print collect topandas toarrow head take first tolocaliterator": "a stream has rows when it runs: "
    ".sink(lambda rows, batch_id: rows.show(), checkpoint=…).start()",
    "select selectexpr withcolumn withcolumns withcolumnrenamed where drop alias fillna orderby sort limit": "say "
    ".transform(lambda rows: rows.{name}(…)), whose rows have to keep the column _ft: a select names it, as in "
    "select('_ft', …), or takes all, as in select('*', …)",
    "mapinpandas mapinarrow mappartitions": ".map_batches(function, schema, kind='arrow' or 'pandas')",
    "columns dtypes printschema": "it is in .schema",
}
"""What Spark's and Flink's users look for, and what there is."""


class StepOptions(FailureOptions, total=False):
    """Of a step whose calls can be paced. ``rate_limit``: records a second of each task; None: no limit."""

    rate_limit: float | None


class TrackedStream(checks.UserFacing, words=_WORDS):
    """A source and the steps asked for so far. Immutable: each method returns a new one."""

    def __init__(self, plan: stream_plan.StreamPlan) -> None:
        """For `FTLayer.source` and `FTLayer.resume`."""
        self._plan = plan
        self._unstarted = checks.Unstarted(
            "the stream that was made here has no end, so nothing runs. Each method returns a new stream: end the last "
            "in .sink(…), .write_stream(…) or .emit(…), and .start() what that returns"
        )

    def __repr__(self) -> str:
        source = self._plan.source
        steps = f", {len(self._plan.steps)} steps" if self._plan.steps else ""
        name = source.name or source.ingest or source.carrier
        return f"TrackedStream({name!r}{steps}, {self.schema.simpleString()})"

    @property
    def schema(self) -> StructType:
        """The stream's columns."""
        return self._plan.schema

    @property
    def limits(self) -> tuple[tuple[str, Limit], ...]:
        """The limits of ``max_failing`` that operators have, by operator."""
        return self._plan.limits

    def failing_limits(self) -> dict[str, Limit]:
        """Return how many may fail, by operator; "" for those without a limit of their own."""
        return self._plan.failing_limits()

    # ------------------------------------------------------------ functions of a record

    def map(
        self,
        function: Callable[[Record], Record],
        schema: StructType | str,
        *,
        name: str = "",
        **options: Unpack[StepOptions],
    ) -> TrackedStream:
        """Apply ``function`` to each record (a dict); it returns a dict with the columns of ``schema``.

        A record for which it raises fails alone and is tried again; one for which it returns what does not fit the
        schema would fail alike, and is a dead letter at once. ``retry_on`` and ``dead_on`` say for which errors, as
        those of `FTLayer.embedded` do for all operators, and ``max_failing`` how many of them may be.

        ``rate_limit``, here and below, is how many records a second each task gives the function, those that are tried
        again among them; None: as many as come. The task waits in between.
        """
        uid = self._uid("map", function, name)
        return self._each(Map, uid, function, struct_of(schema, uid), options)

    def flat_map(
        self,
        function: Callable[[Record], Any],
        schema: StructType | str,
        *,
        name: str = "",
        **options: Unpack[StepOptions],
    ) -> TrackedStream:
        """Like `map`, with an iterable of dicts: none, one or many."""
        uid = self._uid("flat_map", function, name)
        return self._each(FlatMap, uid, function, struct_of(schema, uid), options)

    def filter(
        self, function: Callable[[Record], Any], *, name: str = "", **options: Unpack[StepOptions]
    ) -> TrackedStream:
        """Keep the records for which ``function`` is true; the others are done."""
        uid = self._uid("filter", function, name)
        if options.get("extra_keys") is not None:
            raise ConfigError("filter: extra_keys: it is of operators that return records")
        return self._each(Filter, uid, function, self.schema, options)

    def map_batches(
        self,
        function: Callable[[Any], Any],
        schema: StructType | str | None = None,
        *,
        kind: Literal["arrow", "pandas"] = "arrow",
        tagged: bool = False,
        name: str = "",
        **options: Unpack[FailureOptions],
    ) -> TrackedStream:
        """Apply ``function`` to a ``pa.RecordBatch`` (or ``pandas.DataFrame``) at a time, row for row.

        With ``tagged`` the batch has a column ``_ft_row`` that the result must keep, and ``_ft_attempt`` and
        ``_ft_first_failed_at``, which say how often and since when the row's record was tried; it may then have
        more or fewer rows. Where the function raises, it is called again with halves of the batch, until
        the records that it cannot take stand alone: those fail.

        ``schema`` may be left out for a function that has a method ``result_schema(schema)``, as
        `ftlayer.sources.FromJson` has.
        """
        checks.check_choice(kind, "map_batches: kind", ("arrow", "pandas"))
        checks.check_bool(tagged, "map_batches: tagged")
        uid = self._uid("map_batches", function, name)
        if schema is None:
            own = result_schema(function, to_arrow_schema(self.schema))
            if own is None:
                raise ConfigError(
                    "map_batches: give schema=…, a StructType or text like 'id bigint, name string'"
                )
            schema = from_arrow_schema(own)
        struct, rules = struct_of(schema, uid), self._rules(options, uid)
        step = MapBatches(uid, function, to_arrow_schema(struct), kind, tagged, rules=rules)
        return self._limited(uid, options)._then(step, struct)

    def map_async(
        self,
        function: Callable[[Record], Awaitable[Record]],
        schema: StructType | str,
        *,
        in_flight: int = 200,
        timeout: checks.Duration = "5s",
        ordered: bool = True,
        name: str = "",
        **options: Unpack[StepOptions],
    ) -> TrackedStream:
        """Like `map`, by an async function: for HTTP and database look-ups.

        Up to ``in_flight`` calls of a task are under way at a time, each for ``timeout`` at most. A task goes on when
        all calls for an Arrow batch have ended. ``ordered`` False: rows may come in another order than their records;
        they never do as yet, since nothing leaves a task before its batch is through.
        """
        checks.check_bool(ordered, "map_async: ordered")
        uid = self._uid("map_async", function, name)
        struct = struct_of(schema, uid)
        to, rules = to_arrow_schema(struct), self._rules(options, uid)
        limit_ms = checks.duration_ms(timeout, f"{uid}: timeout")
        rate = checks.rate_per_second(options.get("rate_limit"), f"{uid}: rate_limit")
        step = MapAsync(uid, function, to, in_flight, limit_ms, rules=rules, rate_limit=rate)
        return self._limited(uid, options)._then(step, struct)

    def _each(
        self,
        kind: type[Map | FlatMap | Filter],
        uid: str,
        function: Callable[[Record], Any],
        to: StructType,
        options: StepOptions,
    ) -> TrackedStream:
        rules = self._rules(options, uid)
        rate = checks.rate_per_second(options.get("rate_limit"), f"{uid}: rate_limit")
        step = kind(uid, function, to_arrow_schema(to), rules=rules, rate_limit=rate)
        return self._limited(uid, options)._then(step, to)

    # ------------------------------------------------------------ Spark's own operators

    def transform(
        self, function: Callable[[DataFrame], DataFrame], *, drops: bool = False, name: str = ""
    ) -> TrackedStream:
        """Apply Spark's own operators: DataFrame in, DataFrame out, keeping the column ``_ft``.

        The DataFrame holds one micro-batch. A record of which no row comes out is reported as failed,
        unless ``drops`` says that dropping is meant. An error inside it fails the batch: Spark does not
        say for which record. Refused: operators that keep state over batches (watermarks, …). With
        `FTStatus.OFF` there is no ``_ft``; a function that names it gets a null, which is taken off again.
        """
        checks.check_bool(drops, "transform: drops")
        step = Transform(self._uid("transform", function, name), function, drops)
        if not self._plan.layer.enabled:
            empty = self._spark.createDataFrame([], self.schema)
            return self._then(step, stream_plan.transform_plain(empty, step).schema)
        return self._then(step, stream_plan.transformed_schema(self._spark, self.schema, step))

    @overload
    def repartition(self, partitions: int, *columns: str) -> TrackedStream: ...

    @overload
    def repartition(self, partitions: None, column: str, /, *columns: str) -> TrackedStream: ...

    def repartition(self, partitions: int | None = None, *columns: str) -> TrackedStream:
        """Spark's repartition, by number, columns, or both."""
        if partitions is None and not columns:
            raise ConfigError("repartition: give a number of partitions, columns, or both")
        return self._repartition(partitions, columns, "repartition")

    def key_by(self, *columns: str, partitions: int | None = None) -> TrackedStream:
        """Bring rows with equal keys into one partition (Spark's hash partitioning)."""
        if not columns:
            raise ConfigError(f"key_by: name at least one column; there are {', '.join(self.schema.names)}")
        return self._repartition(partitions, columns, "key_by")

    def _repartition(self, partitions: int | None, columns: tuple[str, ...], what: str) -> TrackedStream:
        if partitions is not None:
            checks.check_int(partitions, f"{what}: partitions", least=1)
        found = stream_plan.check_columns(self._spark, self.schema, columns, what)
        return self._then(
            Repartition(partitions, found, stream_plan.is_hashable(self.schema, found)), self.schema
        )

    # ------------------------------------------------------------ ends

    def sink(
        self,
        function: Callable[[DataFrame, int], Any],
        *,
        checkpoint: str,
        name: str = "",
        tagged: bool = False,
    ) -> TrackedWriter:
        """End in ``function(rows, batch_id)``, called once a batch, and again with the same id after a crash.

        The rows are the user's columns. To hold each record exactly once over crashes, overwrite by
        ``batch_id`` or skip ids that are known.

        With ``tagged`` they have a column ``_ft_row`` (bigint), the same for all rows of a record. The function may
        raise `ftlayer.RowsRejected` with errors by it: those records fail, with all their rows, and it is called
        again with the rest and the same id. What it had written before it raised it has to undo or overwrite.
        """
        from ftlayer.spark.plan.stream_plan import function_ending
        from ftlayer.spark.query.writer import TrackedWriter

        self._unstarted.settle()
        checks.check_bool(tagged, "sink: tagged")
        name = name or self._plan.source.name
        end = partial(function_ending, self._plan, name, function, tagged)
        return TrackedWriter(self._plan, checkpoint, name, end)

    def write_stream(
        self, source: str | type, *, checkpoint: str, name: str = "", bisect: bool = False, **options: str
    ) -> TrackedWriter:
        """End in the stream writer of a Python Data Source: its class, or the name it is registered under.

        With ``bisect``, where its ``write`` raises, halves of the partition's rows are tried, down to single rows, and
        the records of those rows fail. What was written meanwhile is aborted, and the rest is written anew. Each
        partition is held in memory.
        """
        from ftlayer.spark.plan.stream_plan import writer_ending
        from ftlayer.spark.query.writer import TrackedWriter

        self._unstarted.settle()
        checks.check_bool(bisect, "write_stream: bisect")
        name = name or self._plan.source.name
        end = partial(writer_ending, self._plan, name, source, options, bisect)
        return TrackedWriter(self._plan, checkpoint, name, end)

    def emit(
        self,
        function: Callable[[DataFrame, int], Any],
        *,
        checkpoint: str,
        carrier: str = "ft",
        name: str = "",
    ) -> TrackedWriter:
        """Hand the rows to another query, which goes on tracking them (`FTLayer.resume`).

        ``function(rows, batch_id)`` writes them wherever the other query reads; the column ``carrier``
        (binary) holds the ids and has to travel along (a Kafka header, a column, …). The source records
        stay pending until the other query is done with them, and are replayed from here if it fails or
        does not answer within ``timeout``.
        """
        from ftlayer.spark.plan.stream_plan import emit_ending
        from ftlayer.spark.query.writer import TrackedWriter

        self._unstarted.settle()
        checks.check_text(carrier, "emit: carrier", "the name of a column")
        if carrier in self.schema.names:
            raise ConfigError(
                f"emit: the rows have a column {carrier!r} already; name another with carrier=…"
            )
        name = name or self._plan.source.name
        return TrackedWriter(self._plan, checkpoint, name, partial(emit_ending, name, function, carrier))

    def dead_letters(self, checkpoint: str = "") -> DataFrame:
        """Return the dead letters of this source as a streaming DataFrame (`FTLayer.dead_letter_stream`).

        ``checkpoint`` is that of the query whose records they were; an ingest needs none, its name says it. Raises
        `ConfigError` without it, `CheckpointMismatchError` for one of another source.
        """
        from ftlayer.spark.query.checkpoint import CheckpointDirectory

        self._unstarted.settle()
        if self._plan.source.ingest:
            query = ""
        elif checkpoint == "":
            raise ConfigError("dead_letters: checkpoint: give that of the query whose dead letters are meant")
        else:
            checks.check_text(
                checkpoint, "dead_letters: checkpoint", "the path or URL of a query's checkpoint"
            )
            query = CheckpointDirectory(self._spark, checkpoint).claim(self._plan.source.name).query
        return self._plan.layer._letters_of(
            self._spark, [stream_plan.stream_of_source(self._plan.source, query)]
        )

    # ------------------------------------------------------------ recording

    @property
    def _spark(self) -> SparkSession:
        return self._plan.spark

    def _then(self, step: Step, schema: StructType) -> TrackedStream:
        self._unstarted.settle()
        return TrackedStream(self._plan.then(step, schema))

    def _limited(self, uid: str, options: FailureOptions) -> TrackedStream:
        max_failing = options.get("max_failing")
        if max_failing is None:
            return self
        self._unstarted.settle()
        return TrackedStream(self._plan.limited(uid, Limit.of(max_failing, repr(uid))))

    def _rules(self, options: FailureOptions, uid: str) -> RetryRules:
        extra_keys = options.get("extra_keys")
        rules = rules_of(options.get("retry_on"), options.get("dead_on"), repr(uid), extra_keys=extra_keys)
        return rules.within(self._plan.source.rules)

    def _uid(self, kind: str, function: Callable[..., Any], name: str) -> str:
        if not callable(function):
            raise InvalidTopologyError(f"{kind}: expected a function, got {type(function).__name__}")
        checks.check_function(
            function, kind, takes=1, may_yield=kind == "flat_map", is_async=kind == "map_async"
        )
        if name != "":
            checks.check_text(name, f"{kind}: name")
        uid = name or getattr(function, "__name__", kind)
        if not name and any(getattr(step, "uid", None) == uid for step in self._plan.steps):
            uid = f"{uid}-{len(self._plan.steps)}"
        check_unique(self._plan.steps, uid)
        return uid


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def struct_of(schema: StructType | str, uid: str) -> StructType:
    """Return a schema given as DDL or StructType; `ConfigError` names the operator where it is neither.

    Spark reads DDL, in its session: `ConfigError` for DDL where there is none.
    """
    from pyspark.errors import ParseException, PySparkRuntimeError
    from pyspark.sql.types import StructType

    if schema in ("", StructType()):
        raise ConfigError(f"schema of {uid!r}: there is no column in it; write 'name type, …' with its types")
    if isinstance(schema, StructType):
        stream_plan.check_names(schema, f"schema of {uid!r}")
        return schema
    if not isinstance(schema, str):
        raise ConfigError(
            f"schema of {uid!r}: expected 'name type, …' or a StructType, got {type(schema).__name__}"
        )
    try:
        parsed = StructType.fromDDL(schema)
    except (ParseException, ValueError) as error:
        raise ConfigError(
            f"schema of {uid!r}: {schema!r} is not a schema ({_reason(error)}); write 'name type, …' with its types"
        ) from error
    except PySparkRuntimeError as error:
        if error.getCondition() not in _NO_SESSION:
            raise
        raise ConfigError(
            f"schema of {uid!r}: a schema as text is read by a Spark session, and there is none: give a "
            "pyspark.sql.types.StructType, or start the session first"
        ) from error
    if not isinstance(parsed, StructType):
        raise ConfigError(f"schema of {uid!r}: {schema!r} names no columns; write 'name type, …'")
    stream_plan.check_names(parsed, f"schema of {uid!r}")
    return parsed


def plan_of(stream: TrackedStream) -> stream_plan.StreamPlan:
    return stream._plan
