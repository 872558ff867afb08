"""The streams that a user puts operators behind. Each method returns a new stream and leaves the old one as it was.

A function of one record gets the bare value of a stream of one column and a tuple, in the columns' order, of one of
several, and returns the same as its ``schema`` says. Where ``schema`` may be left out, it is the input's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack

import pyarrow as pa

from ftlayer.checkpoint.dead_letters.letter import LETTER_SCHEMA
from ftlayer.checkpoint.options import OnFailure
from ftlayer.common import checks
from ftlayer.errors import ConfigError, InvalidTopologyError
from ftlayer.functions.retry_rules import FailureOptions, RetryRules, rules_of
from ftlayer.functions.steps import Filter, FlatMap, Map, MapAsync, MapBatches, Process, result_schema
from ftlayer.records import partitioning
from ftlayer.records.traced import KeySelector
from ftlayer.topology.checks import check_key, check_process, key_types, schema_difference
from ftlayer.topology.connectors import Options, Schema, open_sink
from ftlayer.topology.draft import GraphDraft, Leg, Sides
from ftlayer.topology.job_graph import LETTERS, side_outputs_of
from ftlayer.topology.operators import AssignWatermarks, IterationHead, Operator, Sink

if TYPE_CHECKING:
    from ftlayer.topology.streams.keyed_stream import ConnectedStreams, IterativeStream, KeyedStream


class OperatorOptions(TypedDict, total=False):
    uid: str | None
    """Its stable name."""
    parallelism: int | None
    """Its number of subtasks; by default the environment's."""
    on_failure: OnFailure | None
    """What becomes of records that fail in it, in barrier mode; see `DataStream.on_failure`."""


class FunctionOptions(OperatorOptions, FailureOptions, total=False):
    """Of an operator that calls a function of the user's. In barrier mode those about failures need a policy."""


class RatedOptions(FunctionOptions, total=False):
    """Of an operator whose calls can be paced."""

    rate_limit: float | None
    """Records a second of each subtask, replays among them; None: no limit."""


def rules_in(options: FunctionOptions, method: str) -> RetryRules:
    """Return the rules of failures that ``options`` have; `ConfigError` names the ``method``."""
    if method in ("filter", "sink") and options.get("extra_keys") is not None:
        raise ConfigError(f"{method}: extra_keys: it is of operators that return records")
    retry_on, dead_on = options.get("retry_on"), options.get("dead_on")
    return rules_of(retry_on, dead_on, method, options.get("max_failing"), options.get("extra_keys"))


_SHOW = ".sink(lambda batch: print(batch.to_pylist())), then .execute() of the StreamEnvironment"
WORDS = {
    "start execute executeasync awaittermination run": "end the stream with .sink(…), then call .execute() of the "
    "StreamEnvironment",
    "addsink sinkto writestream write foreach foreachbatch totable": "it ends in .sink(sink)",
    "print show collect executeandcollect topandas": f"a stream has records when it runs: {_SHOW}",
    "intervaljoin": "key both streams first: .key_by(column, …).join(other, lower=…, upper=…, function=…, schema=…)",
    "fold": "key the stream first: .key_by(column, …).aggregate(create, add, schema)",
    "groupby groupbykey partitionby": "its name here is .key_by(column, …)",
    "reduce aggregate join window": "key the stream first: .key_by(column, …).{name}(…)",
    "sum min max count mean avg": "key the stream first: .key_by(column, …).aggregate(ftlayer.sum(column)); there "
    "are count, sum, min, max and mean",
    "windowall timewindow timewindowall countwindow countwindowall": "key the stream first: "
    ".key_by(column, …).window(tumbling(size)), and assign_watermarks before; sliding and session are the others",
    "assigntimestampsandwatermarks withwatermark": ".assign_watermarks(column, max_out_of_orderness)",
    "name": ".uid(name) gives its operator a stable name",
    "getsideoutput": "its name here is .side_output(tag)",
    "comap coflatmap cogroup": ".connect(other).process(CoProcessFunction)",
    "select selectexpr withcolumn withcolumns where drop project": ".map(function, schema) makes other columns, "
    ".map_batches(function, schema) of a whole Arrow batch; .filter(function) keeps rows",
    "mapinpandas mapinarrow mappartitions": ".map_batches(function, schema, kind='arrow' or 'pandas')",
    "sideoutputlatedata": "it belongs to windows: .key_by(…).window(…).allowed_lateness(…).late_to(tag)",
    "columns dtypes printschema": "it is in .schema",
}
"""What Flink's and Spark's users look for, and what there is."""


class DataStream(checks.UserFacing, words=WORDS):
    """Records of one schema, from one operator or (`union`) several.

    Attributes:
        schema: of its records.
    """

    def __init__(self, graph: GraphDraft, legs: tuple[Leg, ...], schema: pa.Schema) -> None:
        """For `GraphBuilder` and the streams; ``legs`` are the outputs of ``graph`` that it consists of."""
        self._graph = graph
        self._legs = legs
        self.schema = schema
        self._unstarted: checks.Unstarted | None = None

    def __repr__(self) -> str:
        columns = ", ".join(f"{field.name} {field.type}" for field in self.schema)
        return f"{type(self).__name__}({self._described()}: {columns})"

    # ------------------------------------------------------------ functions

    def map(
        self, function: Callable[[Any], Any], schema: Schema | None = None, **options: Unpack[RatedOptions]
    ) -> DataStream:
        """One record in, one out.

        ``retry_on`` and ``dead_on``, here and below, say which errors of this operator are worth another attempt, as
        those of `FTLayer.embedded` do for all operators, and ``max_failing`` how many records may fail in it before the
        sources that feed it pause. In barrier mode they go with a `FailurePolicy`,
        and it is the operator's chain that pauses.

        ``rate_limit``, here and below, is how many records a second each subtask takes, replays among them; None: as
        many as come. Those of an earlier second that were not used are lost, save for a tenth of a second's.
        """
        checks.check_function(function, "map", takes=1)
        return self._step(Map, "map", function, self._output(schema, "map"), options)

    def flat_map(
        self, function: Callable[[Any], Any], schema: Schema | None = None, **options: Unpack[RatedOptions]
    ) -> DataStream:
        """One record in, an iterable of any number of records out."""
        checks.check_function(function, "flat_map", takes=1, may_yield=True)
        return self._step(FlatMap, "flat_map", function, self._output(schema, "flat_map"), options)

    def filter(self, function: Callable[[Any], Any], **options: Unpack[RatedOptions]) -> DataStream:
        """Keep the records for which the function is true."""
        checks.check_function(function, "filter", takes=1)
        return self._step(Filter, "filter", function, self.schema, options)

    def map_batches(
        self,
        function: Callable[[Any], Any],
        schema: Schema | None = None,
        *,
        kind: Literal["arrow", "pandas"] = "arrow",
        tagged: bool = False,
        **options: Unpack[FunctionOptions],
    ) -> DataStream:
        """A batch in, a batch out (``pa.RecordBatch`` or ``pandas.DataFrame``), row for row.

        ``tagged``: the batch has the column ``_ft_row`` beside the user's; a result keeps it, and may have fewer or
        more rows. It has ``_ft_attempt`` and ``_ft_first_failed_at`` too (see `ftlayer.current_record`).

        A function that has a method ``result_schema(schema)``, as `ftlayer.sources.FromJson` has, says by it what its
        schema is, where none is given.
        """
        checks.check_function(function, "map_batches", takes=1)
        checks.check_choice(kind, "map_batches: kind", ("arrow", "pandas"))
        own = result_schema(function, self.schema) if schema is None else None
        to = self._output(schema, "map_batches") if own is None else own
        return self._step(MapBatches, "map_batches", function, to, options, kind, tagged)

    def map_async(
        self,
        function: Callable[[Any], Awaitable[Any]],
        schema: Schema | None = None,
        *,
        in_flight: int = 200,
        timeout: checks.Duration = "5s",
        ordered: bool = True,
        **options: Unpack[RatedOptions],
    ) -> DataStream:
        """One record in, one out, by an async function: for HTTP and database look-ups.

        Up to ``in_flight`` calls of a subtask are under way at a time, each for ``timeout`` at most. A batch goes on
        when all its calls have ended; the slot waits for them. ``ordered`` False: records may leave a batch in another
        order than they came in; they never do as yet.
        """
        checks.check_bool(ordered, "map_async: ordered")
        to = self._output(schema, "map_async")
        limit_ms = checks.duration_ms(timeout, "map_async: timeout")
        return self._step(MapAsync, "map_async", function, to, options, in_flight, limit_ms)

    def process(
        self,
        function: Any,
        schema: Schema | None = None,
        *,
        side: Sides | None = None,
        **options: Unpack[RatedOptions],
    ) -> DataStream:
        """Run a `ProcessFunction` without keys: with side outputs (`side_output`), without state and timers."""
        return self._process((), function, schema, side, False, options)

    def assign_watermarks(
        self,
        column: str,
        max_out_of_orderness: checks.Duration = "1s",
        idle: checks.Duration | None = None,
        **options: Unpack[OperatorOptions],
    ) -> DataStream:
        """Take each record's time from a column: a timestamp, or int64 milliseconds since 1970.

        Args:
            column: its name.
            max_out_of_orderness: how much older than the newest a record may be and still be in time.
            idle: a subtask without records for this long does not hold the others' time back; None: it does.
        """
        checks.check_text(column, "assign_watermarks: column", "the name of a column")
        disorder = checks.duration_ms(
            max_out_of_orderness, "assign_watermarks: max_out_of_orderness", least=0
        )
        patience = None if idle is None else checks.duration_ms(idle, "assign_watermarks: idle")
        return self._then(lambda uid: AssignWatermarks(uid, column, disorder, patience, self.schema), options)

    # ------------------------------------------------------------ several streams

    def union(self, *others: DataStream) -> DataStream:
        """Return the records of all these streams, which have the same schema. Each keeps its partitioner."""
        for other in others:
            self._check_same_graph(other, "union")
            difference = schema_difference(self.schema, other.schema)
            if difference:
                raise InvalidTopologyError(
                    f"union of {self._described()} with {other._described()}: {difference}; map one to the other's"
                )
        legs = self._taken() + tuple(leg for other in others for leg in other._taken())
        return DataStream(self._graph, legs, self.schema)._waiting()

    def connect(self, other: DataStream) -> ConnectedStreams:
        """Put two streams, which may have different schemas, in front of one operator."""
        from ftlayer.topology.streams.keyed_stream import ConnectedStreams

        self._check_same_graph(other, "connect")
        self._taken()
        other._taken()
        return ConnectedStreams(self, other)

    def side_output(self, tag: str) -> DataStream:
        """Return what the operator that made this stream puts out under ``tag``."""
        leg = self._own_leg("side_output")
        operator = self._graph.operator(leg.node)
        sides = dict(side_outputs_of(operator))
        if tag not in sides:
            names = ", ".join(map(repr, sides)) or "none (process(…, side={tag: schema}))"
            raise InvalidTopologyError(f"{operator.uid!r} has no side output {tag!r}; it has {names}")
        return DataStream(self._graph, (replace(leg, tag=tag),), sides[tag])._waiting()

    def iterate(
        self, max_wait: checks.Duration = "5s", **options: Unpack[OperatorOptions]
    ) -> IterativeStream:
        """Begin an iteration: `IterativeStream.close_with` says what, once, comes back to here.

        Not with fault tolerance on. The operators behind it get this stream's records, and those that come back.

        Args:
            max_wait: the iteration of a bounded job ends when this stream has, and nothing has come back for so long;
                a record that takes longer for a round, while its slot has nothing to do for it, comes too late.
            options: ``uid``, a stable name, and ``parallelism``, the subtasks that it begins in.
        """
        from ftlayer.topology.streams.keyed_stream import IterativeStream

        max_wait_ms = checks.duration_ms(max_wait, "iterate: max_wait")
        leg = self._add(lambda uid: IterationHead(uid, max_wait_ms, self.schema), options)
        return IterativeStream(self._graph, (leg,), self.schema)

    # ------------------------------------------------------------ partitioners

    def key_by(self, *columns: str) -> KeyedStream:
        """Send equal keys to the same subtask, and let what follows keep state for each.

        ``a.b`` is field ``b`` of the struct ``a``. Raises `ConfigError` for a column that is not there and
        `UnhashableKeyError` for a type that is no key.
        """
        from ftlayer.topology.streams.keyed_stream import KeyedStream

        what = f"key_by behind {self._described()}"
        if not columns:
            raise ConfigError(f"{what}: name at least one column; there are {', '.join(self.schema.names)}")
        for column in columns:
            if not isinstance(column, str):
                raise ConfigError(
                    f"{what}: expected names of columns, got {checks.named_type(column)}; for a computed key, "
                    "make a column of it in a map before"
                )
        selector = check_key(columns, self.schema, what)
        keyed = KeyedStream(
            self._graph, self._legs_by(partitioning.HashByKey(selector)), self.schema, columns
        )
        return keyed._waiting()

    def forward(self) -> DataStream:
        """Send to the subtask of the same number: the next operator needs the same parallelism."""
        return self._by(partitioning.Forward())

    def rebalance(self) -> DataStream:
        """Send to the subtasks in turn."""
        return self._by(partitioning.Rebalance())

    def shuffle(self, seed: int = 0) -> DataStream:
        """Send each record to a random subtask, drawn from its id and ``seed`` (0 to 2**64-1)."""
        checks.check_int(seed, "shuffle: seed", least=0, most=(1 << 64) - 1)
        return self._by(partitioning.Shuffle(seed))

    def broadcast(self) -> DataStream:
        """Send a copy of each record to every subtask."""
        return self._by(partitioning.Broadcast())

    def global_(self) -> DataStream:
        """Send every record to the first subtask."""
        return self._by(partitioning.Global())

    def partition_custom(self, function: Callable[[Any, int], int], *columns: str) -> DataStream:
        """Send where ``function(key, channels)`` says: a channel in 0..channels-1. It has to be pure.

        The key is the value of ``columns``, a tuple of several. Raises `ConfigError` for one that is not there.
        """
        what = f"partition_custom behind {self._described()}"
        checks.check_function(function, what, takes=2)
        if not columns:
            raise ConfigError(f"{what}: name at least one column; there are {', '.join(self.schema.names)}")
        try:
            selector = KeySelector(columns)
            key_types(self.schema, columns)
        except ConfigError as error:
            raise ConfigError(f"{what}: {error}") from error
        return self._by(partitioning.Custom(selector, function))

    # ------------------------------------------------------------ the operator that made this stream

    def uid(self, uid: str) -> Self:
        """Give the operator right before a stable name, unique in the graph."""
        self._graph.rename(self._own_leg("uid").node, uid)
        return self

    def set_parallelism(self, parallelism: int) -> Self:
        """Set the number of subtasks of the operator right before."""
        self._graph.set_parallelism(self._own_leg("set_parallelism").node, parallelism)
        return self

    def on_failure(self, policy: OnFailure) -> Self:
        """Say what becomes of records that fail in the operator right before; a sink has it as an option.

        Barrier mode only. ``"fail"``: the first one fails the job, whatever `CheckpointConfig` says of the others.
        Operators of different policies are chains of their own. Raises `ConfigError`; `StreamEnvironment.execute`
        raises `UnsupportedError` without checkpoints, and `InvalidTopologyError` for a policy of an operator whose
        input is broadcast: its subtasks would no longer have the same state.
        """
        self._graph.set_on_failure(self._own_leg("on_failure").node, policy)
        return self

    def dead_letters(self, *, uid: str | None = None) -> DataStream:
        """Begin a stream of dead letters. Columns: `ftlayer.checkpoint.dead_letters.letter.LETTER_SCHEMA`.

        Acker mode: those of the sources that this stream derives from, whichever operator failed. An ordinary source:
        those letters come that are there at the topology's first start, then those to come, each at least once, unless
        it was requeued or purged before. How far it was read is kept with the topology's positions. It has no end, so
        the job ends by ``drain`` or ``stop_at_latest`` alone.

        Barrier mode: those of the operator right before, and of the ones that are chained before it. An output of that
        chain, in the same checkpoints as its others, so that a two-phase sink has each letter exactly once; the job
        keeps none of them otherwise, and they cannot be requeued. The operator needs a `FailurePolicy`, or
        `StreamEnvironment.execute` raises `InvalidTopologyError`. It has no ``uid``: `ConfigError`.
        """
        if self._graph.open_letters is None:
            leg = self._own_leg("dead_letters")
            if uid is not None:
                raise ConfigError(
                    f"dead_letters behind {self._described()}: uid: in barrier mode they are an output of that "
                    "operator, and no source of their own; leave uid out"
                )
            return DataStream(self._graph, (replace(leg, tag=LETTERS),), LETTER_SCHEMA)
        return DataStream(self._graph, (self._graph.add_letters(self._taken(), uid),), LETTER_SCHEMA)

    # ------------------------------------------------------------ the end

    def sink(
        self,
        sink: Any,
        *,
        options: Options | None = None,
        every: checks.Duration = "1s",
        max_rows: int = 10_000,
        **operator: Unpack[FunctionOptions],
    ) -> None:
        """End the stream.

        Args:
            sink: a function of a ``pa.RecordBatch``; a `DataSourceStreamWriter` (plain or Arrow) of pyspark, or a
                `DataSource` class that has one.
            options: for a `DataSource` class.
            every: how old a writer's batch becomes before it is written and committed.
            max_rows: how long a writer's batch becomes before it is.

        Raises:
            ConfigError: what cannot be a sink.
        """
        every_ms = checks.duration_ms(every, "sink: every")
        checks.check_int(max_rows, "sink: max_rows", least=1)
        rules = rules_in(operator, "sink")
        connector = open_sink(sink, self.schema, options, every_ms, max_rows)
        self._add(lambda uid: Sink(uid, connector, self.schema, rules), operator)

    # ------------------------------------------------------------ inside

    def _process(
        self,
        keys: tuple[str, ...],
        function: Any,
        schema: Schema | None,
        side: Sides | None,
        volatile_state: bool,
        options: RatedOptions,
        *,
        in_place: bool = True,
    ) -> DataStream:
        from ftlayer.functions.process import ProcessFunction

        check_process(function, ProcessFunction, "process")
        to = self._output(schema, "process")
        sides = self._graph.side_schemas(side)
        kept: dict[str, Any] = {"volatile_state": volatile_state, "in_place": in_place}
        return self._step(Process, "process", function, to, options, keys, sides, **kept)

    def _step(
        self,
        kind: Callable[..., Operator],
        method: str,
        function: Any,
        schema: pa.Schema,
        options: FunctionOptions,
        *own: Any,
        others: Sequence[DataStream] = (),
        **more: Any,
    ) -> DataStream:
        """Return the output of a step of ``kind``, which takes ``own`` and ``more`` besides."""
        rules = rules_in(options, method)
        rate = checks.rate_per_second(options.get("rate_limit"), f"{method}: rate_limit")

        def make(uid: str) -> Operator:
            return kind(uid, function, schema, *own, rules=rules, rate_limit=rate, **more)

        return self._then(make, options, others)

    def _then(
        self, make: Callable[[str], Operator], options: OperatorOptions, others: Sequence[DataStream] = ()
    ) -> DataStream:
        leg = self._add(make, options, others)
        return DataStream(self._graph, (leg,), self._graph.operator(leg.node).schema)

    def _add(
        self, make: Callable[[str], Operator], options: OperatorOptions, others: Sequence[DataStream] = ()
    ) -> Leg:
        inputs = [self._taken(), *(other._taken() for other in others)]
        uid, parallelism = options.get("uid"), options.get("parallelism")
        policy = options.get("on_failure")
        return self._graph.add(make, inputs, uid=uid, parallelism=parallelism, on_failure=policy)

    def _output(self, schema: Schema | None, what: str) -> pa.Schema:
        return self.schema if schema is None else self._graph.schema(schema, what)

    def _by(self, partitioner: partitioning.Partitioner) -> DataStream:
        return DataStream(self._graph, self._legs_by(partitioner), self.schema)._waiting()

    def _legs_by(self, partitioner: partitioning.Partitioner) -> tuple[Leg, ...]:
        return tuple(replace(leg, partitioner=partitioner) for leg in self._taken())

    def _waiting(self) -> Self:
        """Return this stream, which no operator knows of: it says so where none is put behind it."""
        self._unstarted = checks.Unstarted(
            "the stream that was made here was thrown away with nothing behind it. A method leaves its stream as it "
            "was: go on from what it returns"
        )
        return self

    def _taken(self) -> tuple[Leg, ...]:
        if self._unstarted is not None:
            self._unstarted.settle()
        return self._legs

    def _own_leg(self, method: str) -> Leg:
        """Return the one output this stream is, if nothing has come between it and its operator."""
        if len(self._legs) != 1 or self._legs[0] != Leg(self._legs[0].node):
            raise InvalidTopologyError(
                f"{method}(…) belongs to an operator and comes right behind it, and this is what comes of a union, a "
                f"side output or a partitioner behind {self._described()}"
            )
        return self._legs[0]

    def _check_same_graph(self, other: object, what: str) -> None:
        if not isinstance(other, DataStream):
            raise ConfigError(f"{what}: expected a stream, got {checks.named_type(other)}")
        if other._graph is not self._graph:
            raise InvalidTopologyError(
                f"{what}: {self._described()} belongs to topology {self._graph.name!r}, and {other._described()} to "
                f"another one, {other._graph.name!r}"
            )

    def _described(self) -> str:
        return ", ".join(repr(self._graph.operator(leg.node).uid) for leg in self._legs)
