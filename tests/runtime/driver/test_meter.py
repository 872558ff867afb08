"""Counters over several instances, and their rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.runtime.driver.rules.job_status import WINDOW_MS, Meter
from ftlayer.vertex.calls import StreamStatus


def test_nothing_yet() -> None:
    meter = Meter()
    assert meter.totals == {}
    assert meter.rates(1_000) == {}


def test_what_a_lost_instance_counted_stays_in() -> None:
    meter = Meter()
    meter.update("a", {"records_in": 10}, 0)
    meter.update("a", {"records_in": 30}, 1_000)
    meter.update("b", {"records_in": 5}, 2_000)
    assert meter.totals == {"records_in": 35}


def test_rates_are_those_of_the_last_seconds() -> None:
    meter = Meter()
    for second in range(60):
        meter.update("a", {"records_in": 1_000 * min(second, 30)}, second * 1_000)
        if second == 25:
            assert meter.rates(25_000)["records_in"] == pytest.approx(1_000)
    assert meter.rates(60_000)["records_in"] == 0


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 100), st.integers(0, 3 * WINDOW_MS)), max_size=60
    )
)
def test_totals_are_the_sum_of_all_growth(steps: list[tuple[str, int, int]]) -> None:
    meter, sums, now = Meter(), dict.fromkeys("abc", 0), 0
    for instance, growth, passed in steps:
        now += passed
        sums[instance] += growth
        meter.update(instance, {"n": sums[instance]}, now)
        assert meter.totals["n"] == sum(sums.values())
        assert 0 <= meter.rates(now + 1)["n"] <= sum(sums.values()) * 1_000


@given(st.integers(0, 1_000), st.lists(st.tuples(st.booleans(), st.integers(0, 100))))
def test_what_is_done_is_counted_from_the_jobs_start_over_restarts_of_the_vertex(
    before: int, steps: list[tuple[bool, int]]
) -> None:
    """A vertex that was started again counts from 0. (What it had done and not told is not counted.)"""
    meter = Meter()
    in_vertex, done = before, 0
    meter.update_vertex(StreamStatus(0, 0, 0, 0, -1, in_vertex), 0)
    for restarted, more in steps:
        if restarted:
            in_vertex = 0
            meter.update_vertex(StreamStatus(0, 0, 0, 0, -1, 0), 0)
        in_vertex += more
        done += more
        meter.update_vertex(StreamStatus(0, 0, 0, 0, -1, in_vertex), 0)
    assert meter.totals["done"] == done


@given(
    st.tuples(*[st.integers(0, 50)] * 5),
    st.lists(
        st.tuples(st.sampled_from(["accept", "take", "fail", "done", "die", "report"]), st.integers(1, 20))
    ),
)
def test_what_came_in_is_what_the_vertex_has_and_has_seen_done_however_old_the_slots_reports_are(
    before: tuple[int, int, int, int, int], steps: list[tuple[str, int]]
) -> None:
    """Slots report once a second, and what a lost one had read since is in no report."""
    pending, due, waiting, dead, done = before
    meter = Meter()

    def update() -> None:
        meter.update_vertex(StreamStatus(pending, due, waiting, dead, -1, done), 0)

    update()
    read = 0
    for step, count in steps:
        moved = min(count, waiting if step == "take" else pending)
        match step:
            case "accept":
                pending, read = pending + count, read + count
            case "take":
                waiting, pending = waiting - moved, pending + moved
            case "fail":
                pending, waiting = pending - moved, waiting + moved
            case "done":
                pending, done = pending - moved, done + moved
            case "die":
                pending, dead = pending - moved, dead + moved
            case "report":
                meter.update("slot", {"records_in": read}, 0)
        update()
        assert meter.totals["records_in"] == read


def test_records_that_slots_have_read_and_the_vertex_has_not_accepted_are_in_too() -> None:
    meter = Meter()
    meter.update_vertex(StreamStatus(0, 0, 0, 3, -1, 0), 0)
    meter.update("slot", {"records_in": 10}, 0)
    meter.update_vertex(StreamStatus(2, 0, 0, 3, -1, 5), 0)
    assert meter.totals == {"records_in": 10, "done": 5}
    # Dead letters from before were purged.
    meter.update_vertex(StreamStatus(2, 0, 0, 0, -1, 8), 0)
    assert meter.totals == {"records_in": 10, "done": 8}


def test_what_waits_is_no_total() -> None:
    meter = Meter()
    meter.update("a", {"waiting/parse": 5, "retried/parse": 7, "paused/parse": 1}, 0)
    meter.update("b", {"waiting/parse": 3, "retried/parse": 1}, 1_000)
    assert meter.totals == {"retried/parse": 8}
