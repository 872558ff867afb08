"""The rules of a job with a manual clock, and short names for what happens to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ftlayer.common.rules.restart import ExponentialDelay, RestartStrategy
from ftlayer.config import TopologyOptions
from ftlayer.runtime.acker_mode.driver.rules.driver_half import AckerJob
from ftlayer.runtime.driver.rules.events import (
    Broke,
    Crew,
    Event,
    JobInstruction,
    Over,
    RecallDone,
    RecallStreams,
    Said,
    SendTo,
    Tick,
)
from ftlayer.runtime.driver.rules.job_core import JobCore
from ftlayer.runtime.driver.rules.job_rules import JobMode
from ftlayer.runtime.environment import UntrackedJob
from ftlayer.runtime.protocol.messages import Heartbeat, Hello, Probe, TasksStarted

OPTIONS = TopologyOptions(heartbeat_ms=100, heartbeat_timeout_ms=1_000, start_timeout_ms=5_000)
TIMEOUT_MS = 1_200


class Decisions(list[JobInstruction]):
    """Instructions, and what a test asks of them."""

    def sent(self, kind: type | None = None) -> list[tuple[str, Any]]:
        """Messages of this kind, each behind the instance that it goes to."""
        found = [(it.instance, it.message) for it in self if isinstance(it, SendTo)]
        return [one for one in found if kind is None or isinstance(one[1], kind)]

    @property
    def over(self) -> Over:
        (found,) = [it for it in self if isinstance(it, Over)]
        return found

    @property
    def recalls(self) -> list[int]:
        return [it.number for it in self if isinstance(it, RecallStreams)]


class Rig:
    """A core with a clock, and short names for what happens to it."""

    timeout_ms = TIMEOUT_MS

    def __init__(self, slots: int = 2, tracked: bool = True, restart: RestartStrategy | None = None) -> None:
        restart = ExponentialDelay("50ms", "1s", "1m") if restart is None else restart
        crew = Crew(slots, OPTIONS.start_timeout_ms)
        mode: JobMode = UntrackedJob(crew, run="r", restart=restart)
        if tracked:
            mode = AckerJob(crew, run="r", restart=restart, timeout_ms=TIMEOUT_MS)
        self.core = JobCore(crew, OPTIONS, mode)
        self.now = 0
        self.began = Decisions(self.core.start(0))
        self.recalls = self.began.recalls

    def tell(self, event: Event) -> Decisions:
        decisions = Decisions(self.core.handle(event, self.now))
        self.core.validate()
        self.recalls += decisions.recalls
        return decisions

    def recalled(self) -> Decisions:
        """The vertex answers all it was asked to recall."""
        decisions = Decisions()
        while self.recalls:
            decisions += self.tell(RecallDone(self.recalls.pop(0), 0))
        return decisions

    def said(self, instance: str, message: Any) -> Decisions:
        return self.tell(Said(int(instance[0]), instance, message))

    def hello(self, instance: str) -> Decisions:
        return self.said(instance, Hello(int(instance[0]), instance, f"grpc://{instance}", "host", 1))

    def up(self) -> Decisions:
        """Bring all slots up, as instances "0a", "1a", …"""
        self.recalled()
        decisions = Decisions()
        for slot in range(len(self.core.slots)):
            decisions += self.hello(f"{slot}a")
        for slot in range(len(self.core.slots)):
            decisions += self.started(f"{slot}a")
        return decisions

    def started(self, instance: str) -> Decisions:
        """An instance says that its tasks run."""
        return self.said(instance, TasksStarted())

    def pass_ms(self, ms: int, beats: tuple[str, ...] = ()) -> Decisions:
        decisions = Decisions()
        for _ in range(ms // 50):
            self.now += 50
            for instance in beats:
                decisions += self.said(instance, Heartbeat(0, 1, False))
            decisions += self.tell(Tick())
        return decisions

    def lose(self, instance: str) -> Decisions:
        return self.tell(Broke(int(instance[0]), instance, "gone"))

    def quiet_until_probed(self, instances: tuple[str, ...]) -> int:
        """All instances are quiet; returns the number of the probe that follows."""
        decisions = Decisions()
        for instance in instances:
            decisions += self.said(instance, Heartbeat(0, 5, True))
        return int(decisions.sent(Probe)[0][1].number)


@pytest.fixture
def make() -> Callable[..., Rig]:
    """Make a `Rig`."""
    return Rig
