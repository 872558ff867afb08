"""Orders between a real board and a run: carried out once by the run they name, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ftlayer.errors import UnknownJobError
from ftlayer.monitor.rules.orders import KEPT, Orders
from ftlayer.vertex.calls import JobDetails, JobKind, JobOrder, OrderAction, OrderState

ENDS = (OrderState.DONE, OrderState.FAILED, OrderState.REFUSED)


def order(number: int, run: str = "run-1") -> JobOrder:
    return JobOrder(f"o{number}", "j", run, OrderAction.SAVEPOINT, "me", 1)


def test_an_order_is_taken_first_and_carried_out_when_the_board_knows_that() -> None:
    orders = Orders("run-1")
    assert orders.heard([order(1)], (), 5) == ()
    (taken,) = orders.answers()
    assert (taken.id, taken.state, taken.at_ms) == ("o1", OrderState.TAKEN, 5)
    assert orders.heard([order(1)], (), 6) == ()  # the reply to what was said before
    assert orders.heard([order(1)], orders.answers(), 7) == (order(1),)
    assert orders.heard([order(1)], orders.answers(), 8) == ()
    orders.ended("o1", OrderState.DONE, "there", 9)
    (done,) = orders.answers()
    assert (done.state, done.text) == (OrderState.DONE, "there")
    assert orders.heard([], orders.answers(), 10) == ()
    assert orders.is_idle
    assert not orders.answers()


def ask(action: OrderAction, id: str, by: str) -> JobOrder:
    return JobOrder(id, "j", "run-1", action, by, 1)


def test_a_second_stop_is_told_of_the_first_one() -> None:
    orders = Orders("run-1")
    stops = [ask(OrderAction.STOP, "o1", "anna@console"), ask(OrderAction.STOP, "o2", "bert")]
    orders.heard(stops, (), 1_000)
    assert orders.heard(stops, orders.answers(), 2_000) == (stops[0],)
    answers = {answer.id: answer for answer in orders.answers()}
    assert answers["o1"].state is OrderState.TAKEN
    assert answers["o2"].state is OrderState.REFUSED
    assert "a stop is under way, asked for by anna@console" in answers["o2"].text
    later = [
        ask(OrderAction.SAVEPOINT, "o3", "me"),
        ask(OrderAction.DRAIN, "o4", "me"),
        ask(OrderAction.CANCEL, "o5", "me"),
    ]
    orders.heard([stops[0], *later], orders.answers(), 3_000)
    assert orders.heard([stops[0], *later], orders.answers(), 4_000) == (later[1], later[2])
    assert {answer.id: answer.state for answer in orders.answers()}["o3"] is OrderState.REFUSED
    orders.ended("o1", OrderState.FAILED, "disk full", 5_000)
    again = ask(OrderAction.STOP, "o6", "bert")
    orders.heard([again], orders.answers(), 6_000)
    assert orders.heard([again], orders.answers(), 7_000) == (), "it is being cancelled"


def test_what_has_expired_meanwhile_is_not_carried_out() -> None:
    orders = Orders("run-1")
    orders.heard([order(1)], (), 5)
    assert orders.heard([], orders.answers(), 6) == ()
    assert orders.is_idle


def test_an_order_for_another_run_is_left_alone() -> None:
    orders = Orders("run-2")
    for _ in range(3):
        assert orders.heard([order(1)], orders.answers(), 5) == ()
    assert not orders.answers()


def test_one_that_was_carried_out_is_answered_again_and_not_carried_out_again() -> None:
    orders = Orders("run-1")
    orders.heard([order(1)], (), 1)
    orders.heard([order(1)], orders.answers(), 2)
    orders.ended("o1", OrderState.FAILED, "disk full", 3)
    orders.heard([], orders.answers(), 4)
    assert orders.heard([order(1)], (), 5) == ()
    (again,) = orders.answers()
    assert (again.state, again.text, again.at_ms) == (OrderState.FAILED, "disk full", 3)
    assert orders.heard([order(1)], orders.answers(), 6) == ()


def test_the_memory_of_orders_has_an_end() -> None:
    orders = Orders("run-1")
    for number in range(KEPT + 10):
        orders.heard([order(number)], (), 1)
        assert orders.heard([order(number)], orders.answers(), 1)
        orders.ended(f"o{number}", OrderState.DONE, "", 1)
    orders.heard([order(0), order(KEPT)], orders.answers(), 2)
    assert {answer.id: answer.state for answer in orders.answers()} == {
        "o0": OrderState.TAKEN,
        f"o{KEPT}": OrderState.DONE,
    }


class OrdersMachine(RuleBasedStateMachine):
    """A run and its board, where replies and announcements get lost and both sides start again."""

    def __init__(self, new_board: Callable[..., Any]) -> None:
        super().__init__()
        self.shell = new_board()
        self.runs = 1
        self.orders = Orders("run-1")
        self.final = False
        self.asked: dict[str, JobOrder] = {}
        self.began: dict[str, str] = {}
        self.under_way: list[str] = []

    @property
    def run_name(self) -> str:
        return f"run-{self.runs}"

    @rule(arrives=st.booleans(), answered=st.booleans())
    def announces(self, arrives: bool, answered: bool) -> None:
        if not arrives:
            return
        told = self.orders.answers()
        details = JobDetails(
            "j",
            "j",
            JobKind.TOPOLOGY,
            self.run_name,
            "acker",
            "running",
            self.final,
            1,
            self.shell.now.wall_ms,
        )
        reply = self.shell.announce(details, *told)
        if answered:
            for each in self.orders.heard(reply.orders, told, self.shell.now.wall_ms):
                assert each.id not in self.began, "it is carried out twice"
                self.began[each.id] = self.run_name
                self.under_way.append(each.id)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), state=st.sampled_from(ENDS))
    def one_ends(self, data: Any, state: OrderState) -> None:
        id = data.draw(st.sampled_from(self.under_way))
        self.under_way.remove(id)
        self.orders.ended(id, state, "", self.shell.now.wall_ms)

    @rule()
    def driver_restarts(self) -> None:
        self.runs += 1
        self.orders, self.final, self.under_way = Orders(self.run_name), False, []

    @rule()
    def job_ends(self) -> None:
        self.final = True

    @rule()
    def vertex_restarts(self) -> None:
        self.shell.restart()

    @rule(ms=st.sampled_from([10, 1_000, 60_000]))
    def time_passes(self, ms: int) -> None:
        self.shell.advance(ms)

    @rule(again=st.booleans(), data=st.data())
    def asks(self, again: bool, data: Any) -> None:
        if again and self.asked:
            wanted = self.asked[data.draw(st.sampled_from(sorted(self.asked)))]
        else:
            wanted = order(len(self.asked), self.run_name)
        try:
            self.shell.ask(wanted)
        except UnknownJobError:
            return
        self.asked[wanted.id] = wanted

    @invariant()
    def what_began_is_of_its_run_and_never_called_expired(self) -> None:
        if not self.asked:
            return
        for record in self.shell.get("j").orders:
            if record.order.id in self.began:
                assert self.began[record.order.id] == record.order.run
                assert record.answer.state not in (OrderState.WAITING, OrderState.EXPIRED)

    def teardown(self) -> None:
        """With announcements that arrive, every order of the run comes to its end on the board."""
        for _ in range(3):
            self.announces(arrives=True, answered=True)
        for id in self.under_way:
            self.orders.ended(id, OrderState.DONE, "", self.shell.now.wall_ms)
        self.announces(arrives=True, answered=True)
        assert self.orders.is_idle


def test_a_run_and_its_board_in_any_order_of_events(new_board: Callable[..., Any]) -> None:
    run_state_machine_as_test(
        lambda: OrdersMachine(new_board),
        settings=settings(max_examples=100, stateful_step_count=30, deadline=None),
    )
