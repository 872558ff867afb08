"""Timers of a process function that are due: its ``on_timer`` is called, and what it returns goes on in the chain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from ftlayer.common.checks import fast_dataclass
from ftlayer.errors import InvalidTopologyError, StateSerializationError, TimerFailedError
from ftlayer.functions.aggregates import AggregateTable, KeyedAggregate
from ftlayer.functions.chains.fused import KeyColumns, PreparedStep, Processing, Reducing
from ftlayer.functions.chains.record_segment import RecordSegment, take_side_outputs
from ftlayer.functions.chains.segments import Aggregating, Segment, Windowing, run_segments, segments_of
from ftlayer.functions.conversion import VALUES
from ftlayer.functions.failures import I64, SideOutput, failed_rows, failure_of, first_of_each, without_rows
from ftlayer.functions.keyed import Backend, Key, Timers, owned
from ftlayer.functions.process import LAST_WATERMARK_MS, Context, results_of, uses_timers
from ftlayer.functions.steps import (
    MAIN,
    CoProcess,
    FunctionStep,
    KeyedStep,
    MapAsync,
    MapBatches,
    Process,
    Reduce,
)
from ftlayer.functions.undo import UndoBackend, UndoLog, UndoMaps, UndoValues
from ftlayer.functions.windows import TABLE, FixedWindows
from ftlayer.records.failures import RowFailure

# Functions of two inputs that give what they return event times of its own: pairs of a join have the later one's.
#
# Such a function (`gives_times`) returns each record with its time as one more column, `TIME_COLUMN`; it is the first
# of its chain, and what is behind it sees the records without the column.


TIME_COLUMN = "_ft_time"
"""int64, milliseconds since 1970. Users' columns have no such names."""


def gives_times(function: Any) -> bool:
    return bool(getattr(function, "gives_times", False))


def with_time_column(schema: pa.Schema) -> pa.Schema:
    """Return what such a function emits if its operator emits ``schema``."""
    return schema.append(pa.field(TIME_COLUMN, pa.int64(), nullable=False))


def taken_off(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, I64]:
    """Return the records without the column, and their times: int64[n]."""
    times: I64 = batch.column(TIME_COLUMN).to_numpy().astype(np.int64, copy=False)
    return batch.drop_columns([TIME_COLUMN]), times


ChainOperator = FunctionStep | Reduce | KeyedAggregate | Process | CoProcess
PreparedOperator = PreparedStep | MapBatches | MapAsync | Aggregating | Windowing

REDUCE_TABLE = "aggregate"
"""Name of the table in which a `Reduce`, or a `KeyedAggregate`, keeps its aggregates."""


@dataclass(frozen=True, eq=False)
class ProcessOperator:
    position: int
    function: Any
    step: Processing
    timers: Timers | None


@dataclass(frozen=True)
class Prepared:
    paths: tuple[tuple[PreparedOperator, ...], ...]
    processes: tuple[ProcessOperator, ...]


def prepare(operators: Sequence[ChainOperator], inputs: Sequence[pa.Schema], backend: Backend) -> Prepared:
    """Make operators ready, the first of which takes ``inputs``; InvalidTopologyError if they cannot be a chain."""
    _check(operators, inputs)
    paths: list[list[PreparedOperator]] = [[] for _ in inputs]
    processes: list[ProcessOperator] = []
    schema = inputs[0]
    for position, operator in enumerate(operators):
        own = _backend_of(operator, backend)
        if isinstance(operator, Process | CoProcess):
            process, steps = _prepare_process(position, operator, schema, inputs, own)
            processes.append(process)
        else:
            steps = [_prepare_step(operator, schema, own)] * len(paths)
        for path, step in zip(paths, steps, strict=True):
            path.append(step)
        schema = operator.schema
    return Prepared(tuple(map(tuple, paths)), tuple(processes))


def _check(operators: Sequence[ChainOperator], inputs: Sequence[pa.Schema]) -> None:
    tags: dict[str, str] = {}
    for position, operator in enumerate(operators):
        if not isinstance(operator, ChainOperator):
            raise InvalidTopologyError(f"a {type(operator).__name__} is no function of a chain")
        if isinstance(operator, CoProcess) and position:
            raise InvalidTopologyError(f"{operator.uid!r} has two inputs, so it has to begin its chain")
        for tag, _ in operator.side if isinstance(operator, Process | CoProcess) else ():
            if not tag or tag in tags:
                other = f", which {tags[tag]!r} in its chain has too" if tag else ""
                raise InvalidTopologyError(
                    f"{operator.uid!r} has the side output {tag!r}{other}; name it otherwise"
                )
            tags[tag] = operator.uid
    takes = 2 if operators and isinstance(operators[0], CoProcess) else 1
    if len(inputs) != takes:
        raise InvalidTopologyError(f"a chain that takes {takes} inputs got the schemas of {len(inputs)}")


def _backend_of(operator: ChainOperator, backend: Backend) -> Backend:
    changes_values = not isinstance(operator, KeyedStep) or operator.in_place
    return backend if changes_values or not isinstance(backend, UndoBackend) else backend.uncopied()


def _prepare_step(operator: ChainOperator, schema: pa.Schema, backend: Backend) -> PreparedOperator:
    if isinstance(operator, KeyedAggregate):
        return _prepare_aggregates(operator, backend)
    if not isinstance(operator, Reduce):
        assert not isinstance(operator, Process | CoProcess)
        return operator
    if not operator.keys:
        raise InvalidTopologyError(
            f"{operator.uid!r} reduces by key and has no keys; call key_by before reduce"
        )
    key = KeyColumns.of(operator.uid, operator.keys, schema)
    state = backend.state(operator.uid)
    table = state.values(REDUCE_TABLE)
    own = owned if operator.in_place and backend.copies else None
    return Reducing(
        operator.uid,
        operator.function,
        operator.schema,
        key,
        table,
        operator.create,
        rules=operator.rules,
        state=state,
        own=own,
    )


def _prepare_aggregates(operator: KeyedAggregate, backend: Backend) -> Aggregating:
    state = backend.state(operator.uid)
    values = state.values(REDUCE_TABLE)
    state.describe(REDUCE_TABLE, operator.plan.described())
    # Its own log is one entry a batch.
    table = AggregateTable(operator.plan, values.table if isinstance(values, UndoValues) else values)
    state.cache(table)
    return Aggregating(operator.uid, operator.plan, operator.schema, table, operator.rules)


def _prepare_process(
    position: int,
    operator: Process | CoProcess,
    schema: pa.Schema,
    inputs: Sequence[pa.Schema],
    backend: Backend,
) -> tuple[ProcessOperator, list[PreparedOperator]]:
    uid, function = operator.uid, operator.function
    if isinstance(operator, Process):
        entries = [(function.process, operator.keys, schema)] * len(inputs)
    else:
        calls = (function.process_left, function.process_right)
        entries = list(zip(calls, operator.keys, inputs, strict=True))
        if len({bool(keys) for keys in operator.keys}) > 1:
            raise InvalidTopologyError(f"{uid!r} has a key for one of its inputs only; give both or none")
    keyed = any(keys for _, keys, _ in entries)
    timers = backend.timers(uid) if keyed else None
    own = owned if operator.in_place and backend.copies else None
    copies = not getattr(function, "copies_values", False)
    state = backend.state(uid) if keyed else None
    tags = [tag for tag, _ in operator.side]
    timed, operators = uses_timers(function), backend.operators(uid)
    context = Context(uid, tags, state, timers, timed=timed, operators=operators, own=own, copies=copies)
    schema_out = with_time_column(operator.schema) if gives_times(function) else operator.schema
    steps = [
        Processing(
            uid,
            call,
            schema_out,
            KeyColumns.of(uid, keys, taken) if keys else None,
            context,
            operator.side,
            rules=operator.rules,
        )
        for call, keys, taken in entries
    ]
    operator_step = ProcessOperator(position, function, steps[0], timers)
    if isinstance(function, FixedWindows) and state is not None and timers is not None:
        maps = state.maps(TABLE)
        # Its own log is one entry a batch.
        table = function.vectorized(maps.table if isinstance(maps, UndoMaps) else maps, timers)
        if table is not None:
            state.cache(table)
            return operator_step, [Windowing(step, table) for step in steps]
    return operator_step, list(steps)


TimerKind = Literal["event", "processing"]

Timer = tuple[Key, int]
"""A key, and a time in milliseconds since 1970."""

Interrupted = Callable[[], bool]
"""Whether timers that are due are to stay set for now. Once it holds, it holds until what fires them returns."""


def never() -> bool:
    return False


TimerGuard = Callable[[str, TimerKind, Timer], None]
"""``guard(operator, kind, timer)`` is called right before ``on_timer`` is; what it raises fails the timer."""

LAST_ROUNDS = 100
"""Behind the last watermark no time passes: a function that goes on setting timers would never come to an end."""

FIRED_AT_ONCE = 10_000
"""Calls of ``on_timer`` whose results wait as Python objects."""


@fast_dataclass
class FiredTimers:
    """What came of some timers of one operator.

    Attributes:
        timers: in the order they were fired in; their places here are the rows of all else.
        outputs: by tag, `MAIN` first. A timer that failed is no parent in them.
        times: int64[n], the event time of what each timer gave; None in processing time.
        failures: one for each timer that failed, ascending.
    """

    operator: str
    kind: TimerKind
    timers: list[Timer]
    outputs: list[SideOutput]
    times: I64 | None
    failures: list[RowFailure]


class Firing:
    """One process function with timers, and the rest of its chain.

    Attributes:
        fired: how many timers were fired, again included. Another thread may look.
        tail: what its results go through.
    """

    def __init__(
        self,
        operator: ProcessOperator,
        timers: Timers,
        rest: Sequence[PreparedOperator],
        log: UndoLog | None = None,
        interrupted: Interrupted = never,
    ) -> None:
        """``log`` is where the state of all of them notes changes: then a timer fails alone."""
        self.interrupted = interrupted
        self.fired = 0
        self.tail = _tail(operator.step, rest, log)
        self.timers = timers
        self.step = operator.step
        self.log = log
        self._on_timer: Callable[[int, Any], Any] = operator.function.on_timer
        self._ends = () if log is None else (StateSerializationError,)

    def event(self, watermark_ms: int) -> OperatorTimers:
        """Return what the watermark has reached, in the order of time.

        Timers that are set meanwhile fire too, if they are due; without end behind the last watermark, where it raises
        `TimerFailedError`.
        """
        due = partial(self.timers.event.take, watermark_ms)
        if watermark_ms < LAST_WATERMARK_MS:
            return OperatorTimers(self, "event", due)
        return OperatorTimers(self, "event", due, most=LAST_ROUNDS * (self.timers.event.count + 1))

    def processing(self, now_ms: int) -> OperatorTimers:
        """Return what the clock has reached, as `event` does, though not many more than there are now."""
        due = partial(self.timers.processing.take, now_ms)
        return OperatorTimers(self, "processing", due, enough=self.timers.processing.count)

    def again(self, kind: TimerKind, timers: Sequence[Timer]) -> OperatorTimers:
        return OperatorTimers(self, kind, _no_more, list(timers))

    def call(
        self, timer: Timer, place: int, kind: TimerKind, guard: TimerGuard | None
    ) -> tuple[list[Any], int, RowFailure | None]:
        """Fire a timer; return what it gave, with which time, and why it failed.

        With a log its changes are taken back then, or `LateFailure` is raised; without one `TimerFailedError` is.
        """
        context, log = self.step.context, self.log
        key, time_ms = timer
        context._enter(key, time_ms if kind == "event" else None, place)
        mark = 0 if log is None else len(log.entries)
        try:
            if guard is not None:
                guard(self.step.uid, kind, timer)
            results = list(results_of(self._on_timer(time_ms, context)))
        except self._ends:
            raise
        except BaseException as error:
            traced = log is None or log.traced
            failure = failure_of(place, self.step.uid, error, self.step.rules, traced=traced)
            if log is None:
                raise timer_failed(failure) from error
            log.fail(mark, place)
            return [], time_ms, failure
        finally:
            self.fired += 1
        given = context.timestamp
        return results, time_ms if given is None else given, None


class OperatorTimers:
    def __init__(
        self,
        firing: Firing,
        kind: TimerKind,
        due: Callable[[], tuple[int, list[Key]] | None],
        given: Sequence[Timer] = (),
        *,
        enough: int | None = None,
        most: int | None = None,
    ) -> None:
        """``given`` are fired, then those that ``due`` says until ``enough`` are; more than ``most`` are an error.

        Where the rest is to wait (`Firing.interrupted`) it is set again, and `is_interrupted`; one fires in any case.
        """
        self._firing = firing
        self._kind: TimerKind = kind
        self._due = due
        self._enough = enough
        self._most = most
        self._taken = given
        self.is_interrupted = False
        self._next = 0
        self._done = 0

    def fire(self, most: int, guard: TimerGuard | None = None) -> FiredTimers | None:
        """Fire up to ``most``, at most `FIRED_AT_ONCE`; None: there are none left.

        Without a log raises `TimerFailedError` where one fails. With one, a timer that fails is not set any more; may
        raise `LateFailure` with a place among those that it took: undone, the log has them set again.
        """
        firing, log = self._firing, self._firing.log
        if self._most is not None and self._done > self._most:
            raise TimerFailedError(
                f"{firing.step.uid!r} sets timers of event time in on_timer without end, though no record comes "
                "any more; set none once ctx.watermark is LAST_WATERMARK_MS",
                firing.step.uid,
            )
        if log is not None:
            log.begin_segment()
            if not log.alone:
                log.add((self._go_back, (self._taken, self._next), self._done))
        timers: list[Timer] = []
        rows: list[Any] = []
        places: list[int] = []
        given: list[int] = []
        failures: list[RowFailure] = []
        for timer in self._take(min(most, FIRED_AT_ONCE)):
            place = len(timers)
            timers.append(timer)
            results, time_ms, failure = firing.call(timer, place, self._kind, guard)
            rows += results
            places += [place] * len(results)
            given.append(time_ms)
            if failure is not None:
                failures.append(failure)
        if not timers:
            return None
        times: I64 = np.array(given, dtype=np.int64)
        return self._behind(timers, rows, np.array(places, dtype=np.int64), times, failures)

    def _take(self, most: int) -> Iterator[Timer]:
        is_given = self._due is _no_more
        self.is_interrupted = False
        for _ in range(most):
            if self._done and not is_given and self._firing.interrupted():
                self._put_back()
                return
            if self._next == len(self._taken):
                if self._enough is not None and self._done >= self._enough:
                    return
                due = self._due()
                if due is None:
                    return
                time_ms, keys = due
                self._taken, self._next = [(key, time_ms) for key in keys], 0
            timer = self._taken[self._next]
            self._next += 1
            self._done += 1
            yield timer

    def _put_back(self) -> None:
        timers = self._firing.timers
        queue = timers.event if self._kind == "event" else timers.processing
        for key, time_ms in self._taken[self._next :]:
            queue.add(key, time_ms)
        self._taken, self._next, self.is_interrupted = (), 0, True

    def _behind(
        self, timers: list[Timer], rows: list[Any], parents: I64, times: I64, failures: list[RowFailure]
    ) -> FiredTimers:
        firing, log = self._firing, self._firing.log
        timed = times if self._kind == "event" else None

        def refuse(failure: RowFailure) -> None:
            if log is None:
                raise timer_failed(failure)
            log.late(failure.row)
            failures.append(failure)

        outcome = run_segments(firing.tail, rows, parents, timed, log)
        own = take_side_outputs(firing.step, VALUES, np.arange(len(times), dtype=np.int64), refuse)
        failures += outcome.failures
        if failures and log is None:
            raise timer_failed(failures[0])
        outputs = [SideOutput(MAIN, outcome.batch, outcome.parents), *own, *outcome.side]
        if failures:
            failed = failed_rows(failures)
            outputs = [
                SideOutput(output.tag, *without_rows(output.batch, output.parents, failed))
                for output in outputs
            ]
        return FiredTimers(firing.step.uid, self._kind, timers, outputs, timed, first_of_each(failures))

    def _go_back(self, taken: tuple[Sequence[Timer], int], done: int) -> None:
        self._taken, self._next = taken
        self._done = done


class DueTimers:
    """Timers of a chain on their way, operator by operator: what one gives comes before the next one's."""

    def __init__(self, operators: Iterator[OperatorTimers], left: Callable[[], None]) -> None:
        """``left`` is called behind each round; on a `LateFailure` too."""
        self._operators = operators
        self._left = left
        self._current = next(operators, None)

    def fire(self, most: int, guard: TimerGuard | None = None) -> FiredTimers | None:
        """Fire up to ``most`` timers of one operator: see `OperatorTimers.fire`; None: there are none left."""
        try:
            while self._current is not None:
                fired = self._current.fire(most, guard)
                # The next operator's watermark comes behind all timers of this one.
                if fired is not None or self._current.is_interrupted:
                    return fired
                self._current = next(self._operators, None)
            return None
        finally:
            self._left()


def _no_more() -> None:
    return None


def _tail(step: Processing, rest: Sequence[PreparedOperator], log: UndoLog | None) -> list[Segment]:
    """Return the segments of what is behind ``step``; the first of them takes Python objects."""
    segments = segments_of(rest, VALUES, step.uid, log=log)
    if segments and isinstance(segments[0], RecordSegment):
        return segments
    return [RecordSegment([], step.schema, VALUES, step.uid, log), *segments]


def timer_failed(failure: RowFailure) -> TimerFailedError:
    return TimerFailedError(
        f"{failure.operator!r} failed for a timer, which no record can be blamed for: {failure.reason}",
        failure.operator,
        failure.traceback,
    )
