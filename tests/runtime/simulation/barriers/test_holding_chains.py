"""A service that is down for long: its chain holds its input, and checkpoints go on being complete all the same."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest

from ftlayer import FailurePolicy

DOWN_MS = 25_000
WORKS_FOR = 20
"""So many look-ups come before."""


@dataclass
class LookUp:
    """Passes records on, but while the service is down."""

    world: int

    def __call__(self, record: Any) -> Any:
        service = sys.modules["barrier_outside"].Outside.worlds[self.world].service
        service.asked += 1
        if service.asked > WORKS_FOR and service.down_at_ms is None:
            service.down_at_ms = service.world.mono
        if service.is_down:
            raise ConnectionError("the service is down")
        return record


@dataclass
class Service:
    """What look-ups ask."""

    world: Any = None
    asked: int = 0
    down_at_ms: int | None = None

    @property
    def is_down(self) -> bool:
        return self.down_at_ms is not None and self.world.mono < self.down_at_ms + DOWN_MS


@pytest.fixture
def held(runs: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`barrier_runs`, with a topology that looks records up."""
    topologies = sys.modules["barrier_topologies"]

    class Looking(topologies.Case):  # type: ignore[misc,name-defined]
        """`barrier_topologies.Case` whose records need the service. Notes which checkpoints are complete meanwhile."""

        @property
        def ordered(self) -> bool:
            return False

        def _read(self, env: Any, source: str, parallelism: int) -> Any:
            read = super()._read(env, source, parallelism).rebalance()
            return read.map(LookUp(self.outside.number), topologies.NUMBERED, uid="looking")

        def completed(self, checkpoint: Any, letters: int, key: bytes) -> None:
            self.during.append((self.outside.service.is_down, checkpoint))

    monkeypatch.setattr(runs, "Case", Looking)
    return runs


def run(held: Any, **config: Any) -> tuple[Any, list[Any]]:
    policy = FailurePolicy(max_attempts=5, backoff="500ms", jitter=0, max_failing="10/min")
    config = {"failures": policy, "interval": "1s", "timeout": "50s", **config}
    events = config.pop("events", ())
    run = held.Run(held.Plan("counting", 1, 2, events, config, count=150))
    service = run.outside.service = Service(run.world)
    during = run.case.during = []
    run.run()
    assert service.down_at_ms is not None
    assert not run.world.letters
    return run, [checkpoint for is_down, checkpoint in during if is_down]


@pytest.mark.parametrize("events", [(), ((800, "kill"), (1_600, "driver"))], ids=str)
def test_checkpoints_go_on_while_a_chain_holds_its_input(held: Any, events: Any) -> None:
    _, meanwhile = run(held, events=events)
    # One a second but for what it takes to see that the hold lasts.
    assert len(meanwhile) > 8
    late = meanwhile[len(meanwhile) // 2 :]
    assert all(checkpoint.unaligned for checkpoint in late)
    held_back = {each.target for checkpoint in late for part in checkpoint.subtasks for each in part.channels}
    assert "looking" in held_back


def test_where_barriers_may_overtake_nothing_the_job_waits_and_is_not_failed(held: Any) -> None:
    config = {"max_concurrent": 2, "timeout": "5s", "tolerable_failures": 0}
    done, meanwhile = run(held, **config)
    assert len(meanwhile) < 8
    assert done.world.driver.job.core.restarts == 0
