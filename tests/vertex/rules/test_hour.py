"""The last hour in figures: of the vertex, and of announced jobs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.common.clock import Now
from ftlayer.errors import UnknownJobError
from ftlayer.vertex import calls
from ftlayer.vertex.calls.jobs import (
    BatchDetails,
    CheckpointDetails,
    EdgeDetails,
    Hour,
    JobDetails,
    JobKind,
    SubtaskDetails,
)
from ftlayer.vertex.rules.audit import POINTS, STEP_MS, JobHours, Ring

WALL_MS = 1_700_000_000_000

JOB = JobDetails("shop", "shop", JobKind.TOPOLOGY, "run", "acker", "running", False, 0, at_ms=60_000)


def _at(seconds: float) -> Now:
    return Now(int(seconds * 1_000), WALL_MS + int(seconds * 1_000))


def _last(hour: Hour, name: str, count: int) -> list[float]:
    return list(hour.series[name][-count:])


def _of(vertex: Any) -> Hour:
    return vertex.call(calls.GetHour())


# ---------------------------------------------------------------- the vertex


def test_rates_are_those_of_ten_seconds_and_gauges_what_there_was_at_their_end(vertex: Any) -> None:
    vertex.open(max_attempts=1, timeout_ms=1_000_000)
    vertex.persist(list(range(1, 21)))
    vertex.advance(STEP_MS)
    vertex.xor(*((root, root) for root in range(1, 11)))
    vertex.fail(11, 12)
    vertex.advance(STEP_MS)
    hour = _of(vertex)
    assert (hour.step_ms, hour.end_ms) == (STEP_MS, vertex.wall)
    assert _last(hour, "in_per_second", 2) == [2.0, 0.0]
    assert _last(hour, "done_per_second", 2) == [0.0, 1.0]
    assert _last(hour, "failed_per_second", 2) == _last(hour, "died_per_second", 2) == [0.0, 0.2]
    assert _last(hour, "pending", 2) == [20.0, 8.0]
    assert _last(hour, "dead", 2) == [0.0, 2.0]
    assert _last(hour, "oldest_seconds", 2) == [10.0, 20.0]
    assert all(math.isnan(point) for point in hour.series["in_per_second"][:-2]), "that was before its start"
    assert {len(points) for points in hour.series.values()} == {POINTS}


def test_a_call_after_a_silence_belongs_to_its_own_step(vertex: Any) -> None:
    vertex.open(timeout_ms=1_000_000)
    vertex.persist([1])
    vertex.mono += 5 * STEP_MS
    vertex.wall += 5 * STEP_MS
    vertex.persist([2, 3, 4, 5])
    vertex.mono += STEP_MS
    vertex.wall += STEP_MS
    hour = _of(vertex)
    assert _last(hour, "in_per_second", 6) == [0.1, 0.0, 0.0, 0.0, 0.0, 0.4]
    assert _last(hour, "pending", 6) == [1.0] * 5 + [5.0]
    assert _last(hour, "oldest_seconds", 6) == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]


def test_events_that_no_transaction_has_a_part_in_belong_to_their_step_too(vertex: Any) -> None:
    vertex.open(timeout_ms=1_000_000)
    vertex.persist([1, 2])
    vertex.mono += STEP_MS
    vertex.wall += STEP_MS
    vertex.xor((1, 1))
    vertex.mono += STEP_MS
    vertex.wall += STEP_MS
    assert _last(_of(vertex), "done_per_second", 2) == [0.0, 0.1]
    assert _last(_of(vertex), "pending", 2) == [2.0, 1.0]


def test_a_silence_longer_than_an_hour_leaves_an_hour(vertex: Any) -> None:
    vertex.open(timeout_ms=100_000_000)
    vertex.persist([1])
    vertex.mono += 1_000 * STEP_MS
    vertex.wall += 1_000 * STEP_MS
    hour = _of(vertex)
    assert hour.series["pending"] == (1.0,) * POINTS
    assert hour.series["oldest_seconds"][-1] == 10_000.0


# ---------------------------------------------------------------- jobs


def test_of_a_step_the_last_announcement_counts_and_silence_is_no_number() -> None:
    hours = JobHours()
    hours.note(replace(JOB, rates={"records_in": 5.0}), _at(1))
    hours.note(replace(JOB, rates={"records_in": 7.0}), _at(9))
    hours.note(replace(JOB, rates={"records_in": 9.0}), _at(25))
    hour = hours.hour("shop", _at(32))
    assert hour.end_ms == WALL_MS + 30_000
    assert _last(hour, "in_per_second", 3) == [7.0, pytest.approx(math.nan, nan_ok=True), 9.0]


def test_points_say_what_holds_a_job_back() -> None:
    hours = JobHours()
    subtasks = (
        SubtaskDetails("a", 0, busy=0.2, back_pressured=0.9, watermark_ms=58_000),
        SubtaskDetails("b", 1, busy=0.97, back_pressured=0.0, watermark_ms=50_000),
        SubtaskDetails("c", 1),
    )
    hours.note(
        replace(
            JOB,
            subtasks=subtasks,
            edges=(EdgeDetails("a", "b", 1, 500, 5), EdgeDetails("b", "c", 1, 20, 1)),
            checkpoints=(
                CheckpointDetails(1, "checkpoint", "completed", False, 0, 2_500, 2_500, 3),
                CheckpointDetails(2, "checkpoint", "in progress", False, 2_500, 0, 10, 3),
            ),
            batches=(BatchDetails(0, 1, 10, 10, 0, 0, 1_500.0),),
        ),
        _at(5),
    )
    # Announcements without a checkpoint and a batch that has ended since keep the last one's of the step.
    hours.note(replace(JOB, subtasks=subtasks), _at(6))
    hour = hours.hour("shop", _at(10))
    last = {name: points[-1] for name, points in hour.series.items()}
    assert last == {
        "busy": 0.97,
        "back_pressured": 0.9,
        "watermark_lag_seconds": 10.0,
        "queued_bytes": 520.0,
        "checkpoint_seconds": 2.5,
        "batch_seconds": 1.5,
    }


def test_a_job_that_is_forgotten_has_no_series() -> None:
    hours = JobHours()
    hours.note(replace(JOB, rates={"records_in": 5.0}), _at(1))
    assert hours.hour("shop", _at(2)).series
    hours.forget("shop")
    assert not hours.hour("shop", _at(2)).series


def test_a_vertex_keeps_the_hours_of_jobs_that_are_announced_to_it(vertex: Any) -> None:
    vertex.call(calls.AnnounceJob(replace(JOB, rates={"records_in": 5.0})))
    vertex.advance(STEP_MS)
    hour = vertex.call(calls.GetHour("shop"))
    assert hour.series["in_per_second"][-1] == 5.0
    with pytest.raises(UnknownJobError, match="'other'"):
        vertex.call(calls.GetHour("other"))


@given(st.lists(st.tuples(st.integers(0, 400), st.floats(0, 10)), max_size=20), st.integers(0, 500))
def test_a_ring_is_the_last_points_of_a_list_without_end(puts: list[tuple[int, float]], passed: int) -> None:
    ring, step = Ring(), 0
    every: dict[int, float] = {}
    for ahead, value in puts:
        step += ahead
        ring.put(step, {"x": value})
        every[step] = value
    under_way = step + passed
    points = ring.hour(Now(under_way * STEP_MS + 7, 0)).series.get("x")
    expected = [every.get(each, math.nan) for each in range(under_way - POINTS, under_way)]
    if points is None:
        assert not puts
    else:
        assert list(points) == pytest.approx(expected, nan_ok=True)
