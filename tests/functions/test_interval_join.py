"""The join on keyed state against all pairs, and against the join of acker mode's rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.common.clock import Now
from ftlayer.functions.chains.topology import MAIN, TopologyChain
from ftlayer.functions.process import LAST_WATERMARK_MS
from ftlayer.functions.steps import Filter, FlatMap, Map, MapBatches, Process
from ftlayer.functions.windows import Collected, Fixed, window_function
from ftlayer.runtime.task.pipeline import OperatorChain
from ftlayer.state.heap import HeapBackend
from ftlayer.topology.job_graph_generator import as_co_process
from ftlayer.topology.operators import Join

LEFT = pa.schema([("k", pa.string()), ("t", pa.int64()), ("n", pa.int64())])
RIGHT = pa.schema([("n", pa.int64()), ("key", pa.string())])
PAIR = pa.schema([("left", pa.int64()), ("right", pa.int64())])
MIN_MS = -(2**63)

Row = tuple[str | None, int, int]
"""Key, time, number."""


def pair(left: Any, right: Any) -> tuple[int, int]:
    return left[2], right[0]


def join(lower: int, upper: int, function: Any = pair, schema: pa.Schema = PAIR) -> Join:
    return Join("join", function, schema, (("k",), ("key",)), (LEFT, RIGHT), lower, upper)


class Joined:
    """A chain that begins with a join."""

    def __init__(self, operator: Join, *behind: Any) -> None:
        self.backend = HeapBackend()
        self.chain = TopologyChain([as_co_process(operator), *behind], [LEFT, RIGHT], self.backend)
        self.chain.open()
        self.watermark_ms = MIN_MS

    def run(self, side: int, rows: list[Row]) -> Any:
        keys, times, numbers = ([row[place] for row in rows] for place in range(3))
        columns: list[list[Any]] = [keys, times, numbers] if side == 0 else [numbers, keys]
        schema = (LEFT, RIGHT)[side]
        batch = pa.record_batch(
            [pa.array(values, f.type) for values, f in zip(columns, schema, strict=True)], schema=schema
        )
        return self.chain.run(batch, np.array(times, np.int64), self.watermark_ms, 0, input=side)

    def take(self, side: int, rows: list[Row]) -> list[tuple[tuple[int, int], int, int]]:
        """Return pairs, their times, and the rows that they come from."""
        ran = self.run(side, rows)
        assert not ran.failures
        output = ran.outputs[MAIN]
        assert output.batch.schema == PAIR
        records = [tuple(row.values()) for row in output.batch.to_pylist()]
        return list(zip(records, output.times.tolist(), output.parents.tolist(), strict=True))

    def advance(self, watermark_ms: int) -> None:
        self.watermark_ms = watermark_ms
        assert self.chain.fire_event_timers(watermark_ms, 0) == {}

    def held(self) -> list[tuple[int, str, int]]:
        state = self.backend.state("join")
        return sorted(
            (side, key, time_ms)
            for side, name in enumerate(("left", "right"))
            for key in "ab"
            for time_ms, records in state.maps(name).items(key).items()
            for _ in records
        )


rows = st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(-20, 40)), max_size=5)
story = st.lists(st.tuples(st.integers(0, 1), rows, st.integers(0, 10)), max_size=10)


@settings(max_examples=200, deadline=None)
@given(story, st.integers(-15, 15), st.integers(0, 20))
def test_pairs_are_those_that_the_bounds_say(
    rounds: list[tuple[int, list[tuple[str | None, int]], int]], lower: int, width: int
) -> None:
    upper = lower + width
    joined = Joined(join(lower, upper))
    # What may still be matched, each with the last time of the other side that matches it.
    waiting: list[list[tuple[Row, int]]] = [[], []]
    watermark_ms, count = -25, 0
    for side, records, step in rounds:
        mine = [(key, time_ms, count + place) for place, (key, time_ms) in enumerate(records)]
        count += len(mine)
        wanted = []
        for place, row in enumerate(mine):
            for other, _ in waiting[1 - side]:
                left, right = (row, other) if side == 0 else (other, row)
                if row[0] == other[0] and row[0] is not None and lower <= right[1] - left[1] <= upper:
                    wanted.append(((left[2], right[2]), max(left[1], right[1]), place))
            last = row[1] + (upper if side == 0 else -lower)
            if last >= joined.watermark_ms and row[0] is not None:
                waiting[side].append((row, last))
        assert sorted(joined.take(side, mine)) == sorted(wanted)
        watermark_ms += step
        joined.advance(watermark_ms)
        waiting = [[entry for entry in entries if entry[1] >= watermark_ms] for entries in waiting]
        held = sorted((side, row[0], row[1]) for side in (0, 1) for row, _ in waiting[side])
        assert joined.held() == held
    joined.advance(LAST_WATERMARK_MS)
    assert joined.held() == []
    assert joined.backend.timers("join").event.count == 0


def test_a_wide_join_and_one_of_equal_times_look_at_the_same() -> None:
    joined = Joined(join(0, 0))
    joined.take(0, [("a", time_ms, time_ms) for time_ms in range(100)])
    assert joined.take(1, [("a", 50, 7)]) == [((50, 7), 50, 0)]


def test_times_near_the_end_of_all_times() -> None:
    joined = Joined(join(-10, 10))
    last = LAST_WATERMARK_MS
    joined.take(0, [("a", last, 1), ("a", last - 5, 2), ("a", MIN_MS, 3), ("a", MIN_MS + 5, 4)])
    assert [found for found, _, _ in joined.take(1, [("a", last - 1, 9)])] == [(2, 9), (1, 9)]
    joined.advance(last - 1)
    assert [time_ms for _, _, time_ms in joined.held()] == [last - 5, last, last - 1]
    joined.advance(last)
    assert joined.held() == []


def test_what_is_behind_a_join_sees_its_times_and_not_the_column() -> None:
    seen: list[Any] = []
    window = window_function(Fixed(10, 10), Collected(lambda key, window, pairs: [(key, len(pairs))]))
    joined = Joined(
        join(-100, 100),
        Filter("f", lambda record: seen.append(record) or record != (1, 12), PAIR),
        FlatMap("m", lambda record: [record, record], PAIR),
        MapBatches("b", lambda batch: batch, PAIR, "arrow", False),
        Process("w", window, PAIR, ("left",)),
    )
    joined.run(0, [("a", 5, 1), ("a", 25, 2)])
    ran = joined.run(1, [("a", 12, 10), ("a", 1, 11), ("a", 2, 12)])
    assert ran.failures == []
    assert seen == [(1, 10), (2, 10), (1, 11), (2, 11), (1, 12), (2, 12)]
    fired = joined.chain.fire_event_timers(LAST_WATERMARK_MS, 0)[MAIN]
    counts = [tuple(row.values()) for row in fired.batch.to_pylist()]
    # Of left 1: one at 5 and one at 12; of left 2: three at 25; each twice.
    assert list(zip(counts, fired.times.tolist(), strict=True)) == [((1, 2), 9), ((1, 2), 19), ((2, 6), 29)]


def test_times_of_pairs_reach_the_end_of_a_pipeline() -> None:
    pipeline = OperatorChain(
        [as_co_process(join(-100, 100)), Map("m", lambda pair: pair, PAIR)], [LEFT, RIGHT], HeapBackend()
    )
    pipeline.open(0)
    left = pa.record_batch([["a", "a"], [5, 25], [1, 2]], schema=LEFT)
    pipeline.run(left, np.array([5, 25]), True, 0, Now(0, 0))
    right = pa.record_batch([[10], ["a"]], schema=RIGHT)
    rows = pipeline.run(right, np.array([12]), True, 1, Now(0, 0)).outputs[MAIN]
    assert rows.times is not None
    assert (rows.times.tolist(), rows.parents.tolist()) == ([12, 25], [0, 0])


def test_what_fails_behind_a_join_fails_the_record_that_came() -> None:
    def fails(record: Any) -> Any:
        if record[1] == 11:
            raise ValueError("no elevens")
        return record

    joined = Joined(
        join(-100, 100), Map("m", fails, PAIR), MapBatches("b", lambda b: b, PAIR, "arrow", False)
    )
    joined.run(0, [("a", 5, 1), ("a", 25, 2)])
    ran = joined.run(1, [("a", 12, 10), ("a", 1, 11), ("a", 2, 12)])
    assert [(failure.row, failure.operator) for failure in ran.failures] == [(1, "m")]
    output = ran.outputs[MAIN]
    assert output.parents.tolist() == [0, 0, 2, 2]
    assert output.times.tolist() == [12, 25, 5, 25]


@pytest.mark.parametrize("result", [7, [1, 2], (1, 2, 3), None])
def test_a_pair_that_does_not_fit_fails(result: Any) -> None:
    joined = Joined(join(0, 100, lambda left, right: result))
    joined.run(0, [("a", 5, 1)])
    failures = joined.run(1, [("a", 12, 10), ("b", 12, 11)]).failures
    assert [failure.row for failure in failures] == [0]
    assert "TypeError" in failures[0].reason


def test_pairs_of_one_column_are_bare_values() -> None:
    schema = pa.schema([("sum", pa.int64())])
    joined = Joined(join(0, 100, lambda left, right: left[2] + right[0], schema))
    joined.run(0, [("a", 5, 1)])
    assert joined.run(1, [("a", 12, 10)]).outputs[MAIN].batch.to_pylist() == [{"sum": 11}]


def test_without_times_records_fail() -> None:
    joined = Joined(join(0, 100))
    batch = pa.record_batch([[1], ["a"]], schema=RIGHT)
    failures = joined.chain.run(batch, None, MIN_MS, 0, input=1).failures
    assert "put assign_watermarks before the join" in failures[0].reason
