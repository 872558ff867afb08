"""What a job's driver says of its circuit breakers."""

from __future__ import annotations

from dataclasses import replace

from ftlayer.common.rules.circuit import CircuitState, CircuitStatus
from ftlayer.runtime.acker_mode.driver.rules.driver_half import ASK_MS, CircuitWatch
from ftlayer.runtime.driver.rules.events import JobState
from ftlayer.runtime.driver.rules.job_status import JobStatus
from ftlayer.vertex.calls import StreamStatus

OPEN = CircuitStatus(CircuitState.OPEN, 1, 1_000, 400, 900)


def test_the_vertex_is_asked_now_and_then_and_not_where_there_are_no_breakers() -> None:
    watch = CircuitWatch("shop", has_any=True)
    assert [watch.is_due(now) for now in (5, 6, 5 + ASK_MS, 6 + ASK_MS)] == [True, False, True, False]
    assert not CircuitWatch("shop", has_any=False).is_due(5)


def test_openings_and_closings_are_said_once() -> None:
    watch = CircuitWatch("shop", has_any=True)
    assert watch.told({"enrich": CircuitStatus()}) == []
    (line,) = watch.told({"enrich": OPEN})
    assert line.startswith("topology 'shop', 'enrich': 400 of 1,000 records failed, more than max_failing")
    assert watch.told({"enrich": OPEN}) == []
    half = replace(OPEN, state=CircuitState.HALF_OPEN, next_trial_in_ms=0)
    assert watch.told({"enrich": half}) == []
    assert len(watch.told({"enrich": replace(OPEN, opened=2)})) == 1
    (line,) = watch.told({"enrich": replace(half, opened=2, state=CircuitState.CLOSED)})
    assert line == "topology 'shop', 'enrich': the trial went well, it goes on"
    # Between two questions it may open and close.
    assert len(watch.told({"enrich": replace(OPEN, opened=3, state=CircuitState.CLOSED)})) == 2


def test_a_job_says_which_breakers_are_not_closed() -> None:
    vertex = StreamStatus(0, 0, 9, 0, 900, circuits={"": CircuitStatus(), "enrich": OPEN})
    status = JobStatus("shop", "shop-1", JobState.RUNNING, 1, 5.0, (), (), vertex=vertex)
    assert status.circuits["enrich"] is OPEN
    assert "circuit enrich open" in status.line()
    assert "of the topology" not in status.line()
