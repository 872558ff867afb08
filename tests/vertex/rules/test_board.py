"""The board by itself: announcements, orders, what is kept and for how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ftlayer.errors import ProtocolError, StaleOwnerError, UnknownJobError
from ftlayer.vertex.calls import (
    ORDER_EXPIRES_MS,
    AnnouncedJob,
    CheckpointDetails,
    Incident,
    JobDetails,
    JobKind,
    JobOrder,
    JobPlan,
    OrderAction,
    OrderAnswer,
    OrderState,
    PlanNode,
)
from ftlayer.vertex.rules import board as orders
from ftlayer.vertex.rules import board as rules
from ftlayer.vertex.store import MemoryStore

PLAN = JobPlan((PlanNode("parse", ("parse",), 2),), ())


class Store:
    """A `MemoryStore` that can be as full as a test says."""

    def __init__(self) -> None:
        self.inner = MemoryStore()
        self.share = 0.0

    @property
    def used_share(self) -> float:
        return self.share

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Shell:
    """The board of job ``orders``, over a store as full as a test says."""

    def __init__(self, new_board: Callable[..., Any]) -> None:
        self.store = Store()
        self._shell = new_board(self.store)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shell, name)

    def get(self, owner: str = "orders", since_ms: int = 0) -> AnnouncedJob:
        job: AnnouncedJob = self._shell.get(owner, since_ms)
        return job

    def state(self, order: str, owner: str = "orders") -> OrderState:
        return next(record.answer.state for record in self.get(owner).orders if record.order.id == order)

    def stored(self) -> list[bytes]:
        with self.store.read() as txn:
            return [bytes(key) for key, _ in txn.scan("board")]


@pytest.fixture
def shell(new_board: Callable[..., Any]) -> Shell:
    return Shell(new_board)


def job(run: str = "run-1", **changes: Any) -> JobDetails:
    details = JobDetails("orders", "orders", JobKind.TOPOLOGY, run, "acker", "running", False, 5, 6)
    return replace(details, **changes)


def order(id: str = "o-1", run: str = "run-1", **changes: Any) -> JobOrder:
    return replace(JobOrder(id, "orders", run, OrderAction.SAVEPOINT, "me", 7), **changes)


def answer(state: OrderState, id: str = "o-1", text: str = "") -> OrderAnswer:
    return OrderAnswer(id, state, text, 8)


def checkpoint(number: int, ended_ms: int = 0) -> CheckpointDetails:
    return CheckpointDetails(number, "checkpoint", "completed", False, 1, ended_ms, 1, 1)


def test_a_job_is_listed_as_it_was_announced_last(shell: Shell) -> None:
    shell.announce(job(plan=PLAN, rates={"in": 1.0}))
    shell.announce(job(rates={"in": 2.0}))
    shell.announce(job(owner="later", name="later", since_ms=9))
    shell.advance(1_500)
    listed = shell.board.jobs(shell.now).jobs
    assert [found.job.owner for found in listed] == ["later", "orders"]
    assert (listed[1].job.rates, listed[1].job.plan) == ({"in": 2.0}, None)
    assert (listed[1].heard_ago_ms, listed[1].is_silent) == (1_500, False)


def test_when_a_run_s_dead_letters_became_more_is_told(shell: Shell) -> None:
    def said() -> int:
        (listed,) = shell.board.jobs(shell.now).jobs
        assert listed.died_ago_ms == shell.get().died_ago_ms
        return listed.died_ago_ms

    shell.announce(job(counters={"dead/parse": 1, "waiting/parse": 9}))
    assert said() == -1
    shell.advance(10_000)
    shell.announce(job(counters={"dead/parse": 1, "dead/score": 2, "waiting/parse": 9}))
    shell.advance(1_500)
    shell.announce(job(counters={"dead/parse": 1, "dead/score": 2, "waiting/parse": 10}))
    assert said() == 1_500
    shell.announce(job("run-2", counters={"dead/parse": 7}))
    assert said() == -1


def test_the_plan_travels_once_and_is_asked_for_again_by_a_new_board(shell: Shell) -> None:
    assert shell.announce(job()).wants_plan
    assert not shell.announce(job(plan=PLAN)).wants_plan
    assert not shell.announce(job()).wants_plan
    assert shell.get().job.plan == PLAN
    shell.restart()
    assert shell.announce(job()).wants_plan


def test_a_job_that_nobody_announced_is_unknown(shell: Shell) -> None:
    with pytest.raises(UnknownJobError, match="'orders'"):
        shell.get()
    with pytest.raises(UnknownJobError, match="'orders'"):
        shell.ask(order())


def test_a_driver_that_is_not_heard_is_silent_unless_it_said_its_last_word(shell: Shell) -> None:
    shell.announce(job())
    shell.announce(job(owner="done", name="done", final=True, state="finished"))
    shell.advance(rules.SILENT_MS)
    assert shell.get().is_silent
    assert not shell.get("done").is_silent
    # A board that was away could not hear it.
    shell.restart()
    assert (shell.get().is_silent, shell.get().heard_ago_ms) == (False, rules.SILENT_MS)
    shell.advance(rules.SILENT_MS)
    assert shell.get().is_silent


def test_a_run_that_was_followed_has_no_say(shell: Shell) -> None:
    shell.announce(job("run-1"))
    shell.announce(job("run-2"))
    shell.restart()
    with pytest.raises(StaleOwnerError, match="as run run-2: this run, run-1"):
        shell.announce(job("run-1"))
    with pytest.raises(StaleOwnerError, match="as run run-3: this run, run-2"):
        shell.announce(job("run-2"), owner_run="run-3")
    assert shell.get().job.run == "run-2"


def test_a_word_that_comes_late_behind_a_run_s_last_one_changes_nothing(shell: Shell) -> None:
    """A call that its driver gave up may still arrive, behind the one that followed it."""
    shell.announce(job(rates={"in": 1.0}))
    shell.announce(job(final=True, state="finished", rates={"in": 2.0}))
    late = shell.announce(job(rates={"in": 1.5}))
    assert (late.orders, late.wants_plan) == ((), False)
    assert (shell.get().job.state, shell.get().job.final, shell.get().job.rates) == (
        "finished",
        True,
        {"in": 2.0},
    )
    shell.advance(rules.SILENT_MS)
    assert not shell.get().is_silent
    shell.announce(job("run-2"))
    assert shell.get().job.state == "running"


def test_incidents_of_all_runs_are_kept_once(shell: Shell) -> None:
    lost, started = Incident(10, "loss", "slot 1 is gone", 1), Incident(20, "state", "running")
    shell.announce(job(incidents=(lost,)))
    shell.announce(job(incidents=(lost, Incident(15, "restart", "again"))))
    shell.announce(job("run-2", incidents=(started,)))
    assert [incident.at_ms for incident in shell.get().incidents] == [10, 15, 20]
    shell.restart()
    assert [incident.at_ms for incident in shell.get().incidents] == [10, 15, 20]


def test_ended_checkpoints_are_kept_and_travel_once(shell: Shell) -> None:
    assert shell.announce(job()).known_checkpoint == 0
    assert shell.announce(job(checkpoints=(checkpoint(1, 100), checkpoint(2)))).known_checkpoint == 1
    # 3 has ended and 2 has not: 2 has to be told of later.
    assert shell.announce(job(checkpoints=(checkpoint(2), checkpoint(3, 120)))).known_checkpoint == 1
    assert [point.number for point in shell.get().job.checkpoints] == [1, 3, 2]
    assert shell.announce(job(checkpoints=(checkpoint(2, 130), checkpoint(3, 120)))).known_checkpoint == 3
    assert [point.number for point in shell.get().job.checkpoints] == [1, 3, 2]
    assert [point.number for point in shell.get(since_ms=120).job.checkpoints] == [3, 2]
    # A run counts from the beginning; what was there before stays.
    assert shell.announce(job("run-2")).known_checkpoint == 0
    assert shell.announce(job("run-2", checkpoints=(checkpoint(1, 200),))).known_checkpoint == 1
    shell.restart()
    assert [point.ended_ms for point in shell.get().job.checkpoints] == [100, 120, 130, 200]


def test_so_many_checkpoints_are_kept(shell: Shell) -> None:
    for number in range(1, 131):
        shell.announce(job(checkpoints=(checkpoint(number, number),)))
    kept = [point.number for point in shell.get().job.checkpoints]
    assert kept == list(range(31, 131))


def test_a_full_store_keeps_no_checkpoints_and_asks_for_them_again(shell: Shell) -> None:
    shell.announce(job())
    shell.store.share = 0.95
    assert shell.announce(job(checkpoints=(checkpoint(1, 100),))).known_checkpoint == 0
    shell.store.share = 0.5
    assert shell.announce(job(checkpoints=(checkpoint(1, 100),))).known_checkpoint == 1


def test_a_full_store_is_not_written_to_and_orders_reach_their_job_all_the_same(shell: Shell) -> None:
    shell.store.share = 0.96
    shell.announce(job(plan=PLAN, checkpoints=(checkpoint(1, 100),)))
    shell.ask(order())
    assert shell.announce(job(state="restarting")).orders == (order(),)
    assert shell.announce(job(), answer(OrderState.TAKEN)).orders == (order(),)
    assert shell.stored() == []
    shell.store.share = 0.5
    shell.advance(rules.WRITE_EVERY_MS)
    shell.announce(job(), answer(OrderState.DONE))
    assert shell.stored() == [b"job/orders\0"]
    shell.announce(job())
    shell.restart()
    assert shell.get().job.state == "running"


def test_a_job_is_written_when_its_state_changes_and_every_ten_seconds(shell: Shell) -> None:
    shell.announce(job(rates={"in": 1.0}))
    shell.advance(1_000)
    shell.announce(job(rates={"in": 2.0}))
    shell.restart()
    assert shell.get().job.rates == {"in": 1.0}
    shell.announce(job(rates={"in": 3.0}, state="restarting"))
    shell.restart()
    assert (shell.get().job.state, shell.get().job.rates) == ("restarting", {"in": 3.0})
    shell.advance(rules.WRITE_EVERY_MS)
    shell.announce(job(rates={"in": 4.0}, state="restarting"))
    shell.restart()
    assert shell.get().job.rates == {"in": 4.0}


# ---------------------------------------------------------------- orders


def test_an_order_goes_to_its_run_until_it_has_ended(shell: Shell) -> None:
    shell.announce(job())
    assert shell.ask(order()).answer.state is OrderState.WAITING
    assert shell.announce(job()).orders == (order(),)
    assert shell.announce(job()).orders == (order(),)
    assert shell.announce(job(), answer(OrderState.TAKEN)).orders == (order(),)
    assert shell.announce(job(), answer(OrderState.DONE, text="/savepoints/1")).orders == ()
    assert shell.ask(order()).answer == answer(OrderState.DONE, text="/savepoints/1")
    assert [record.answer.text for record in shell.get().orders] == ["/savepoints/1"]


def test_an_order_that_is_not_taken_expires_and_a_later_word_changes_nothing(shell: Shell) -> None:
    shell.announce(job())
    shell.ask(order())
    assert shell.announce(job()).orders == (order(),)
    shell.advance(ORDER_EXPIRES_MS - 1)
    assert shell.state("o-1") is OrderState.WAITING
    shell.advance(1)
    assert shell.state("o-1") is OrderState.EXPIRED
    assert shell.announce(job(), answer(OrderState.TAKEN)).orders == ()
    assert shell.state("o-1") is OrderState.EXPIRED


def test_an_order_waits_as_long_for_a_board_that_comes_back(shell: Shell) -> None:
    shell.announce(job())
    shell.ask(order())
    shell.away(3_600_000)
    assert shell.announce(job()).orders == (order(),)
    shell.advance(ORDER_EXPIRES_MS)
    assert shell.state("o-1") is OrderState.EXPIRED


def test_an_order_for_another_run_is_refused_and_stays_so(shell: Shell) -> None:
    shell.announce(job())
    refused = shell.ask(order(run="run-2")).answer
    assert (refused.state, refused.text) == (
        OrderState.REFUSED,
        "it is for run run-2, and run run-1 is what 'orders' is now",
    )
    assert shell.announce(job("run-2")).orders == ()
    assert shell.ask(order(run="run-2")).answer.state is OrderState.REFUSED


def test_a_new_run_ends_the_orders_of_the_one_before(shell: Shell) -> None:
    shell.announce(job())
    shell.ask(order("waits"))
    shell.ask(order("taken"))
    shell.announce(job(), answer(OrderState.TAKEN, "taken"))
    assert shell.announce(job("run-2")).orders == ()
    assert shell.state("waits") is OrderState.EXPIRED
    assert shell.state("taken") is OrderState.FAILED


def test_a_job_that_has_ended_takes_no_order_and_answers_what_it_had_taken(shell: Shell) -> None:
    shell.announce(job())
    shell.ask(order("stop"))
    shell.announce(job(), answer(OrderState.TAKEN, "stop"))
    shell.ask(order("late"))
    final = job(final=True, state="finished")
    assert [found.id for found in shell.announce(final).orders] == ["stop"]
    assert shell.state("late") is OrderState.EXPIRED
    with pytest.raises(UnknownJobError, match="has ended"):
        shell.ask(order("later"))
    assert shell.announce(final, answer(OrderState.DONE, "stop")).orders == ()
    assert shell.state("stop") is OrderState.DONE


def test_a_job_that_ended_without_a_word_of_an_order_leaves_it_unknown(shell: Shell) -> None:
    shell.announce(job())
    shell.ask(order())
    shell.announce(job(), answer(OrderState.TAKEN))
    shell.announce(job(final=True, state="finished"))
    shell.advance(ORDER_EXPIRES_MS)
    assert shell.state("o-1") is OrderState.FAILED
    assert "it may be carried out or not" in shell.get().orders[0].answer.text


def test_an_id_stands_for_one_order(shell: Shell) -> None:
    shell.announce(job())
    shell.ask(order())
    with pytest.raises(ProtocolError, match="'o-1' of 'orders' is another one"):
        shell.ask(order(action=OrderAction.CANCEL))


def test_a_job_takes_so_many_orders_and_forgets_old_ones(shell: Shell) -> None:
    shell.announce(job())
    for number in range(orders.MAX_ORDERS):
        shell.ask(order(f"o-{number}"))
        shell.announce(job(), answer(OrderState.REFUSED, f"o-{number}"))
    with pytest.raises(ProtocolError, match="100 orders within 10 minutes"):
        shell.ask(order("one more"))
    shell.advance(orders.KEEP_ORDERS_MS)
    assert shell.ask(order("one more")).answer.state is OrderState.WAITING
    assert b"order/orders\0o-0" not in shell.stored()
    assert len([key for key in shell.stored() if key.startswith(b"order/")]) == orders.MAX_ORDERS


# ---------------------------------------------------------------- jobs that are gone


def test_a_job_that_is_gone_is_still_known_whole(shell: Shell) -> None:
    shell.announce(job(plan=PLAN, checkpoints=tuple(checkpoint(number, number) for number in range(1, 31))))
    shell.announce(job(final=True, state="failed", rates={"in": 1.0}))
    shell.advance(rules.TRIM_EVERY_MS)
    kept = shell.get().job
    assert (kept.state, kept.plan, kept.rates) == ("failed", PLAN, {"in": 1.0})
    assert [point.number for point in kept.checkpoints] == list(range(11, 31))


def test_jobs_that_are_gone_are_forgotten_after_a_week_and_above_200(shell: Shell) -> None:
    shell.announce(job(owner="alive", name="alive"))
    for number in range(205):
        owner = f"gone-{number}"
        gone = job(owner=owner, name=owner, since_ms=number, checkpoints=(checkpoint(1, 1),))
        shell.announce(gone)
        shell.ask(order(owner=owner))
        shell.announce(replace(gone, final=True, state="finished"))
        shell.advance(10)
    shell.advance(rules.TRIM_EVERY_MS)
    shell.announce(job(owner="alive", name="alive"))
    names = {found.job.owner for found in shell.board.jobs(shell.now).jobs}
    assert names == {"alive", *(f"gone-{number}" for number in range(5, 205))}
    assert not [key for key in shell.stored() if b"/gone-4\0" in key]
    shell.restart()
    assert len(shell.board.jobs(shell.now).jobs) == 201
    shell.advance(rules.KEEP_GONE_MS)
    shell.announce(job(owner="alive", name="alive"))
    shell.advance(rules.TRIM_EVERY_MS)
    assert [found.job.owner for found in shell.board.jobs(shell.now).jobs] == ["alive"]
    assert shell.stored() == [b"job/alive\0"]
