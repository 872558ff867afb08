"""Announcing: every second, to its last word, whatever a board, a job's status or an order does."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import pytest

from ftlayer.errors import ConfigError, StaleOwnerError, VertexUnavailableError
from ftlayer.monitor.announcer import JobAnnouncer
from ftlayer.vertex.calls import OrderAction, OrderState

WAIT_S = 600
FINAL = (OrderState.DONE, OrderState.FAILED, OrderState.REFUSED)


def always(_: Any) -> bool:
    return True


def test_a_job_is_announced_again_and_again_and_its_last_word_once_more(
    board: Any, announcer: JobAnnouncer, telling: Any
) -> None:
    announcer.add(telling)
    for _ in range(3):
        assert not board.until(always).job.final
    telling.final = True
    assert board.until(lambda call: call.job.final).job.state == "ended"
    other = type(telling)("other", "run-9")
    announcer.add(other)
    board.until(lambda call: call.job.owner == "other")
    before = len(board.announcements)
    for _ in range(3):
        board.until(always)
    assert {call.job.owner for call in board.announcements[before:]} == {"other"}


@pytest.mark.parametrize(
    ("act", "state", "text"),
    [
        (lambda order: f"did {order.action}", OrderState.DONE, "did savepoint"),
        (lambda order: int("x"), OrderState.FAILED, "ValueError: invalid literal"),
        (lambda order: _refuse(), OrderState.REFUSED, "no directory"),
    ],
)
def test_an_order_is_carried_out_and_answered(
    board: Any,
    announcer: JobAnnouncer,
    telling: Any,
    act: Any,
    state: OrderState,
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "ftlayer.monitor")
    telling.act = act
    announcer.add(telling)
    board.until(always)
    assert board.ask("o1").answer.state is OrderState.WAITING
    board.until(lambda call: any(answer.state is state for answer in call.answers))
    board.until(lambda call: not call.answers)
    (record,) = board.job().orders
    assert record.answer.state is state
    assert text in record.answer.text
    assert telling.carried_out == ["o1"]
    (asked,) = [line for line in caplog.messages if "is asked by" in line]
    assert asked.startswith(f"job {telling.owner!r} is asked by ")


def _refuse() -> str:
    raise ConfigError("savepoint: no directory is given")


def test_an_order_that_takes_long_holds_up_neither_announcing_nor_other_orders(
    board: Any, announcer: JobAnnouncer, telling: Any
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def act(order: Any) -> str:
        if order.id == "slow":
            begun.set()
            assert go_on.wait(WAIT_S)
        return order.id

    telling.act = act
    announcer.add(telling)
    board.until(always)
    board.ask("slow")
    assert begun.wait(WAIT_S)
    board.ask("quick", OrderAction.CANCEL)
    board.until(lambda call: {("quick", "done")} <= {(each.id, each.state) for each in call.answers})
    assert board.state("slow") is OrderState.TAKEN
    go_on.set()
    board.until(lambda call: {("slow", "done")} <= {(each.id, each.state) for each in call.answers})


def test_a_final_job_is_announced_until_its_order_has_been_answered(
    board: Any, announcer: JobAnnouncer, telling: Any
) -> None:
    go_on = threading.Event()

    def act(order: Any) -> str:
        telling.final = True
        assert go_on.wait(WAIT_S)
        return "/savepoint-1"

    telling.act = act
    announcer.add(telling)
    board.until(always)
    board.ask("o1", OrderAction.STOP)
    for _ in range(3):
        board.until(lambda call: call.job.final)
    go_on.set()
    board.until(lambda call: call.answers and call.answers[0].text == "/savepoint-1")
    announcer.close()
    assert board.state("o1") is OrderState.DONE


def test_who_asked_can_hear_the_answer_of_a_job_that_is_over_before_the_program_ends(
    board: Any, telling: Any
) -> None:
    def act(order: Any) -> str:
        telling.final = True
        return "it is stopped"

    telling.act = act
    announcer = JobAnnouncer(board, every_s=0.01, end_s=0.5)
    announcer.add(telling)
    board.until(always)
    asked_s = time.monotonic()
    board.ask("o1", OrderAction.STOP)
    board.until(lambda call: call.answers and call.answers[0].text == "it is stopped")
    # The next round takes note that the first job is over.
    announcer.add(type(telling)("other", "run-2"))
    for _ in range(2):
        board.until(lambda call: call.job.owner == "other")
    announcer.close()
    assert time.monotonic() - asked_s >= 0.5
    assert board.announcements[-1].job.owner == "other"


@pytest.mark.parametrize("fault", [VertexUnavailableError("no answer"), RuntimeError("a fault")])
def test_an_announcement_that_fails_is_counted_and_shown_in_the_next(
    board: Any, announcer: JobAnnouncer, telling: Any, fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    board.fault = fault
    announcer.add(telling)
    for _ in range(3):
        board.until(always)
    board.fault = None
    counted = board.until(lambda call: call.job.counters.get("announcements_failed", 0) >= 2).job.counters
    assert set(counted) == {"announcements_failed"}
    board.until(always)
    assert board.job().job.counters["announcements_failed"] >= 2
    assert len([line for line in caplog.records if "cannot be announced now" in line.getMessage()]) == 1


def test_a_status_that_fails_leaves_other_jobs_announced(
    board: Any, announcer: JobAnnouncer, telling: Any
) -> None:
    broken = type(telling)("broken", "run-2", fault=RuntimeError("no status"))
    announcer.add(broken)
    announcer.add(telling)
    for _ in range(2):
        board.until(lambda call: call.job.owner == "j")
    broken.fault = None
    assert board.until(lambda call: call.job.owner == "broken").job.counters["announcements_failed"] >= 1


def test_a_run_that_another_has_followed_is_not_announced_any_more(
    board: Any, announcer: JobAnnouncer, telling: Any
) -> None:
    board.fault = StaleOwnerError("run-2 has it")
    announcer.add(telling)
    board.until(always)
    board.fault = None
    other = type(telling)("other", "run-9")
    announcer.add(other)
    for _ in range(3):
        board.until(lambda call: call.job.owner == "other")
    assert [call.job.owner for call in board.announcements].count("j") == 1


def test_a_board_that_hangs_holds_up_neither_adding_nor_the_end(board: Any, telling: Any) -> None:
    announcer = JobAnnouncer(board, every_s=0.01, end_s=0.01)
    board.hangs = threading.Event()
    announcer.add(telling)
    board.until(always)
    announcer.add(type(telling)("other", "run-2"))
    board.hangs.set()
    board.until(lambda call: call.job.owner == "other")
    announcer.close()


def test_close_says_the_last_word_and_nothing_is_announced_behind_it(
    board: Any, announcer: JobAnnouncer, telling: Any
) -> None:
    announcer.add(telling)
    board.until(always)
    telling.final = True
    announcer.close()
    announcer.close()
    assert board.job().job.final
    before = len(board.announcements)
    announcer.add(type(telling)("late", "run-2"))
    assert len(board.announcements) == before


def test_a_forked_process_announces_nothing(board: Any, announcer: JobAnnouncer, telling: Any) -> None:
    announcer.add(telling)
    board.until(always)
    child = os.fork()
    if child == 0:
        # No thread of the announcer is here: a close that waited for one, or announced, would not return 0.
        before = len(board.announcements)
        announcer.add(type(telling)("child", "run-2"))
        announcer.close()
        os._exit(0 if len(board.announcements) == before else 1)
    assert os.waitpid(child, 0)[1] == 0
    board.until(always)
