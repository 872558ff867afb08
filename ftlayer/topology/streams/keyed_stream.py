"""Streams with keys, and two streams in front of one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack, overload

import pyarrow as pa

from ftlayer.common import checks
from ftlayer.errors import ConfigError, InvalidTopologyError
from ftlayer.functions.aggregate_calls import Aggregate, given_aggregates
from ftlayer.functions.aggregates import AggregatePlan, KeyedAggregate
from ftlayer.functions.steps import Reduce
from ftlayer.functions.windows import WindowKind
from ftlayer.topology.checks import check_process, schema_difference
from ftlayer.topology.connectors import Schema
from ftlayer.topology.draft import GraphDraft, Leg, Sides
from ftlayer.topology.operators import CoProcess, Join
from ftlayer.topology.streams.data_stream import WORDS, DataStream, FunctionOptions, RatedOptions, rules_in

if TYPE_CHECKING:
    from ftlayer.topology.streams.windowed_stream import WindowedStream


class IterativeStream(DataStream):
    """A stream that something behind it is fed back into: `close_with` says what, once.

    Records that come back are given to the operators behind this stream as those are that come for the first time.
    Their times, if they have any, are their own: watermarks come from the stream in front of the iteration alone, so
    that a record that comes back may be late. In one subtask a record that comes back may overtake a new one, and the
    other way round.
    """

    def close_with(self, feedback: DataStream) -> None:
        """Feed ``feedback`` back, which comes from an operator behind this stream and has its schema.

        No task waits to send on the way back, so nothing bounds what is on it but the loop: new records are let in
        while little waits there, and a loop that makes more records out of each than leave it grows without bound.

        Raises:
            InvalidTopologyError: fault tolerance is on; the iteration is closed already, or is fed from outside of
                it; the schemas differ. Names the operators.
        """
        self._check_same_graph(feedback, "close_with")
        head = self._legs[0].node
        difference = schema_difference(self.schema, feedback.schema)
        if difference:
            raise InvalidTopologyError(
                f"close_with: what comes back from {feedback._described()} to iteration {self._described()} has "
                f"another schema: {difference}; map it to the iteration's"
            )
        self._graph.close_iteration(head, feedback._taken())


_KEYED_WORDS = {
    "sum min max count mean avg": ".aggregate(ftlayer.sum(column)); ftlayer has count, sum, min, max and mean",
    "timewindow countwindow": ".window(tumbling(size)), .window(sliding(size, every=…)) or .window(session(gap))",
    "intervaljoin": ".join(other, lower=…, upper=…, function=…, schema=…)",
}
_CONNECTED = ".process(CoProcessFunction, schema) is what connected streams have"
_CONNECTED_WORDS = {
    "map flatmap comap coflatmap filter reduce apply sink keyby union where equalto window": _CONNECTED
}


class KeyedStream(DataStream, words=_KEYED_WORDS | WORDS):
    """A stream whose equal keys meet in one subtask. An operator without keys behind it gets them the same way.

    Attributes:
        keys: the key's columns.
    """

    def __init__(
        self, graph: GraphDraft, legs: tuple[Leg, ...], schema: pa.Schema, keys: tuple[str, ...]
    ) -> None:
        super().__init__(graph, legs, schema)
        self.keys = keys

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}; by {', '.join(self.keys)})"

    def reduce(
        self,
        function: Callable[[Any, Any], Any],
        *,
        volatile_state: bool = False,
        in_place: bool = True,
        **options: Unpack[FunctionOptions],
    ) -> DataStream:
        """Emit for each record the aggregate of its key: the first record, then ``function(aggregate, record)``.

        ``volatile_state`` says that the aggregates may be lost with their slot, which has to be said with fault
        tolerance on. ``in_place=False`` says that ``function`` changes no aggregate that it is given: with a
        `FailurePolicy` none is copied then, and what it does change, a failing record leaves changed.
        """
        checks.check_function(function, "reduce", takes=2)
        kept: dict[str, Any] = {"volatile_state": volatile_state, "in_place": in_place}
        return self._step(Reduce, "reduce", function, self.schema, options, self.keys, **kept)

    @overload
    def aggregate(
        self,
        create: Callable[[], Any],
        add: Callable[[Any, Any], Any],
        schema: Schema,
        *,
        volatile_state: bool = False,
        in_place: bool = True,
        **options: Unpack[FunctionOptions],
    ) -> DataStream: ...

    @overload
    def aggregate(
        self, *aggregates: Aggregate, volatile_state: bool = False, **options: Unpack[FunctionOptions]
    ) -> DataStream: ...

    def aggregate(
        self,
        create: Any = None,
        add: Any = None,
        schema: Any = None,
        *more: Any,
        volatile_state: bool = False,
        in_place: bool = True,
        **options: Unpack[FunctionOptions],
    ) -> DataStream:
        """Emit for each record the aggregate of its key: ``add(create(), record)``, then ``add(aggregate, record)``.

        The aggregate is a record of ``schema`` (what ``create`` returns need not be). ``volatile_state`` and
        ``in_place`` as in `reduce`.

        With built-in aggregates, ``aggregate(ftlayer.count(), ftlayer.sum("x"))``, it emits for each record its key's
        columns, and a column for each of them. They run over whole batches and make no Python object of a record.
        """
        built_in = given_aggregates(create, add, schema, *more)
        if built_in:
            if not in_place:
                raise ConfigError(
                    "aggregate: in_place=False is for functions; built-in aggregates copy nothing"
                )
            plan = AggregatePlan.of(built_in, self.keys, self.schema)
            own = rules_in(options, "aggregate")
            return self._then(
                lambda uid: KeyedAggregate(uid, plan, self.keys, plan.output, volatile_state, own), options
            )
        checks.check_function(create, "aggregate: create", takes=0)
        checks.check_function(add, "aggregate: add", takes=2)
        to = self._graph.schema(schema, "aggregate")
        kept: dict[str, Any] = {"volatile_state": volatile_state, "in_place": in_place}
        return self._step(Reduce, "aggregate", add, to, options, self.keys, create, **kept)

    def process(
        self,
        function: Any,
        schema: Schema | None = None,
        *,
        side: Sides | None = None,
        volatile_state: bool = False,
        in_place: bool = True,
        **options: Unpack[RatedOptions],
    ) -> DataStream:
        """Run a `ProcessFunction` with state and timers of each key, and side outputs (`side_output`).

        ``volatile_state`` and ``in_place`` (of all values that it reads from state) as in `reduce`, ``rate_limit`` as
        in `map`; timers are not limited.
        """
        return self._process(self.keys, function, schema, side, volatile_state, options, in_place=in_place)

    def window(self, windows: WindowKind) -> WindowedStream:
        """Cut the stream into windows of event time: `tumbling`, `sliding` or `session` say which.

        The stream needs watermarks.
        """
        from ftlayer.topology.streams.windowed_stream import WindowedStream

        if not isinstance(windows, WindowKind):
            raise ConfigError(
                f"window: expected tumbling(…), sliding(…) or session(…), got {checks.named_type(windows)}"
            )
        self._taken()
        said = "windows were made here and never used: call .reduce(…), .aggregate(…) or .process(…) on them"
        return WindowedStream(self, windows, _unstarted=checks.Unstarted(said))

    def join(
        self,
        other: KeyedStream,
        *,
        lower: checks.Duration,
        upper: checks.Duration,
        function: Callable[[Any, Any], Any],
        schema: Schema,
        volatile_state: bool = False,
        **options: Unpack[FunctionOptions],
    ) -> DataStream:
        """Pair records of equal keys where ``lower`` <= other's time - this one's time <= ``upper``.

        Both streams need watermarks. ``function(left, right)`` makes the record of a pair. The bounds are durations
        and may be negative (``"-5s"``). ``volatile_state`` as in `reduce`.
        """
        self._check_same_graph(other, "join")
        if not isinstance(other, KeyedStream):
            raise InvalidTopologyError(
                f"join: {other._described()} has no key; use key_by on both streams, with the same types"
            )
        checks.check_function(function, "join: function", takes=2)
        bounds = (
            checks.duration_ms(lower, "join: lower", least=-checks.LONGEST_MS),
            checks.duration_ms(upper, "join: upper", least=-checks.LONGEST_MS),
        )
        if bounds[0] > bounds[1]:
            raise ConfigError(f"join: no time lies between lower {lower!r} and upper {upper!r}")
        to = self._graph.schema(schema, "join")
        own = ((self.keys, other.keys), (self.schema, other.schema), *bounds)
        return self._step(
            Join, "join", function, to, options, *own, others=[other], volatile_state=volatile_state
        )


class ConnectedStreams(checks.UserFacing, words=_CONNECTED_WORDS):
    """Two streams in front of one operator. They share keys where both have some; otherwise there are none."""

    def __init__(self, left: DataStream, right: DataStream) -> None:
        self._left = left
        self._right = right
        self._unstarted = checks.Unstarted(f"streams were connected here and never used: {_CONNECTED}")

    def __repr__(self) -> str:
        return f"ConnectedStreams({self._left!r}, {self._right!r})"

    def process(
        self,
        function: Any,
        schema: Schema,
        *,
        side: Sides | None = None,
        volatile_state: bool = False,
        in_place: bool = True,
        **options: Unpack[FunctionOptions],
    ) -> DataStream:
        """Run a `CoProcessFunction`, with state and timers of each key where both streams have keys.

        ``volatile_state`` and ``in_place`` as in `KeyedStream.process`.
        """
        from ftlayer.functions.process import CoProcessFunction

        self._unstarted.settle()
        left, right = self._left, self._right
        check_process(function, CoProcessFunction, "connect(…).process")
        to = left._graph.schema(schema, "process")
        sides = left._graph.side_schemas(side)
        keys: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        if isinstance(left, KeyedStream) and isinstance(right, KeyedStream):
            keys = (left.keys, right.keys)
        own = (keys, (left.schema, right.schema), sides)
        kept: dict[str, Any] = {"volatile_state": volatile_state, "in_place": in_place}
        return left._step(CoProcess, "process", function, to, options, *own, others=[right], **kept)
