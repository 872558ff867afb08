"""Streams with keys, and two streams in front of one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ftlayer.checks import (
    LONGEST_MS,
    check_function,
    check_methods,
    duration_ms,
    known_options,
    rate_per_second,
)
from ftlayer.errors import ConfigError, InvalidTopologyError
from ftlayer.functions.retry_rules import NO_RULES, Errors, RetryRules, rules_of
from ftlayer.functions.steps import Process, Reduce
from ftlayer.functions.windows.assigners import WindowKind
from ftlayer.topology.connectors import Schema
from ftlayer.topology.operators import CoProcess, Join
from ftlayer.topology.streams import DataStream, Leg, Sides

if TYPE_CHECKING:
    from ftlayer.topology.builder import GraphBuilder
    from ftlayer.topology.windows import WindowedStream


class KeyedStream(DataStream):
    """A stream whose equal keys meet in one subtask. An operator without keys behind it gets them the same way.

    Attributes:
        keys: the key's columns.
    """

    def __init__(
        self, builder: GraphBuilder, legs: tuple[Leg, ...], schema: pa.Schema, keys: tuple[str, ...]
    ) -> None:
        """For `DataStream.key_by`."""
        super().__init__(builder, legs, schema)
        self.keys = keys

    @known_options
    def reduce(
        self,
        function: Callable[[Any, Any], Any],
        *,
        volatile_state: bool = False,
        uid: str | None = None,
        parallelism: int | None = None,
        retry_on: Errors | None = None,
        dead_on: Errors | None = None,
        max_failing: str | int | None = None,
    ) -> DataStream:
        """Emit for each record the aggregate of its key: the first record, then ``function(aggregate, record)``.

        ``volatile_state`` says that the aggregates may be lost with their slot, which has to be said with fault
        tolerance on.
        """
        check_function(function, "reduce", takes=2)
        rules = rules_of(retry_on, dead_on, "reduce", max_failing)
        return self._then(
            lambda uid: Reduce(uid, function, self.keys, self.schema, volatile_state, rules=rules),
            uid,
            parallelism,
        )

    @known_options
    def aggregate(
        self,
        create: Callable[[], Any],
        add: Callable[[Any, Any], Any],
        schema: Schema,
        *,
        volatile_state: bool = False,
        uid: str | None = None,
        parallelism: int | None = None,
        retry_on: Errors | None = None,
        dead_on: Errors | None = None,
        max_failing: str | int | None = None,
    ) -> DataStream:
        """Emit for each record the aggregate of its key: ``add(create(), record)``, then ``add(aggregate, record)``.

        The aggregate is a record of ``schema`` (what ``create`` returns need not be). ``volatile_state`` as in
        `reduce`.
        """
        check_function(create, "aggregate: create", takes=0)
        check_function(add, "aggregate: add", takes=2)
        to = self._builder.schema(schema, "aggregate")
        rules = rules_of(retry_on, dead_on, "aggregate", max_failing)
        return self._then(
            lambda uid: Reduce(uid, add, self.keys, to, volatile_state, create, rules), uid, parallelism
        )

    @known_options
    def process(
        self,
        function: Any,
        schema: Schema | None = None,
        *,
        side: Sides | None = None,
        volatile_state: bool = False,
        uid: str | None = None,
        parallelism: int | None = None,
        retry_on: Errors | None = None,
        dead_on: Errors | None = None,
        max_failing: str | int | None = None,
        rate_limit: float | None = None,
    ) -> DataStream:
        """Run a `ProcessFunction` with state and timers of each key, and side outputs (`side_output`).

        ``volatile_state`` as in `reduce`, ``rate_limit`` as in `map`; timers are not limited.
        """
        rules = rules_of(retry_on, dead_on, "process", max_failing)
        rate = rate_per_second(rate_limit, "process: rate_limit")
        return add_process(
            self, self.keys, function, schema, side, volatile_state, uid, parallelism, rules, rate
        )

    def window(self, windows: WindowKind) -> WindowedStream:
        """Cut the stream into windows of event time: `tumbling`, `sliding` or `session` say which.

        The stream needs watermarks.
        """
        from ftlayer.topology.windows import WindowedStream

        if not isinstance(windows, WindowKind):
            raise ConfigError(
                f"window: expected tumbling(…), sliding(…) or session(…), got a {type(windows).__name__}"
            )
        return WindowedStream(self, windows)

    @known_options
    def join(
        self,
        other: KeyedStream,
        *,
        lower: str | int,
        upper: str | int,
        function: Callable[[Any, Any], Any],
        schema: Schema,
        volatile_state: bool = False,
        uid: str | None = None,
        parallelism: int | None = None,
        retry_on: Errors | None = None,
        dead_on: Errors | None = None,
        max_failing: str | int | None = None,
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
        check_function(function, "join: function", takes=2)
        bounds = (
            duration_ms(lower, "join: lower", least=-LONGEST_MS),
            duration_ms(upper, "join: upper", least=-LONGEST_MS),
        )
        if bounds[0] > bounds[1]:
            raise ConfigError(f"join: no time lies between lower {lower!r} and upper {upper!r}")
        to = self._builder.schema(schema, "join")
        rules = rules_of(retry_on, dead_on, "join", max_failing)
        keys, inputs = (self.keys, other.keys), (self.schema, other.schema)
        node = self._builder.add(
            lambda uid: Join(uid, function, keys, inputs, *bounds, to, volatile_state, rules),
            [self._legs, other._legs],
            uid=uid,
            parallelism=parallelism,
        )
        return DataStream(self._builder, (Leg(node),), to)


class ConnectedStreams:
    """Two streams in front of one operator. They share keys where both have some; otherwise there are none."""

    def __init__(self, left: DataStream, right: DataStream) -> None:
        """For `DataStream.connect`."""
        self._left = left
        self._right = right

    @known_options
    def process(
        self,
        function: Any,
        schema: Schema,
        *,
        side: Sides | None = None,
        volatile_state: bool = False,
        uid: str | None = None,
        parallelism: int | None = None,
        retry_on: Errors | None = None,
        dead_on: Errors | None = None,
        max_failing: str | int | None = None,
    ) -> DataStream:
        """Run a `CoProcessFunction`, with state and timers of each key where both streams have keys.

        ``volatile_state`` as in `KeyedStream.reduce`.
        """
        from ftlayer.functions.process import CoProcessFunction

        left, right = self._left, self._right
        _check_instance(function, CoProcessFunction, "connect(…).process")
        _check_methods(function, "connect(…).process")
        builder = left._builder
        to = builder.schema(schema, "process")
        sides = _sides(builder, side)
        keys: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        if isinstance(left, KeyedStream) and isinstance(right, KeyedStream):
            keys = (left.keys, right.keys)
        inputs = (left.schema, right.schema)
        rules = rules_of(retry_on, dead_on, "process", max_failing)
        node = builder.add(
            lambda uid: CoProcess(uid, function, keys, inputs, to, sides, volatile_state, rules),
            [left._legs, right._legs],
            uid=uid,
            parallelism=parallelism,
        )
        return DataStream(builder, (Leg(node),), to)


def add_process(
    stream: DataStream,
    keys: tuple[str, ...],
    function: Any,
    schema: Schema | None,
    side: Sides | None,
    volatile_state: bool,
    uid: str | None,
    parallelism: int | None,
    rules: RetryRules = NO_RULES,
    rate_limit: float | None = None,
) -> DataStream:
    """Put a `ProcessFunction` behind a stream."""
    from ftlayer.functions.process import ProcessFunction

    _check_instance(function, ProcessFunction, "process")
    _check_methods(function, "process")
    builder = stream._builder
    to = stream.schema if schema is None else builder.schema(schema, "process")
    sides = _sides(builder, side)
    node = builder.add(
        lambda uid: Process(uid, function, keys, to, sides, volatile_state, rules, rate_limit),
        [stream._legs],
        uid=uid,
        parallelism=parallelism,
    )
    return DataStream(builder, (Leg(node),), to)


def _sides(builder: GraphBuilder, side: Sides | None) -> tuple[tuple[str, pa.Schema], ...]:
    return tuple(
        (tag, builder.schema(schema, f"side output {tag!r}")) for tag, schema in (side or {}).items()
    )


def _check_methods(function: object, what: str) -> None:
    emitting = ("process", "process_left", "process_right", "on_timer")
    check_methods(function, ("open", *emitting, "close"), what, may_yield=emitting)


def _check_instance(function: object, wanted: type, what: str) -> None:
    if isinstance(function, wanted):
        return
    if isinstance(function, type) and issubclass(function, wanted):
        raise ConfigError(f"{what}: expected an instance, got the class; write {function.__name__}(…)")
    raise ConfigError(
        f"{what}: expected a {wanted.__name__} (ftlayer.functions.process), got a {type(function).__name__}"
    )
