"""How the rules of a job bring its slots up, and when they give up: every race is a sequence of events."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.common.rules.restart import FixedDelay
from ftlayer.errors import FunctionLoadError, JobStartError, SessionLostError, SourceRowError
from ftlayer.runtime.driver.rules.events import (
    AskSession,
    Broke,
    CancelRequested,
    CancelSlot,
    CountTasks,
    JobState,
    Over,
    RecallDone,
    RecallStreams,
    SessionOver,
    SlotUp,
    SparkJobEnded,
    SubmitSlot,
    TaskCounts,
    TasksCounted,
)
from ftlayer.runtime.protocol.messages import Cancel, Deploy, ReplayNow, SlotFailed

Make = Any
UNLOADABLE = """Traceback (most recent call last):
  File "submit.py", line 126, in task
    mine = replace(pickle.loads(order), slot=slot)
ModuleNotFoundError: No module named 'helper'
"""


def test_a_start(make: Make) -> None:
    rig = make()
    assert rig.began == [RecallStreams(1), SubmitSlot(0, 1), SubmitSlot(1, 1)]
    assert rig.core.state is JobState.STARTING
    assert rig.hello("0a") == []
    assert rig.hello("1a") == []  # the vertex has not recalled yet
    decisions = rig.tell(RecallDone(1, 0))
    (_, deploy), (_, other) = decisions.sent(Deploy)
    assert deploy == other
    assert (deploy.epoch, deploy.run, [peer.instance for peer in deploy.peers]) == (1, "r/1", ["0a", "1a"])
    assert [it for it in decisions if isinstance(it, SlotUp)] == [SlotUp(0), SlotUp(1)]
    assert [instance for instance, _ in decisions.sent(ReplayNow)] == ["0a", "1a"]
    assert rig.core.state is JobState.INITIALIZING
    assert rig.started("1a") == []
    assert rig.core.state is JobState.INITIALIZING
    assert rig.started("0a") == []
    assert rig.core.state is JobState.RUNNING


def test_a_job_ends_at_once_when_its_session_is_gone(make: Make) -> None:
    rig = make(restart=FixedDelay(attempts=1 << 20, delay="10ms"))
    rig.up()
    rig.lose("0a")
    error = SessionLostError("the JVM is gone")
    decisions = rig.tell(SessionOver(error))
    # Spark jobs are not waited for: no one is left to tell of their end.
    assert decisions.over == Over(JobState.FAILED, error)
    assert not [it for it in decisions if isinstance(it, CancelSlot)]
    assert [instance for instance, _ in decisions.sent(Cancel)] == ["1a"]


def test_a_job_that_is_being_cancelled_does_not_wait_for_a_session_that_is_gone(make: Make) -> None:
    rig = make()
    rig.up()
    rig.tell(CancelRequested("enough"))
    assert AskSession() in rig.pass_ms(6_000)
    assert rig.tell(SessionOver(SessionLostError("gone"))).over.state is JobState.CANCELLED


def test_the_session_is_asked_for_while_a_slot_is_missing(make: Make) -> None:
    rig = make()
    rig.up()
    assert AskSession() not in rig.pass_ms(20_000, ("0a", "1a"))
    decisions = rig.lose("1a") + rig.pass_ms(9_000, ("0a",))
    assert decisions.count(AskSession()) == 2


def test_a_failure_says_once_what_spark_said(make: Make) -> None:
    rig = make(restart=FixedDelay(attempts=1 << 20, delay="10ms"))
    rig.up()
    rig.lose("1a")
    for attempt in range(1, 9):
        rig.tell(SparkJobEnded(1, attempt, f"refused {attempt}"))
        rig.pass_ms(50, ("0a",))
    assert rig.core.slots[1].failure == "slot 1 (process 1 on host): gone; Spark says: refused 8"


def test_slots_that_do_not_come_up(make: Make) -> None:
    rig = make()
    rig.hello("0a")
    assert rig.pass_ms(5_000, ("0a",)).count(CountTasks()) == 1
    decisions = rig.tell(TasksCounted(None))
    assert decisions.sent(Cancel)[0][0] == "0a"
    assert CancelSlot(1, 1) in decisions
    rig.tell(SparkJobEnded(0, 1, None))
    end = rig.tell(SparkJobEnded(1, 1, "cancelled")).over
    assert end.state is JobState.FAILED
    assert isinstance(end.error, JobStartError)
    assert "slot 1 of 2 was not up within 5000 ms" in str(end.error)


def test_what_spark_says_of_slots_that_do_not_come_up(make: Make) -> None:
    def error(counts: TaskCounts) -> str:
        rig = make(3)
        rig.hello("0a")
        rig.pass_ms(5_000, ("0a",))
        rig.tell(TasksCounted(counts))
        rig.tell(SparkJobEnded(0, 1, None))
        rig.tell(SparkJobEnded(1, 1, None))
        return str(rig.tell(SparkJobEnded(2, 1, None)).over.error)

    both = error(TaskCounts(4, 4, frozenset({0, 1})))
    assert "Spark has started the tasks of slot 1: their Python processes still start and import" in both
    assert "Spark has not started the tasks of slot 2: of 4 task slots 4 are busy and 0 free" in both
    assert "end the other Spark jobs" in both
    slow = error(TaskCounts(4, 3, frozenset({0, 1, 2})))
    assert "slots 1, 2" in slow
    assert "start_timeout_ms=…" in slow
    assert "other Spark jobs" not in slow
    assert "2 free, so it is about to" in error(TaskCounts(3, 1, frozenset({0})))
    assert "there is no executor yet" in error(TaskCounts(0, 0, frozenset()))


def test_slots_that_come_up_while_spark_is_asked_are_taken(make: Make) -> None:
    rig = make()
    rig.hello("0a")
    assert CountTasks() in rig.pass_ms(5_000, ("0a",))
    rig.up()
    assert rig.tell(TasksCounted(TaskCounts(4, 4, frozenset()))) == []
    assert rig.core.state is JobState.RUNNING


def test_waiting_for_what_spark_says_has_an_end(make: Make) -> None:
    rig = make(1)
    assert CountTasks() in rig.pass_ms(5_000)
    rig.pass_ms(5_000)
    assert rig.core.state is JobState.STOPPING


@pytest.mark.parametrize("error", ["ImportError: no module", None])
def test_a_slot_that_never_starts(error: str | None, make: Make) -> None:
    rig = make(1)
    rig.tell(SparkJobEnded(0, 1, error))
    assert SubmitSlot(0, 2) in rig.pass_ms(100)
    end = rig.tell(SparkJobEnded(0, 2, error)).over
    assert isinstance(end.error, JobStartError)
    assert (error or "before it had reached the driver") in str(end.error)


def test_what_kept_a_slot_from_its_hello_is_told(make: Make) -> None:
    rig = make(1)
    for attempt in (1, 2):
        rig.said("0x", SlotFailed("address in use", "", "trace"))
        decisions = rig.tell(SparkJobEnded(0, attempt, None))
        if attempt == 1:
            decisions = rig.pass_ms(100)
    assert "address in use" in str(decisions.over.error)


def test_what_another_attempt_would_not_mend_ends_a_job_that_has_never_worked(make: Make) -> None:
    rig = make(1)
    rig.up()
    rig.tell(SparkJobEnded(0, 1, None))
    end = rig.said("0a", SlotFailed("slot 1 cannot be reached", lasting=True)).over
    assert isinstance(end.error, JobStartError)
    assert "slot 1 cannot be reached" in str(end.error)


def test_a_row_that_does_not_fit_ends_the_job(make: Make) -> None:
    rig = make()
    rig.up()
    rig.said("1a", SlotFailed("source 'numbers' gave 'x'", "numbers", "trace", code=SourceRowError.code))
    rig.tell(SparkJobEnded(1, 1, None))
    end = rig.tell(SparkJobEnded(0, 1, None)).over
    assert end.state is JobState.FAILED
    assert isinstance(end.error, SourceRowError)
    assert str(end.error) == "source 'numbers' gave 'x'"
    assert rig.core.restarts == 0


def test_what_no_restart_mends_ends_the_job_before_a_slot_is_up_too(make: Make) -> None:
    rig = make(1)
    rig.said("0x", SlotFailed("No module named 'helper'", "", "trace", code=FunctionLoadError.code))
    end = rig.tell(SparkJobEnded(0, 1, None)).over
    assert isinstance(end.error, FunctionLoadError)


@pytest.mark.parametrize("began", [False, True])
def test_a_plan_that_cannot_be_loaded_ends_the_job_at_its_first_slot(began: bool, make: Make) -> None:
    """The slot has not come as far as to say so itself: Spark's text has the worker's traceback."""
    rig = make(1)
    if began:
        rig.up()
        rig.tell(Broke(0, "0a", "it was lost"))
    end = rig.tell(SparkJobEnded(0, 1, UNLOADABLE, "'map-1' (map(parse))")).over
    assert isinstance(end.error, FunctionLoadError)
    assert str(end.error).startswith("'map-1' (map(parse)): ModuleNotFoundError: No module named 'helper'")
