from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.runtime.protocol.elements import MAX_TIME_MS, MIN_TIME_MS, Idle, Watermark
from ftlayer.runtime.task.event_time import WatermarkGenerator, times_of
from ftlayer.topology.operators import AssignWatermarks

SCHEMA = pa.schema([("at", pa.int64())])


def generator(disorder: int = 0, idle: int | None = None) -> WatermarkGenerator:
    made = WatermarkGenerator(AssignWatermarks("w", "at", disorder, idle, SCHEMA))
    made.start(0)
    return made


def times(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
@pytest.mark.parametrize(("unit", "per_ms"), [("s", 0.001), ("ms", 1), ("us", 1_000), ("ns", 1_000_000)])
def test_timestamps_of_every_unit_are_rounded_down(unit, per_ms, zone):
    column = pa.array([0, None, 1, -1, 1_500_000_000], pa.int64()).cast(pa.timestamp(unit, zone))
    found, nulls = times_of(column)
    expected = [0, 1, -1, 1_500_000_000]
    assert [time for time, null in zip(found.tolist(), nulls, strict=True) if not null] == [
        value * 1_000 if unit == "s" else value // int(per_ms) for value in expected
    ]
    assert nulls.tolist() == [False, True, False, False, False]


def test_milliseconds_and_slices():
    found, nulls = times_of(pa.array([5, None, 7, 8], pa.int64())[2:])
    assert found.tolist() == [7, 8]
    assert nulls is None


@given(st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1)))
def test_what_python_says(moment):
    moment = moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    found, _ = times_of(pa.array([moment], pa.timestamp("us", "UTC")))
    assert found.tolist() == [since // timedelta(milliseconds=1)]


def test_the_watermark_follows_the_highest_time_and_is_said_once():
    made = generator(disorder=5)
    assert made.mark(0) is None
    made.observe(times(10, 30, 20), fresh=True, mono_ms=0)
    assert made.mark(0) == Watermark(25)
    assert made.mark(0) is None
    made.observe(times(29), fresh=True, mono_ms=0)
    assert made.mark(0) is None
    made.observe(times(31), fresh=True, mono_ms=0)
    assert made.mark(0) == Watermark(26)
    made.observe(times(MIN_TIME_MS), fresh=True, mono_ms=0)
    assert made.mark(0) is None


def test_a_subtask_without_records_becomes_idle_and_says_when_it_goes_on():
    made = generator(idle=100)
    assert made.due_ms == 100
    assert made.mark(99) is None
    assert made.mark(100) == Idle()
    assert made.mark(500) is None
    assert made.due_ms is None
    made.observe(times(7), fresh=True, mono_ms=500)
    assert made.mark(500) == Watermark(7)
    assert made.due_ms == 600
    made.mark(600)
    made.observe(times(3), fresh=True, mono_ms=700)
    assert made.mark(700) == Watermark(7)


def test_old_replays_do_not_end_idleness_and_new_ones_do():
    made = generator(idle=100)
    made.observe(times(50), fresh=True, mono_ms=0)
    made.mark(0)
    assert made.mark(100) == Idle()
    made.observe(times(40), fresh=False, mono_ms=110)
    assert made.mark(110) is None
    made.observe(times(60), fresh=False, mono_ms=120)
    assert made.mark(120) == Watermark(60)


def test_the_end_is_said_even_when_idle():
    made = generator(idle=10)
    assert made.mark(10) == Idle()
    made.end()
    assert made.mark(11) == Watermark(MAX_TIME_MS)
    assert made.due_ms is None
    made.observe(times(5), fresh=False, mono_ms=20)
    assert made.mark(100) is None
