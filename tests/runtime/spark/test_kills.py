"""Slots and the vertex killed with SIGKILL at random moments, while files grow: nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ftlayer import FixedDelay, FTLayer, JobState

pytestmark = pytest.mark.spark


class Run:
    """The topology over growing logs on a vertex of its own, under kills."""

    def __init__(
        self,
        kit: ModuleType,
        environment: Any,
        lines: list[str],
        directory: Path,
        seed: int,
        *,
        replay: str = "store",
        **options: Any,
    ) -> None:
        self.kit = kit
        self._draw = random.Random(seed)
        self.logs = kit.GrowingLogs(directory, lines)
        self.layer = FTLayer.embedded(
            directory / "store", max_attempts=kit.MAX_ATTEMPTS, backoff="20ms", jitter=0, **options
        )
        env = environment(self.layer, "killed", restart=FixedDelay(attempts=1_000, delay="10ms"))
        kit.build(env, directory, late=True, replay=replay)
        self.job = env.execute_async()
        self.ledger = kit.Ledger(directory, self.layer, "killed")
        self.grow()
        self.until(lambda: len(self.ledger.sink()) > 100)

    def grow(self) -> None:
        self.logs.grow(self._draw.randint(0, 40))

    def until(self, holds: Any) -> Any:
        return self.kit.until(self.job, holds, self.grow)

    def pause(self, seconds: float) -> None:
        end = time.monotonic() + self._draw.uniform(0, seconds)
        self.until(lambda: time.monotonic() >= end)

    def kill_slot(self) -> None:
        """Kill a slot that runs, or one that is just coming up."""
        slots = self.until(lambda: [s for s in self.job.status().slots if s.pid])
        victim = self._draw.choice(slots)
        os.kill(victim.pid, signal.SIGKILL)
        self.until(lambda: self.job.status().slots[victim.slot].pid not in (0, victim.pid))

    def kill_vertex(self) -> None:
        vertex = self.layer.vertex
        assert vertex is not None
        before = vertex.pid
        vertex.kill()
        self.until(lambda: vertex.pid not in (None, before))

    def finish(self) -> None:
        before = len(self.ledger.sink())
        self.until(lambda: len(self.ledger.sink()) > before)
        self.kit.until(self.job, self.ledger.all_there)
        status = self.job.status()
        assert self.job.drain(600), self.job.status()
        assert self.job.state is JobState.ENDED
        self.ledger.check(exact=False)
        assert status.vertex is not None
        self.layer.close()


@pytest.fixture
def start(environment: Any, logs_kit: ModuleType, real_lines: list[str], tmp_path: Path) -> Any:
    runs = []

    def start(seed: int, **options: Any) -> Run:
        runs.append(Run(logs_kit, environment, real_lines, tmp_path, seed, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.job.cancel()
        run.layer.close()


REPLAYS = ["store", "source"]


@pytest.mark.faults
@pytest.mark.parametrize("replay", REPLAYS)
def test_slots_are_killed(start: Any, replay: str) -> None:
    run = start(1, replay=replay)
    for _ in range(2):
        run.pause(0.5)
        run.kill_slot()
    run.finish()
    assert run.job.status().restarts >= 1


def paced(records: int) -> Any:
    for number in range(records):
        time.sleep(0.002)
        yield number


@pytest.mark.faults
def test_a_slot_that_stays_away_for_longer_than_the_timeout(
    environment: Any, connect: Any, logs_kit: ModuleType, tmp_path: Path
) -> None:
    """What it held waits for it, and has its one attempt still."""
    layer = connect(timeout="1500ms", max_attempts=1)
    before = layer.stats()
    env = environment(layer, restart=FixedDelay(attempts=3, delay="3s"))
    numbers = env.source(lambda: paced(3_000), "id bigint").key_by("id")
    numbers.map(lambda it: it, "id bigint").rebalance().sink(logs_kit.Journal(tmp_path))
    job = env.execute_async()
    out = logs_kit.Notes(tmp_path, "out")
    logs_kit.until(job, lambda: len(out.rows()) > 300)
    victim = next(slot for slot in job.status().slots if slot.pid)
    os.kill(victim.pid, signal.SIGKILL)
    assert job.wait(logs_kit.WAIT_S), job.status()
    assert job.status().restarts == 1
    assert {row[0] for row in out.rows()} == set(range(3_000))
    grown = {name: value - before[name] for name, value in layer.stats().items() if name in before}
    assert grown["recalled"] > 0
    assert grown["timed_out"] == grown["dead"] == 0


@pytest.mark.parametrize("replay", ["store", pytest.param("source", marks=pytest.mark.campaign)])
def test_the_vertex_is_killed(start: Any, replay: str) -> None:
    run = start(2, replay=replay, shards=2, timeout="10s")  # what was in flight comes again when that is over
    run.pause(0.5)
    run.kill_vertex()
    run.finish()
    assert run.job.status().restarts == 0


@pytest.mark.campaign
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("replay", REPLAYS)
def test_whatever_is_killed_20_times(start: Any, seed: int, replay: str) -> None:
    run = start(100 + seed, replay=replay, shards=1 + seed % 2)
    draw = random.Random(seed)
    for _ in range(20):
        run.pause(1.5)
        if draw.random() < 0.7:
            run.kill_slot()
        else:
            run.kill_vertex()
    run.finish()
