"""Windows of built-in aggregates against the same windows of a user's functions."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ftlayer as ft
from ftlayer.functions import windows as aggregates
from ftlayer.functions.aggregates import AggregatePlan
from ftlayer.functions.chains.topology import MAIN, TopologyChain
from ftlayer.functions.process import LAST_WATERMARK_MS
from ftlayer.functions.steps import Process
from ftlayer.functions.windows import (
    Aggregated,
    BuiltIn,
    Content,
    Fixed,
    Session,
    Window,
    WindowKind,
    window_function,
)
from ftlayer.state.heap import HeapBackend

RECORD = pa.schema([("k", pa.string()), ("t", pa.int64()), ("v", pa.int64())])
TIMES = [pa.field(name, pa.timestamp("us", tz="UTC")) for name in ("window_start", "window_end")]
PLAN = AggregatePlan.of([ft.count(), ft.sum("v"), ft.min("v"), ft.mean("v")], ("k",), RECORD, between=TIMES)
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
MOST = 2**63 - 1

State = tuple[int, list[int]]


def add(state: State, record: Any) -> State:
    rows, values = state
    more = values if record[2] is None else [*values, record[2]]
    if sum(more) > MOST:
        raise OverflowError(record)
    return rows + 1, more


def merge(one: State, other: State) -> State:
    return one[0] + other[0], one[1] + other[1]


def result(key: str, window: Window, state: State) -> tuple[Any, ...]:
    rows, values = state
    numbers: tuple[Any, ...] = (None, None, None)
    if values:
        numbers = (sum(values), min(values), sum(values) / len(values))
    times = [EPOCH + dt.timedelta(milliseconds=ms) for ms in (window.start_ms, window.end_ms)]
    return (key, *times, rows, *numbers)


def chain_of(
    windows: WindowKind, content: Content, lateness_ms: int, *, vectorized: bool = True
) -> TopologyChain:
    function: Any = window_function(windows, content, lateness_ms, "late")
    if not vectorized:
        function.vectorized = lambda maps, timers: None
    step = Process("w", function, PLAN.output, ("k",), (("late", RECORD),))
    chain = TopologyChain([step], [RECORD], HeapBackend())
    chain.open()
    return chain


def fired(chain: TopologyChain, watermark_ms: int) -> list[Any]:
    outputs = chain.fire_event_timers(watermark_ms, 0)
    if MAIN not in outputs:
        return []
    times = outputs[MAIN].times
    assert times is not None
    rows = outputs[MAIN].batch.to_pylist()
    means = [row.pop("mean_v") for row in rows]
    return sorted(zip(times.tolist(), map(str, rows), means, strict=True), key=lambda each: each[:2])


def assert_same(one: list[Any], other: list[Any]) -> None:
    """Means are alike only: they are rounded each time that a double takes one more."""
    assert [each[:2] for each in one] == [each[:2] for each in other]
    pairs = [(a, b) for (*_, a), (*_, b) in zip(one, other, strict=True)]
    assert all(a == b or math.isclose(a, b, rel_tol=1e-12) for a, b in pairs), pairs


def batch_of(rows: list[Any]) -> tuple[pa.RecordBatch, Any]:
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    arrays = [pa.array(list(c), f.type) for c, f in zip(columns, RECORD, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=RECORD), np.array(columns[1], np.int64)


events = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.sampled_from("ab"), st.integers(0, 60), st.sampled_from([None, 1, 5, 2**62])),
            max_size=8,
        ),
        st.integers(0, 20),
    ),
    max_size=8,
)


@pytest.mark.parametrize("windows", [Fixed(10, 10), Fixed(20, 5, 3), Fixed(3, 10), Session(7)], ids=str)
@pytest.mark.parametrize("at_once", [3, 1 << 20])
@given(events=events, lateness_ms=st.sampled_from([0, 8]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_they_are_those_of_functions(
    monkeypatch: pytest.MonkeyPatch, windows: WindowKind, at_once: int, events: list[Any], lateness_ms: int
) -> None:
    monkeypatch.setattr(aggregates, "MOST_ASSIGNED", at_once)
    contents = BuiltIn(PLAN), Aggregated(lambda: (0, []), add, merge, result)
    chains = [chain_of(windows, content, lateness_ms) for content in contents]
    watermark = 0
    for rows, passed in events:
        batch, times = batch_of(rows)
        ran = [chain.run(batch, times, watermark, 0) for chain in chains]
        failed = [[failure.row for failure in each.failures] for each in ran]
        assert failed[0] == failed[1]
        late = [each.outputs["late"].batch.to_pylist() if "late" in each.outputs else [] for each in ran]
        assert late[0] == late[1]
        watermark += passed
        assert_same(fired(chains[0], watermark), fired(chains[1], watermark))
    assert_same(fired(chains[0], LAST_WATERMARK_MS), fired(chains[1], LAST_WATERMARK_MS))


def test_a_row_that_one_of_its_windows_does_not_take_is_in_none() -> None:
    chains = [chain_of(Fixed(20, 10), BuiltIn(PLAN), 0, vectorized=way) for way in (True, False)]
    for chain in chains:
        # [10, 30) is nearly full; the third row, which is in [0, 20) too, is one too many for it.
        batch, times = batch_of([("a", 25, MOST - 1), ("a", 5, 1), ("a", 15, 5), ("a", 15, 1)])
        result = chain.run(batch, times, 0, 0)
        assert [failure.row for failure in result.failures] == [2]
        assert "the sum of 'v' would be beyond int64" in result.failures[0].reason
    assert_same(fired(chains[0], LAST_WATERMARK_MS), fired(chains[1], LAST_WATERMARK_MS))


@pytest.mark.parametrize("windows", [Fixed(10, 10), Fixed(20, 5, 3)], ids=str)
def test_a_time_at_the_end_of_64_bits_leaves_the_other_windows_right(windows: Fixed) -> None:
    results = []
    for way in (True, False):
        chain = chain_of(windows, BuiltIn(PLAN), 0, vectorized=way)
        for times in ([5], [5, 2**63 - 1, 2**61, 6], [6]):
            batch, at = batch_of([("a", time, 1) for time in times])
            assert not chain.run(batch, at, 0, 0).failures
        results.append(fired(chain, 10_000))
    assert results[0] == results[1] != []
