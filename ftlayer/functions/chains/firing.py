"""Timers of a process function that are due: its ``on_timer`` is called, and what it returns goes on in the chain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from ftlayer.common.checks import fast_dataclass
from ftlayer.errors import StateSerializationError, TimerFailedError
from ftlayer.functions.chains.fused import Processing
from ftlayer.functions.chains.preparing import PreparedOperator, ProcessOperator
from ftlayer.functions.chains.record_segment import RecordSegment, take_side_outputs
from ftlayer.functions.chains.segments import Segment, run_segments, segments_of
from ftlayer.functions.conversion import VALUES
from ftlayer.functions.failures import I64, SideOutput, failed_rows, failure_of, first_of_each, without_rows
from ftlayer.functions.keyed import Key, Timers
from ftlayer.functions.process import LAST_WATERMARK_MS, results_of
from ftlayer.functions.steps import MAIN
from ftlayer.functions.undo import UndoLog
from ftlayer.records.failures import RowFailure

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
