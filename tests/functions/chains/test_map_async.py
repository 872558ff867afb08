"""Async functions in a chain: calls overlap within a batch, none outlives it, each record fails alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.common.failures import PermanentFailure, RetryLater
from ftlayer.errors import ConfigError
from ftlayer.functions.chains.record_segment import CHUNK_ROWS
from ftlayer.functions.chains.segments import (
    CALLED_BYTES,
    CALLED_ROWS,
    Chain,
    ChainResult,
    rows_at_once,
    segments_of,
)
from ftlayer.functions.conversion import VALUES
from ftlayer.functions.current import Tries, current_record
from ftlayer.functions.steps import Filter, Map, MapAsync, MapBatches
from ftlayer.records.ids import pack_tries
from ftlayer.spark.stages.known import run_isolated
from ftlayer.topology.builder import GraphBuilder

V = pa.schema([("v", pa.int64())])
WAIT_S = 600


def ints(values: list[int]) -> pa.RecordBatch:
    return pa.record_batch({"v": pa.array(values, pa.int64())})


def step(function: Any, in_flight: int = 200, timeout_ms: int = 60_000) -> MapAsync:
    return MapAsync("look_up", function, V, in_flight, timeout_ms)


def run(function: Any, values: list[int], **options: int) -> ChainResult:
    return Chain([step(function, **options)]).run(ints(values))


def values_out(result: ChainResult) -> list[int]:
    return [value for batch, _ in result.batches for value in batch.column("v").to_pylist()]


class Calls:
    """Counts the calls under way."""

    def __init__(self) -> None:
        self.now = self.most = self.made = 0

    async def __call__(self, record: dict[str, int]) -> dict[str, int]:
        self.made += 1
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return record


@pytest.mark.parametrize(("in_flight", "most"), [(1, 1), (3, 3), (200, 50)])
def test_no_more_calls_than_asked_for_are_under_way_and_none_behind_the_batch(
    in_flight: int, most: int
) -> None:
    calls = Calls()
    assert values_out(run(calls, list(range(50)), in_flight=in_flight)) == list(range(50))
    assert (calls.most, calls.now, calls.made) == (most, 0, 50)


def test_results_keep_the_order_of_their_records_whichever_call_ends_first() -> None:
    async def the_first_waits_for_the_last(record: dict[str, int], ended: list[Any] = []) -> dict[str, int]:  # noqa: B006
        if not ended:
            ended.append(asyncio.Event())
        if record["v"] == 0:
            await ended[0].wait()
        if record["v"] == 9:
            ended[0].set()
        return record

    assert values_out(run(the_first_waits_for_the_last, list(range(10)))) == list(range(10))


def test_a_call_that_takes_too_long_fails_its_record_and_no_other() -> None:
    ended: list[int] = []

    async def hangs_for_sevens(record: dict[str, int]) -> dict[str, int]:
        try:
            if record["v"] == 7:
                await asyncio.Event().wait()
        finally:
            ended.append(record["v"])
        return record

    result = run(hangs_for_sevens, [6, 7, 8], timeout_ms=50)
    assert values_out(result) == [6, 8]
    (failure,) = result.failures
    assert (failure.row, failure.operator) == (1, "look_up")
    assert failure.reason == "TimeoutError: 'look_up' gave no result in 50 ms"
    assert sorted(ended) == [6, 7, 8]  # it was cancelled, and is not under way any more


def test_a_call_that_returns_in_spite_of_its_cancellation_is_too_late() -> None:
    async def goes_on(record: dict[str, int]) -> dict[str, int]:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return record

    result = run(goes_on, [1], timeout_ms=20)
    assert values_out(result) == []
    assert [failure.reason for failure in result.failures] == [
        "TimeoutError: 'look_up' gave no result in 20 ms"
    ]


def raises(error: BaseException) -> Callable[[Any], Any]:
    async def function(record: Any) -> Any:
        if record["v"] == 1:
            raise error
        return record

    return function


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no such host"), "ValueError: no such host"),
        (TimeoutError("its own"), "TimeoutError: its own"),
        (asyncio.CancelledError("by itself"), "CancelledError: by itself"),
        (PermanentFailure("gone"), "gone"),
    ],
)
def test_what_a_call_raises_fails_its_record(error: BaseException, reason: str) -> None:
    result = run(raises(error), [0, 1, 2])
    assert values_out(result) == [0, 2]
    (failure,) = result.failures
    assert (failure.row, failure.reason) == (1, reason)
    assert failure.fatal == isinstance(error, PermanentFailure)


def test_it_may_ask_for_a_later_try() -> None:
    (failure,) = run(raises(RetryLater("busy", after="30s")), [1]).failures
    assert failure.after_ms == 30_000


def test_a_result_that_does_not_fit_fails_its_record() -> None:
    async def bends_ones(record: dict[str, int]) -> Any:
        return {"v": "x"} if record["v"] == 1 else record

    result = run(bends_ones, [0, 1, 2])
    assert values_out(result) == [0, 2]
    (failure,) = result.failures
    assert failure.row == 1
    assert "does not fit its schema" in failure.reason


def test_each_call_sees_its_own_record() -> None:
    seen: dict[int, int] = {}

    async def look(record: dict[str, int]) -> dict[str, int]:
        await asyncio.sleep(0)
        seen[record["v"]] = current_record().attempt
        return record

    attempts = np.array([1, 2, 3, 4], np.int32)
    known = Tries(np.arange(1, 5, dtype=np.uint64), pack_tries(attempts, np.full(4, 9, np.uint64)))
    Chain([Filter("f", lambda r: r["v"] != 11, V), step(look, in_flight=2)]).run(
        ints([10, 11, 12, 13]), known
    )
    assert seen == {10: 1, 12: 3, 13: 4}


def test_between_plain_functions_and_in_the_form_of_topologies() -> None:
    async def double(value: int) -> int:
        await asyncio.sleep(0)
        return 2 * value

    steps = [Map("a", lambda v: v + 1, V), step(double), Map("b", lambda v: v + 1, V)]
    rows, parents = ints([1, 2, 3]), np.arange(3)
    for segment in segments_of(steps, VALUES):
        outcome = segment.run(rows, parents)
        rows, parents = outcome.batch, outcome.parents
    assert rows.column("v").to_pylist() == [5, 7, 9]


def test_all_batches_share_one_event_loop_and_a_fork_has_its_own() -> None:
    """A session of a client is bound to the loop that it was made in; a fork has no thread of its parent's."""
    loops: list[Any] = []

    async def note(record: dict[str, int]) -> dict[str, int]:
        loops.append(asyncio.get_running_loop())
        return {"v": os.getpid()}

    chain = Chain([step(note)])
    chain.run(ints([1]))
    chain.run(ints([2]))
    assert loops[0] is loops[1]
    assert values_out(run_isolated(ints([3]), chain.run)) != [os.getpid()]


def test_another_thread_sees_the_calls_that_have_ended() -> None:
    reached, leave = threading.Event(), threading.Event()

    async def waits_at_the_end(value: int) -> int:
        if value == 2:
            reached.set()
            await asyncio.to_thread(leave.wait, WAIT_S)
        return value

    (segment,) = segments_of([step(waits_at_the_end, in_flight=1)], VALUES)
    loop = threading.Thread(target=segment.run, args=(ints([0, 1, 2]), np.arange(3)))
    loop.start()
    assert reached.wait(WAIT_S)
    assert segment.progress == 2  # type: ignore[union-attr]
    leave.set()
    loop.join()
    assert segment.progress == 3  # type: ignore[union-attr]


def test_bounds_and_functions_are_checked_where_they_are_given() -> None:
    with pytest.raises(ConfigError, match="expected an async function"):
        step(lambda record: record)

    async def same(record: Any) -> Any:
        return record

    for in_flight in (0, -1, True, 2.5, 10**6):
        with pytest.raises(ConfigError, match="in_flight"):
            step(same, in_flight=in_flight)  # type: ignore[arg-type]


# ---------------------------------------------------------------- a slow call


class Chatty:
    """The first record's call waits until that of the last one has begun."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.begun: asyncio.Event | None = None

    async def __call__(self, record: dict[str, int]) -> dict[str, int]:
        if self.begun is None:
            self.begun = asyncio.Event()
        if record["v"] == self.last:
            self.begun.set()
        if record["v"] == 0:
            await self.begun.wait()
        return record


@pytest.mark.parametrize("tracked", [True, False])
def test_a_slow_call_holds_up_no_other_of_its_arrow_batch(tracked: bool) -> None:
    rows = 3 * CHUNK_ROWS
    chain = Chain([Map("first", dict, V), step(Chatty(rows - 1), in_flight=2), Map("then", dict, V)])
    if tracked:
        found = chain.run(ints(list(range(rows))))
        assert found.failures == []
        assert values_out(found) == list(range(rows))
    else:
        parts = chain.run_untracked(ints(list(range(rows))))
        assert [value for part in parts for value in part.column("v").to_pylist()] == list(range(rows))


def test_what_goes_through_at_once_is_bounded() -> None:
    look_up, batches = step(Calls()), MapBatches("pandas", lambda batch: batch, V, "arrow", False)
    many = ints(list(range(100_000)))
    large = pa.record_batch({"v": pa.array(["x" * 4_096] * 20_000)})
    assert rows_at_once([Map("plain", dict, V)], many) == CHUNK_ROWS
    assert rows_at_once([look_up], many) == CALLED_ROWS
    assert rows_at_once([look_up], large) == CALLED_BYTES // (large.nbytes // 20_000)
    assert rows_at_once([look_up], pa.record_batch({"v": pa.array(["x" * (1 << 20)])})) == CHUNK_ROWS
    # A function of batches is promised a thousand rows at most.
    assert rows_at_once([look_up, batches], many) == CHUNK_ROWS


def test_ordered_is_true_or_false() -> None:
    stream = GraphBuilder("job").source([1], "n bigint")
    stream.map_async(Calls(), "n bigint", ordered=False).sink(print)
    with pytest.raises(ConfigError, match="map_async: ordered"):
        stream.map_async(Calls(), "n bigint", ordered="no")
