"""An async function over a batch: many calls under way at a time, each record's success or failure its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.functions.conversion import Form, records_in_form
from ftlayer.functions.current import for_calls
from ftlayer.functions.failures import I64, SegmentOutcome, failure_of
from ftlayer.functions.keyed import convert, misfit_of
from ftlayer.functions.steps import MapAsync, RecordStep
from ftlayer.functions.token_bucket import TokenBucket
from ftlayer.records.failures import RowFailure


def monotonic_ms() -> float:
    return time.monotonic_ns() / 1_000_000


class RateLimiter:
    """Lets ``rate`` calls a second go. A forked child begins with an empty bucket of its own."""

    def __init__(
        self,
        rate: float,
        now_ms: Callable[[], float] = monotonic_ms,
        sleep: Callable[[float], None] = time.sleep,
        sleep_async: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        """``sleep`` and ``sleep_async`` take seconds."""
        self._rate = rate
        self._now_ms = now_ms
        self._sleep = sleep
        self._sleep_async = sleep_async
        self._begin()

    def wait(self) -> None:
        while (seconds := self._take()) is not None:
            self._sleep(seconds)

    async def wait_async(self) -> None:
        """As `wait`. One caller at a time."""
        while (seconds := self._take()) is not None:
            await self._sleep_async(seconds)

    def _take(self) -> float | None:
        """Let a call go; otherwise return for how many seconds to wait before the next look."""
        if self._pid != os.getpid():
            self._begin()
        if self._bucket.available(self._now_ms()):
            self._bucket.take(1)
            return None
        return self._bucket.wait_ms() / 1_000

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._bucket = TokenBucket(self._rate, self._now_ms())


def paced(step: RecordStep, pace: RateLimiter) -> RecordStep:
    function = step.function

    def call(record: Any) -> Any:
        pace.wait()
        return function(record)

    return replace(step, function=call)


_NONE = object()
"""In the place of a result that there is none of."""

_loops: dict[int, asyncio.AbstractEventLoop] = {}
_starting = threading.Lock()


class AsyncSegment:
    """A `MapAsync`. A batch is through when all its calls are: none is under way between two batches.

    So a barrier, a snapshot or the end of a task finds every record done or failed, as behind a plain function. The
    calls run in one event loop of the process, in a thread of its own, which is the same for all batches: sessions
    and connection pools may live in it.

    Attributes:
        progress: how many calls have come to their end. Another thread may look.
    """

    def __init__(self, step: MapAsync, form: Form, pace: RateLimiter | None = None) -> None:
        """``pace`` says when a call may be made; None: at once."""
        self._step = step
        self._pace = pace
        self._form = form
        self.progress = 0

    def run(self, rows: pa.RecordBatch | list[Any], parents: I64, times: I64 | None = None) -> SegmentOutcome:
        """Call the function for each row; ``parents`` is what each comes from. Times make no difference."""
        records = rows if isinstance(rows, list) else records_in_form(rows, self._form)
        calls = _Calls(self._step, records, parents, self._count, self._pace)
        asyncio.run_coroutine_threadsafe(calls.make(), _loop()).result()
        return self._outcome(calls, parents)

    def _count(self) -> None:
        self.progress += 1

    def _outcome(self, calls: _Calls, parents: I64) -> SegmentOutcome:
        step, failures = self._step, calls.failures
        good = [place for place, result in enumerate(calls.results) if result is not _NONE]
        came = parents[good]

        def misfit(place: int, error: BaseException) -> None:
            row, wanted = int(came[place]), self._form.expected(step.schema)
            failures.append(misfit_of(row, step.uid, "returned", step.schema, error, step.rules, wanted))

        results = [calls.results[place] for place in good]
        batch, counts = convert(
            results, [1] * len(results), step.schema, self._form, misfit, lax=step.rules.lax
        )
        return SegmentOutcome(batch, np.repeat(came, counts), failures)


class _Calls:
    """The calls for the records of one batch. Used by the event loop alone, and read when all have ended.

    Attributes:
        results: of each call; `_NONE` where it failed.
        failures: one for each that failed.
    """

    def __init__(
        self,
        step: MapAsync,
        records: Sequence[Any],
        parents: I64,
        count: Callable[[], None],
        pace: RateLimiter | None,
    ) -> None:
        self.results: list[Any] = [_NONE] * len(records)
        self.failures: list[RowFailure] = []
        self._step = step
        self._records = records
        self._parents: list[int] = parents.tolist()
        self._count = count
        self._pace = pace
        self._waiting = asyncio.Lock()
        self._begin = for_calls()
        self._left = iter(range(len(records)))

    async def make(self) -> None:
        """Make all calls, up to ``in_flight`` at a time, and wait for the last."""
        await asyncio.gather(*(self._work() for _ in range(min(self._step.in_flight, len(self._records)))))

    async def _work(self) -> None:
        for place in self._left:
            await self._wait()
            row = self._parents[place]
            self._begin(row)
            try:
                self.results[place] = await self._call(self._records[place])
            except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
                self.failures.append(failure_of(row, self._step.uid, error, self._step.rules))
            self._count()

    async def _wait(self) -> None:
        if self._pace is not None:
            async with self._waiting:
                await self._pace.wait_async()

    async def _call(self, record: Any) -> Any:
        if isinstance(record, Exception):  # Python cannot hold it
            raise record
        limit = asyncio.timeout(self._step.timeout_ms / 1_000)
        try:
            async with limit:
                result = await self._step.function(record)
        except TimeoutError as error:
            if not limit.expired():
                raise  # the function's own
            raise self._too_late() from error
        if limit.expired():  # it took no notice of its cancellation
            raise self._too_late()
        return result

    def _too_late(self) -> TimeoutError:
        return TimeoutError(f"{self._step.uid!r} gave no result in {self._step.timeout_ms} ms")


def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process. A fork has none of its parent's threads, and gets its own."""
    with _starting:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(loop,), name="ftlayer-async", daemon=True).start()
        return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop for good: a task of a function's own that raises one of these ends it, and has it as its result."""
    while True:
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            loop.run_forever()
