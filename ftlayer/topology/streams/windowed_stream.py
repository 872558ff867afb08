"""Windows of event time on keyed streams, as a user writes them down."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Unpack, overload

import pyarrow as pa

from ftlayer.common import checks
from ftlayer.errors import ConfigError
from ftlayer.functions.aggregate_calls import Aggregate, given_aggregates
from ftlayer.functions.aggregates import AggregatePlan
from ftlayer.functions.windows import (
    Aggregated,
    BuiltIn,
    Collected,
    Content,
    Fixed,
    Reduced,
    Session,
    Window,
    WindowKind,
    window_function,
)
from ftlayer.topology.connectors import Schema
from ftlayer.topology.job_graph import check_name
from ftlayer.topology.streams.data_stream import DataStream, FunctionOptions

if TYPE_CHECKING:
    from ftlayer.topology.streams.keyed_stream import KeyedStream


@checks.known_options
def tumbling(size: checks.Duration, *, offset: checks.Duration = 0) -> Fixed:
    """Windows of one size, each beginning where the one before ends.

    They begin at multiples of ``size`` since 1970 (UTC), and ``offset`` later; ``tumbling("24h", offset="-1h")`` are
    days in UTC+1.
    """
    size_ms = checks.duration_ms(size, "tumbling: size")
    return Fixed(size_ms, size_ms, checks.duration_ms(offset, "tumbling: offset", least=-checks.LONGEST_MS))


@checks.known_options
def sliding(size: checks.Duration, *, every: checks.Duration, offset: checks.Duration = 0) -> Fixed:
    """Windows of one size that overlap: one begins ``every`` so often. A record is in ``size / every`` of them.

    With ``every`` longer than ``size`` there are gaps between them; what falls into one is in no window.
    """
    size_ms, every_ms = checks.duration_ms(size, "sliding: size"), checks.duration_ms(every, "sliding: every")
    return Fixed(size_ms, every_ms, checks.duration_ms(offset, "sliding: offset", least=-checks.LONGEST_MS))


@checks.known_options
def session(gap: checks.Duration) -> Session:
    """Windows that begin with a key's record, and end when no other one of that key came for ``gap``."""
    return Session(checks.duration_ms(gap, "session: gap"))


_WORDS = {
    "apply": ".process(function, schema), whose function(key, window, records) gets all of a window",
    "sum min max count mean avg": ".aggregate(ftlayer.sum(column)); ftlayer has count, sum, min, max and mean",
    "map flatmap filter sink addsink sinkto print show collect keyby": "windows have no records before .reduce(…), "
    ".aggregate(…) or .process(…); call it on what those return",
    "sideoutputlatedata": "its name here is .late_to(tag)",
    "trigger evictor": "a window is emitted when the watermark reaches its end, and again for late records as "
    ".allowed_lateness(…) says; there is no other trigger",
}


@dataclass(frozen=True)
class WindowedStream(checks.UserFacing, words=_WORDS):
    """A keyed stream cut into windows: `KeyedStream.window`. Nothing runs until one of the three last methods.

    Each of them gives one record a key and window, when the watermark reaches the window's end (a result's event
    time is the last one of its window), and again for late records: see `allowed_lateness`. Windows without records
    give nothing.
    """

    _stream: KeyedStream
    _windows: WindowKind
    _lateness_ms: int = 0
    _late_tag: str | None = None
    _unstarted: checks.Unstarted | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        late = f"; {checks.in_words(self._lateness_ms)} late" if self._lateness_ms else ""
        tag = f"; too late to {self._late_tag!r}" if self._late_tag else ""
        by = ", ".join(self._stream.keys)
        return f"WindowedStream({self._stream._described()} by {by}; {self._windows}{late}{tag})"

    def allowed_lateness(self, lateness: checks.Duration) -> WindowedStream:
        """Keep windows for so long behind their end, in event time, and emit them again for what still comes.

        Once for all the late records of a batch. Without it nothing is added to a window that was emitted.
        """
        return replace(self, _lateness_ms=checks.duration_ms(lateness, "allowed_lateness", least=0))

    def late_to(self, tag: str) -> WindowedStream:
        """Send records whose windows are over to a side output (`DataStream.side_output`); else they are dropped."""
        check_name(tag, "late_to")
        return replace(self, _late_tag=tag)

    def reduce(
        self,
        function: Callable[[Any, Any], Any],
        schema: Schema | None = None,
        *,
        result: Callable[[Any, Window, Any], Any] | None = None,
        volatile_state: bool = False,
        **options: Unpack[FunctionOptions],
    ) -> DataStream:
        """Emit the first record of a window, put together with the others by ``function(reduced, record)``.

        With ``result(key, window, reduced)`` what that returns, of ``schema``. Where sessions merge,
        ``function(reduced, reduced)`` is called. ``volatile_state`` as in `KeyedStream.reduce`.
        """
        _check("reduce", function=(function, 2), result=(result, 3))
        if schema is not None and result is None:
            raise ConfigError(
                "reduce: a schema, and no result to make records of it; leave it out, or give one"
            )
        return self._add(Reduced(function, result), schema, volatile_state, options)

    @overload
    def aggregate(
        self,
        create: Callable[[], Any],
        add: Callable[[Any, Any], Any],
        schema: Schema,
        *,
        result: Callable[[Any, Window, Any], Any] | None = None,
        merge: Callable[[Any, Any], Any] | None = None,
        volatile_state: bool = False,
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
        result: Callable[[Any, Window, Any], Any] | None = None,
        merge: Callable[[Any, Any], Any] | None = None,
        volatile_state: bool = False,
        **options: Unpack[FunctionOptions],
    ) -> DataStream:
        """Emit the aggregate of a window: ``add(create(), record)``, then ``add(aggregate, record)``.

        With ``result(key, window, aggregate)`` what that returns; either is a record of ``schema``. Sessions need
        ``merge(aggregate, other)``, which makes one of two. ``volatile_state`` as in `KeyedStream.reduce`.

        With built-in aggregates, ``aggregate(ftlayer.count(), ftlayer.sum("x"))``, a window emits its key's columns,
        ``window_start`` and ``window_end`` (timestamps), and a column for each of them.
        """
        built_in = given_aggregates(create, add, schema, *more)
        if built_in:
            if result is not None or merge is not None:
                raise ConfigError(
                    "aggregate: built-in aggregates take neither result nor merge; use a map behind it"
                )
            plan = AggregatePlan.of(built_in, self._stream.keys, self._stream.schema, between=_TIMES)
            return self._add(BuiltIn(plan), plan.output, volatile_state, options)
        _check("aggregate", create=(create, 0), add=(add, 2), result=(result, 3), merge=(merge, 2))
        if merge is None and isinstance(self._windows, Session):
            raise ConfigError(
                "aggregate: a record may join two sessions into one, and so their aggregates; "
                "give merge=function(aggregate, other)"
            )
        content = Aggregated(create, add, merge, result)
        return self._add(content, schema, volatile_state, options)

    def process(
        self,
        function: Callable[[Any, Window, list[Any]], Iterable[Any] | None],
        schema: Schema,
        *,
        volatile_state: bool = False,
        **options: Unpack[FunctionOptions],
    ) -> DataStream:
        """Emit what ``function(key, window, records)`` returns: any number of records, or None.

        All records of a window are kept until it is over, in the order in which they came. ``volatile_state`` as in
        `KeyedStream.reduce`.
        """
        _check("process", function=(function, 3))
        return self._add(Collected(function), schema, volatile_state, options)

    def _add(
        self, content: Content, schema: Schema | None, volatile_state: bool, options: FunctionOptions
    ) -> DataStream:
        if self._unstarted is not None:
            self._unstarted.settle()
        function = window_function(self._windows, content, self._lateness_ms, self._late_tag)
        side = {} if self._late_tag is None else {self._late_tag: self._stream.schema}
        return self._stream.process(function, schema, side=side, volatile_state=volatile_state, **options)


_TIMES = [pa.field(name, pa.timestamp("us", tz="UTC")) for name in ("window_start", "window_end")]
"""Of a window, in the results of built-in aggregates."""


def _check(method: str, **functions: tuple[object, int]) -> None:
    """Check functions, each with how many arguments it is called with."""
    optional = ("result", "merge")
    for name, (function, takes) in functions.items():
        if function is not None or name not in optional:
            checks.check_function(function, f"{method}: {name}", takes=takes, may_yield=method == "process")
