"""A job to be announced, and boards that fail as boards do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from ftlayer.monitor.announcer import JobAnnouncer
from ftlayer.monitor.local_board import LocalBoard
from ftlayer.vertex.calls import (
    AnnouncedJob,
    AnnounceJob,
    AskJob,
    Call,
    GetJob,
    JobDetails,
    JobKind,
    JobOrder,
    OrderAction,
    OrderRecord,
    OrderState,
    Reply,
)

WAIT_S = 600


@dataclass
class FakeTelling:
    """`Telling` of a job that a test ends; it does what `act` does."""

    owner: str = "j"
    run: str = "run-1"
    final: bool = False
    act: Callable[[JobOrder], str] = lambda order: f"did {order.action}"
    fault: Exception | None = None
    carried_out: list[str] = field(default_factory=list)

    def details(self, known_checkpoint: int, *, with_plan: bool) -> JobDetails:
        if self.fault is not None:
            raise self.fault
        state = "ended" if self.final else "running"
        return JobDetails(
            self.owner, self.owner, JobKind.TOPOLOGY, self.run, "acker", state, self.final, 1, 2
        )

    def carry_out(self, order: JobOrder) -> str:
        self.carried_out.append(order.id)
        return self.act(order)


class Watched:
    """A board behind which a test sees each announcement; ``fault`` is raised instead of an answer."""

    def __init__(self) -> None:
        self.board = LocalBoard()
        self.fault: Exception | None = None
        self.hangs: threading.Event | None = None
        self._heard = threading.Condition()
        self.announcements: list[AnnounceJob] = []

    def call(self, call: Call, *, deadline_ms: int = 0) -> Reply:
        assert isinstance(call, AnnounceJob)
        hangs, fault = self.hangs, self.fault
        with self._heard:
            self.announcements.append(call)
            self._heard.notify_all()
        if hangs is not None:
            assert hangs.wait(WAIT_S)
        if fault is not None:
            raise fault
        return self.board.call(call)

    def until(self, condition: Callable[[AnnounceJob], Any]) -> AnnounceJob:
        """Wait for an announcement, from now on, with which ``condition`` holds."""
        with self._heard:
            seen = len(self.announcements)
            while True:
                for call in self.announcements[seen:]:
                    if condition(call):
                        return call
                seen = len(self.announcements)
                assert self._heard.wait(WAIT_S)

    def job(self, owner: str = "j") -> AnnouncedJob:
        reply = self.board.call(GetJob(owner))
        assert isinstance(reply, AnnouncedJob)
        return reply

    def ask(self, id: str, action: OrderAction = OrderAction.SAVEPOINT, run: str = "run-1") -> OrderRecord:
        reply = self.board.call(AskJob(JobOrder(id, "j", run, action, "me", 1)))
        assert isinstance(reply, OrderRecord)
        return reply

    def state(self, id: str) -> OrderState | None:
        """Return where an order is."""
        for record in self.job().orders:
            if record.order.id == id:
                return record.answer.state
        return None


@pytest.fixture
def board() -> Watched:
    return Watched()


@pytest.fixture
def telling() -> FakeTelling:
    return FakeTelling()


@pytest.fixture
def announcer(board: Watched) -> Iterator[JobAnnouncer]:
    announcer = JobAnnouncer(board, every_s=0.01, end_s=0.01)
    yield announcer
    announcer.close()
