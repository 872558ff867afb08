"""Waits between the calls of a function that has a rate limit, where its thread has nothing else to do."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from ftlayer.functions.steps import RecordStep
from ftlayer.functions.token_bucket import TokenBucket


def monotonic_ms() -> float:
    """Return the time of a clock that never goes back."""
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
        """Return when the next call may be made."""
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
    """Return the step with a wait before each call."""
    function = step.function

    def call(record: Any) -> Any:
        pace.wait()
        return function(record)

    return replace(step, function=call)
