"""Functions with a rate limit in a task of a wrapped query: it waits between records, by a clock that is moved."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.common.failures import PermanentFailure
from ftlayer.functions.chains.segments import Chain, RateLimiter
from ftlayer.functions.steps import Filter, FlatMap, FunctionStep, Map, MapAsync
from ftlayer.spark.stages.known import run_isolated

V = pa.schema([("v", pa.int64())])


def ints(n: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(range(n), pa.int64())], schema=V)


class Clock:
    """Moves by what is slept alone."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.calls: list[tuple[int, float]] = []
        self.sleepers = 0

    def sleep(self, seconds: float) -> None:
        self.now_ms += seconds * 1_000

    async def sleep_async(self, seconds: float) -> None:
        self.sleepers += 1
        assert self.sleepers == 1, "one waits, the others wait for it"
        await asyncio.sleep(0)
        self.sleepers -= 1
        self.sleep(seconds)

    def pace(self, rate: float) -> RateLimiter:
        return RateLimiter(rate, lambda: self.now_ms, self.sleep, self.sleep_async)

    def seen(self, record: dict[str, int]) -> None:
        self.calls.append((record["v"], self.now_ms))


def functions_of(clock: Clock, rate: float | None) -> list[FunctionStep]:
    def same(record: dict[str, int]) -> dict[str, int]:
        clock.seen(record)
        return record

    def twice(record: dict[str, int]) -> list[dict[str, int]]:
        clock.seen(record)
        return [record, record]

    async def look_up(record: dict[str, int]) -> dict[str, int]:
        return same(record)

    return [
        Map("map", same, V, rate_limit=rate),
        FlatMap("flat_map", twice, V, rate_limit=rate),
        Filter("filter", same, V, rate_limit=rate),
        MapAsync("map_async", look_up, V, 8, 60_000, rate_limit=rate),
    ]


@pytest.mark.parametrize("which", range(4))
def test_so_many_a_second_and_all_of_them(which: int) -> None:
    clock = Clock()
    chain = Chain([functions_of(clock, 10)[which]], clock.pace)
    for _ in range(2):
        chain.run(ints(15))
    assert [v for v, _ in clock.calls] == [*range(15), *range(15)]
    assert [ms for _, ms in clock.calls] == [100.0 * (place + 1) for place in range(30)]


@pytest.mark.parametrize("which", range(4))
def test_without_a_limit_nothing_waits(which: int) -> None:
    clock = Clock()
    Chain([functions_of(clock, None)[which]], clock.pace).run(ints(3_000))
    assert clock.now_ms == 0
    assert len(clock.calls) == 3_000


def test_calls_that_fail_count() -> None:
    clock = Clock()
    tried: list[float] = []

    def broken(record: dict[str, int]) -> Any:
        tried.append(clock.now_ms)
        raise PermanentFailure("no")

    chain = Chain([Map("broken", broken, V, rate_limit=4)], clock.pace)
    assert len(chain.run(ints(4)).failures) == 4
    assert tried == [250, 500, 750, 1_000]


def test_the_wait_is_no_part_of_the_time_that_a_call_may_take() -> None:
    clock = Clock()

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(0.01)  # ten times as long as a call may take
        clock.sleep(seconds)

    step = replace(functions_of(clock, 1)[3], timeout_ms=1)
    chain = Chain([step], lambda rate: RateLimiter(rate, lambda: clock.now_ms, sleep_async=sleep))  # type: ignore[list-item]
    assert not chain.run(ints(2)).failures
    assert clock.now_ms == 2_000


def test_a_child_process_begins_with_an_empty_bucket() -> None:
    """In the search for the record that kills its process, each part would have a burst of its own."""
    clock = Clock()

    def when(record: dict[str, int]) -> dict[str, int]:
        return {"v": round(clock.now_ms)}

    chain = Chain([Map("when", when, V, rate_limit=10)], clock.pace)
    chain.run(ints(1))
    clock.now_ms = 10_000
    result = run_isolated(ints(2), chain.run)
    assert result.batches[0][0].column("v").to_pylist() == [10_100, 10_200]
