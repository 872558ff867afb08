"""Timers of a process function that are due: its ``on_timer`` is called, and what it returns goes on in the chain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ftlayer.errors import TimerFailedError
from ftlayer.functions.chains.prepared import Processing
from ftlayer.functions.chains.preparing import PreparedOperator, ProcessOperator
from ftlayer.functions.chains.record_segment import RecordSegment
from ftlayer.functions.chains.segments import Segment, run_segments, segments_of
from ftlayer.functions.chains.side_outputs import take_side_outputs
from ftlayer.functions.context import results_of
from ftlayer.functions.conversion import VALUES
from ftlayer.functions.failures import RowFailure, failure_of
from ftlayer.functions.keyed import Key, Timers
from ftlayer.functions.outcome import I64, SegmentOutcome
from ftlayer.functions.process import LAST_WATERMARK_MS

LAST_ROUNDS = 100
"""Behind the last watermark no time passes: a function that goes on setting timers would never come to an end."""

FIRED_AT_ONCE = 10_000
"""Calls of ``on_timer`` whose results wait as Python objects."""


class Firing:
    """One process function with timers, and the rest of its chain.

    Attributes:
        fired: how many timers were fired. Another thread may look.
        tail: what its results go through.
    """

    def __init__(self, operator: ProcessOperator, timers: Timers, rest: Sequence[PreparedOperator]) -> None:
        self.fired = 0
        self.tail = _tail(operator.step, rest)
        self.timers = timers
        self._step = operator.step
        self._on_timer: Callable[[int, Any], Any] = operator.function.on_timer

    def event(self, watermark_ms: int) -> Iterator[tuple[SegmentOutcome, I64]]:
        """Fire what the watermark has reached, in the order of time.

        Timers that are set meanwhile fire too, if they are due. Gives outcomes, each with the times that its
        parents are places in. Raises `TimerFailedError`.
        """
        most = None
        if watermark_ms >= LAST_WATERMARK_MS:
            most = self.fired + LAST_ROUNDS * (self.timers.event_count + 1)
        while fired := self._fire(partial(self.timers.due_event, watermark_ms), FIRED_AT_ONCE, timed=True):
            yield fired
            if most is not None and self.fired > most:
                raise TimerFailedError(
                    f"{self._step.uid!r} sets timers of event time in on_timer without end, though no record comes "
                    "any more; set none once ctx.watermark is LAST_WATERMARK_MS",
                    self._step.uid,
                )

    def processing(self, now_ms: int) -> Iterator[tuple[SegmentOutcome, I64]]:
        """Fire what the clock has reached, as `event` does, though not many more than there are at the beginning."""
        left = self.timers.processing_count
        due = partial(self.timers.due_processing, now_ms)
        while left > 0 and (fired := self._fire(due, min(left, FIRED_AT_ONCE), timed=False)):
            left -= len(fired[1])
            yield fired

    def _fire(
        self, due: Callable[[], tuple[int, list[Key]] | None], enough: int, *, timed: bool
    ) -> tuple[SegmentOutcome, I64] | None:
        context = self._step.context
        calls: list[int] = []
        rows: list[Any] = []
        places: list[int] = []
        while len(calls) < enough and (found := due()) is not None:
            time_ms, keys = found
            for key in keys:
                context._enter(key, time_ms if timed else None, len(calls))
                results = self._call(time_ms)
                rows += results
                places += [len(calls)] * len(results)
                given = context.timestamp
                calls.append(time_ms if given is None else given)
        if not calls:
            return None
        times: I64 = np.array(calls, dtype=np.int64)
        parents: I64 = np.array(places, dtype=np.int64)
        outcome = run_segments(self.tail, rows, parents, times if timed else None)
        own = take_side_outputs(
            self._step, VALUES, np.arange(len(times), dtype=np.int64), outcome.failures.append
        )
        for failure in outcome.failures:
            raise timer_failed(failure)
        return SegmentOutcome(outcome.batch, outcome.parents, [], [*own, *outcome.side]), times

    def _call(self, time_ms: int) -> list[Any]:
        try:
            results = list(results_of(self._on_timer(time_ms, self._step.context)))
        except MemoryError:
            raise
        except Exception as error:
            raise timer_failed(failure_of(0, self._step.uid, error)) from error
        self.fired += 1
        return results


def _tail(step: Processing, rest: Sequence[PreparedOperator]) -> list[Segment]:
    """Return the segments of what is behind ``step``; the first of them takes Python objects."""
    segments = segments_of(rest, VALUES, step.uid)
    if segments and isinstance(segments[0], RecordSegment):
        return segments
    return [RecordSegment([], step.schema, VALUES, step.uid), *segments]


def timer_failed(failure: RowFailure) -> TimerFailedError:
    """Return the error of a timer that fails, where that fails the slot."""
    return TimerFailedError(
        f"{failure.operator!r} failed for a timer, which no record can be blamed for: {failure.reason}",
        failure.operator,
        failure.traceback,
    )
