"""Announcements, orders, restarts of driver and vertex in any order: its run carries an order out once, or never."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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

from ftlayer.errors import StaleOwnerError, UnknownJobError
from ftlayer.vertex.calls import (
    Announced,
    JobDetails,
    JobKind,
    JobOrder,
    OrderAction,
    OrderAnswer,
    OrderState,
)

ENDED = {OrderState.DONE, OrderState.FAILED, OrderState.REFUSED, OrderState.EXPIRED}


@dataclass
class Driver:
    """A run that keeps to what `Announced` asks of it."""

    run: str
    answers: dict[str, OrderAnswer] = field(default_factory=dict)
    final: bool = False
    has_announced: bool = False

    def details(self) -> JobDetails:
        state = "finished" if self.final else "running"
        return JobDetails("j", "j", JobKind.TOPOLOGY, self.run, "acker", state, self.final, 1, 2)


class BoardMachine(RuleBasedStateMachine):
    def __init__(self, new_board: Callable[..., Any]) -> None:
        super().__init__()
        self.shell = new_board()
        self.driver = Driver("run-1")
        self.old: list[Driver] = []
        self.orders: dict[str, JobOrder] = {}
        self.carried_out: dict[str, str] = {}  # order → the run that did
        self.seen: dict[str, OrderState] = {}
        self._announce(self.driver)

    def _announce(self, driver: Driver) -> Announced:
        driver.has_announced = True
        reply: Announced = self.shell.announce(driver.details(), *driver.answers.values())
        return reply

    @rule(arrives=st.booleans())
    def announces(self, arrives: bool) -> None:
        """The driver announces; the reply may be lost, and then nothing of it counts."""
        sent = set(self.driver.answers)
        reply = self._announce(self.driver)
        assert all(order.run == self.driver.run for order in reply.orders)
        if not arrives:
            return
        listed = {order.id for order in reply.orders}
        for order in reply.orders:
            answer = self.driver.answers.get(order.id)
            if answer is None:
                self.driver.answers[order.id] = OrderAnswer(order.id, OrderState.TAKEN, "", 1)
            elif answer.state is OrderState.TAKEN and order.id in sent and order.id not in self.carried_out:
                self.carried_out[order.id] = self.driver.run
        for gone in sent - listed:
            del self.driver.answers[gone]

    @precondition(lambda self: self.driver.answers)
    @rule(data=st.data(), state=st.sampled_from([OrderState.DONE, OrderState.FAILED]))
    def carries_out(self, data: st.DataObject, state: OrderState) -> None:
        under_way = sorted(id for id in self.driver.answers if self.carried_out.get(id) == self.driver.run)
        if under_way:
            order = data.draw(st.sampled_from(under_way))
            self.driver.answers[order] = OrderAnswer(order, state, "", 2)

    @rule()
    def driver_restarts(self) -> None:
        self.old.append(self.driver)
        self.driver = Driver(f"run-{len(self.old) + 1}")

    @precondition(lambda self: len(self.orders) > 2)
    @rule()
    def driver_ends(self) -> None:
        self.driver.final = True

    @rule()
    def an_order_is_heard(self) -> None:
        """What every order that is carried out begins with."""
        id = f"o-{len(self.orders)}"
        order = JobOrder(id, "j", self.driver.run, OrderAction.SAVEPOINT, "me", self.shell.now.wall_ms)
        try:
            self._ask(order)
        except UnknownJobError:
            return
        self.announces(arrives=True)

    @precondition(lambda self: self.old and self.old[-1].has_announced)
    @rule()
    def an_old_driver_announces(self) -> None:
        """Before the new one has spoken it still counts."""
        driver = self.old[-1]
        try:
            self._announce(driver)
        except StaleOwnerError:
            return
        assert self.shell.get("j").job.run == driver.run

    @rule(ms=st.sampled_from([10, 30_000, 60_000]))
    def time_passes(self, ms: int) -> None:
        self.shell.advance(ms)

    @rule()
    def vertex_restarts(self) -> None:
        self.shell.restart()

    @rule(again=st.booleans(), to_former=st.booleans(), data=st.data())
    def asks(self, again: bool, to_former: bool, data: st.DataObject) -> None:
        if again and self.orders:
            order = self.orders[data.draw(st.sampled_from(sorted(self.orders)))]
        else:
            run = self.old[-1].run if to_former and self.old else self.driver.run
            order = JobOrder(
                f"o-{len(self.orders)}", "j", run, OrderAction.SAVEPOINT, "me", self.shell.now.wall_ms
            )
        try:
            self._ask(order)
        except UnknownJobError:
            assert order.id not in self.orders

    def _ask(self, order: JobOrder) -> None:
        assert self.shell.ask(order).order == order
        self.orders[order.id] = order

    @invariant()
    def an_order_is_carried_out_by_its_run_and_never_called_expired(self) -> None:
        if not self.orders:
            return
        for record in self.shell.get("j").orders:
            id, state = record.order.id, record.answer.state
            if id in self.carried_out:
                assert self.carried_out[id] == record.order.run
                assert state not in (OrderState.WAITING, OrderState.EXPIRED, OrderState.REFUSED)
            before = self.seen.get(id)
            assert before not in ENDED or before is state
            self.seen[id] = state


def test_orders_and_restarts_in_any_order(new_board: Callable[..., Any]) -> None:
    run_state_machine_as_test(
        lambda: BoardMachine(new_board),
        settings=settings(max_examples=100, stateful_step_count=30, deadline=None),
    )
