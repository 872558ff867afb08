"""What is announced of a job in barrier mode, and what orders do to it."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest

from ftlayer.errors import ConfigError, UnsupportedError
from ftlayer.runtime.driver.job import TopologyTelling
from ftlayer.runtime.protocol.messages import StackTaken, SubtaskDeclined
from ftlayer.vertex.calls import AnnounceJob, JobOrder, JobPlan, OrderAction, PlanNode


def order_to(action: OrderAction, directory: str = "") -> JobOrder:
    return JobOrder("o1", "played", "played-1", action, "me", 1, directory)


def test_a_job_is_told_with_its_graph_its_slots_and_its_checkpoints(play: ModuleType, tmp_path: Path) -> None:
    play.MAY_COMMIT.set()
    played = play.Played(tmp_path / "c")
    assert played.job.wait_until_running(play.WAIT_S)
    where = played.telling.carry_out(order_to(OrderAction.SAVEPOINT, str(tmp_path / "s")))
    assert Path(where, "_metadata").exists()

    def told() -> bool:
        return any(
            each.kind == "savepoint" for each in played.telling.details(0, with_plan=False).checkpoints
        )

    play.until(told)
    details = played.telling.details(0, with_plan=True)
    assert (details.owner, details.run, details.kind, details.mode) == (
        "played",
        "played-1",
        "topology",
        "barrier",
    )
    assert (details.state, details.final, details.ended_ms) == ("running", False, 0)
    assert details.plan == JobPlan((PlanNode("numbers", ("numbers", "out"), 1),), ())
    assert [(slot.slot, slot.state, slot.host) for slot in details.slots] == [(0, "running", "host")]
    (savepoint,) = [each for each in details.checkpoints if each.kind == "savepoint"]
    assert (savepoint.location, savepoint.state, savepoint.expected) == (where, "completed", 1)
    assert [(part.uid, part.subtask) for part in savepoint.subtasks] == [("numbers", 0)]
    totals = details.checkpoint_totals
    assert totals is not None
    assert totals.completed >= 1
    assert totals.last_completed_ms >= savepoint.ended_ms
    assert (totals.interval_ms, totals.directory) == (1, str(tmp_path / "c"))
    assert sum(details.histograms["checkpoint|"].counts) >= 1
    assert sum(details.histograms["checkpoint_async|numbers"].counts) >= 1
    assert "checkpoint_bytes" in details.counters
    later = played.telling.details(savepoint.number, with_plan=False)
    assert later.plan is None
    assert all(each.number > savepoint.number or not each.ended_ms for each in later.checkpoints)
    AnnounceJob(details).check()


def test_an_order_that_lacks_a_directory_names_the_option(play: ModuleType, tmp_path: Path) -> None:
    play.MAY_COMMIT.set()
    played = play.Played(tmp_path / "c")
    for action in (OrderAction.SAVEPOINT, OrderAction.STOP):
        with pytest.raises(ConfigError, match=r"no directory is given .*--directory"):
            played.telling.carry_out(order_to(action))


def test_an_order_to_stop_ends_the_job_with_a_savepoint_and_the_last_word_says_so(
    play: ModuleType, tmp_path: Path
) -> None:
    play.MAY_COMMIT.set()
    played = play.Played(tmp_path / "c")
    where = played.telling.carry_out(order_to(OrderAction.STOP, str(tmp_path / "s")))
    assert Path(where, "_metadata").exists()
    details = played.telling.details(0, with_plan=False)
    assert (details.state, details.final) == ("ended", True)
    assert details.ended_ms >= details.since_ms
    assert details.incidents[-1].text.endswith("→ ended")
    assert where in {each.location for each in details.checkpoints}
    with pytest.raises(UnsupportedError, match="is ended"):
        played.telling.carry_out(order_to(OrderAction.CANCEL))


def test_orders_that_end_a_job_say_what_has_become_of_it(play: ModuleType, tmp_path: Path) -> None:
    play.MAY_COMMIT.set()
    assert play.Played(tmp_path / "a").telling.carry_out(order_to(OrderAction.CANCEL)) == "it is cancelled"
    played = play.Played(tmp_path / "b", bounded=True)
    assert "is done" in played.telling.carry_out(order_to(OrderAction.DRAIN))


def test_a_failed_checkpoint_is_an_incident(play: ModuleType, tmp_path: Path) -> None:
    play.MAY_COMMIT.set()
    declined = SubtaskDeclined(1, "numbers", 0, "the disk is full")
    played = play.Played(tmp_path, declined=declined)
    assert played.job.over(play.WAIT_S)
    texts = [each.text for each in played.telling.details(0, with_plan=False).incidents]
    assert any("checkpoint 1 failed: " in text and "the disk is full" in text for text in texts)


def test_what_cannot_be_asked_of_a_job_without_checkpoints_is_refused_with_the_ways_out() -> None:
    execution = Mock()
    execution.wait_until_over.return_value = False
    execution.name = "tracked"
    telling = TopologyTelling(execution, Mock(), "acker")
    with pytest.raises(UnsupportedError, match=r"drain it.*or cancel it"):
        telling.carry_out(order_to(OrderAction.STOP))


def test_a_job_whose_thread_is_busy_is_told_all_the_same(play: ModuleType, tmp_path: Path) -> None:
    played = play.Played(tmp_path, starts=False)
    let_go = threading.Event()
    played.thread.later(lambda: let_go.wait(play.WAIT_S))
    details = played.telling.details(0, with_plan=False)
    assert details.checkpoints == ()
    assert details.state in ("starting", "initializing")
    let_go.set()
    play.MAY_COMMIT.set()


def test_a_stack_is_what_the_slot_answers(play: ModuleType, tmp_path: Path) -> None:
    play.MAY_COMMIT.set()
    played = play.Played(tmp_path)
    assert played.job.wait_until_running(play.WAIT_S)
    played.stack = "File numbers.py, line 7, in hangs"
    assert played.telling.carry_out(replace(order_to(OrderAction.STACK), slot=0)) == played.stack
    with pytest.raises(ConfigError, match="no process runs slot 5"):
        played.telling.carry_out(replace(order_to(OrderAction.STACK), slot=5))


def test_a_slot_that_gives_no_stack_is_said_to_hold_the_interpreter(play: ModuleType, tmp_path: Path) -> None:
    played = play.Played(tmp_path, starts=False)
    assert played.deployed.wait(play.WAIT_S)
    assert "has not answered within 0.01 s" in played.thread.stack(0, 0.01)
    played.say(StackTaken(1, "too late"))
    play.MAY_COMMIT.set()
    played.stack = "now it does"
    assert played.thread.stack(0) == "now it does"
