"""Barrier mode under SIGKILL and SIGSTOP at random moments: slots, the driver, and processes that come back late."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ftlayer import CheckpointConfig, FailurePolicy, FixedDelay, StreamEnvironment, TopologyOptions

pytestmark = pytest.mark.spark

START_S = 600.0
"""A driver that has nothing to show by then has failed."""


@pytest.fixture(scope="module")
def kit(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("barrier_job")


@pytest.fixture
def start(spark: Any, kit: ModuleType, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start the job; ``start(count, options, **config)``."""
    jobs = []

    def begin(count: int, options: TopologyOptions | None = None, **config: Any) -> Any:
        config = {"interval": "150ms", "directory": str(tmp_path / "checkpoints"), **config}
        env = StreamEnvironment(
            spark,
            name="killed",
            parallelism=2,
            options=options,
            restart=FixedDelay(attempts=1_000, delay="10ms"),
            checkpointing=CheckpointConfig(**config),
        )
        functions = {"function": kit.stumble, "process": kit.Tallying()} if "failures" in config else {}
        kit.build(env, tmp_path, count=count, pace_s=0.08, **functions)
        jobs.append(env.execute_async())
        return jobs[-1]

    yield begin
    for job in jobs:
        assert job.cancel(), job.status()


def until(job: Any, holds: Callable[[], Any]) -> Any:
    """Wait for a condition, or for the job's end (then None)."""
    while not (found := holds()):
        if job.over(0.02):
            job.wait()
            return None
    return found


@pytest.mark.faults
def test_a_slot_that_stood_still_and_comes_back_changes_nothing(
    start: Callable[..., Any], kit: ModuleType, tmp_path: Path
) -> None:
    options = TopologyOptions(heartbeat_ms=100, heartbeat_timeout_ms=1_000)
    job = start(8_000, options, memory_threshold=0, incremental=True)
    assert until(job, lambda: job.status().checkpoints.completed >= 2)
    assert until(job, lambda: job.status().slots[0].pid)
    victim = job.status().slots[0]
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        assert until(job, lambda: job.status().slots[0].pid not in (0, victim.pid))
        done = job.status().checkpoints.completed
        assert until(job, lambda: job.status().checkpoints.completed > done + 1)
    finally:
        # It has files open, rows staged and peers that it believes in. (Spark may have ended it meanwhile.)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGCONT)
    assert job.wait(600)
    kit.Ledger(tmp_path, count=8_000).check()
    left = {path.name for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}
    left = {name for name in left if "_last" not in name}
    assert left == {"_key", "_result", str(1)}, "the key, the result, and who owned it"


def _kill_at_random(job: Any, draw: random.Random, kills: int, longest_s: float) -> int:
    """Kill slots, sometimes two at a time, sometimes while they come back; return how many kills there were."""
    done = 0
    while done < kills:
        end = time.monotonic() + draw.uniform(0, longest_s)
        until(job, lambda end=end: time.monotonic() >= end)  # type: ignore[misc]
        slots = until(job, lambda: [slot for slot in job.status().slots if slot.pid])
        if slots is None:
            break
        for victim in draw.sample(slots, draw.randint(1, len(slots))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)
                done += 1
    return done


FAILURES = FailurePolicy(max_attempts=2, backoff="50ms")


@pytest.mark.faults
def test_records_fail_while_slots_are_killed(
    start: Callable[..., Any], kit: ModuleType, tmp_path: Path
) -> None:
    job = start(
        5_000, failures=FAILURES, backend="lmdb", incremental=True, retention="retain-on-cancellation"
    )
    assert until(job, lambda: job.status().checkpoints.completed >= 2)
    assert _kill_at_random(job, random.Random(5), 2, 0.5)
    assert job.wait(600)
    ledger = kit.Ledger(tmp_path, count=5_000)
    ledger.check_dead(tmp_path / "checkpoints")
    ledger.check(in_order=False)


@pytest.mark.campaign
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("seed", range(4))
def test_records_fail_while_slots_are_killed_20_times(
    start: Callable[..., Any], kit: ModuleType, tmp_path: Path, seed: int
) -> None:
    config = [{}, {"unaligned": True}, {"changelog": True, "backend": "lmdb"}, {"max_concurrent": 3}][seed]
    job = start(60_000, failures=FAILURES, **config)
    _kill_at_random(job, random.Random(seed), 20, 2.0)
    assert job.wait(600)
    ledger = kit.Ledger(tmp_path, count=60_000)
    ledger.check_dead(tmp_path / "checkpoints")
    ledger.check(in_order=False)


@pytest.mark.campaign
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("seed", range(6))
def test_slots_are_killed_20_times(
    start: Callable[..., Any], kit: ModuleType, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    config = [
        {},
        {"unaligned": True},
        {"backend": "lmdb", "incremental": True},
        {"unaligned": True, "aligned_timeout": "20ms", "backend": "lmdb"},
        {"changelog": True, "backend": "lmdb"},
        {"max_concurrent": 3, "interval": "40ms", "incremental": True},
    ][seed]
    job = start(60_000, **config)
    _kill_at_random(job, draw, 20, 2.0)
    assert job.wait(600)
    kit.Ledger(tmp_path, count=60_000).check()


class Driver:
    """The lives of a driver."""

    def __init__(self, kit: ModuleType, directory: Path, count: int, *more: str) -> None:
        self.directory, self.count, self.more = directory, count, more
        self.ledger = kit.Ledger(directory, count=count)

    def life(self, kill_after_s: float | None) -> int:
        """Run a life to its end, or kill it some seconds after it has made something visible."""
        script = Path(__file__).with_name("barrier_driver.py")
        before = len(self.ledger.rows())
        with (self.directory / "driver.txt").open("ab") as log:
            pace = "0.1" if kill_after_s is not None else "0"
            command = [sys.executable, str(script), str(self.directory), str(self.count), pace, *self.more]
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            if kill_after_s is None:
                return process.wait(START_S)
            deadline = time.monotonic() + START_S
            while len(self.ledger.rows()) <= before:
                assert time.monotonic() < deadline, self.log()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(0.05)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(kill_after_s)
            process.kill()
            return process.wait()
        finally:
            process.kill()
            process.wait()

    def log(self) -> str:
        return (self.directory / "driver.txt").read_text("utf-8", "replace")[-4_000:]


@pytest.mark.campaign
def test_a_killed_driver_goes_on_from_its_latest_checkpoint(kit: ModuleType, tmp_path: Path) -> None:
    driver = Driver(kit, tmp_path, 6_000)
    assert driver.life(0.4) == -signal.SIGKILL, driver.log()
    assert driver.life(None) == 0, driver.log()
    driver.ledger.check()


@pytest.mark.campaign
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("seed", range(2))
def test_a_driver_is_killed_20_times(kit: ModuleType, tmp_path: Path, seed: int) -> None:
    driver = Driver(kit, tmp_path, 100_000)
    draw = random.Random(seed)
    for _ in range(20):
        assert driver.life(draw.uniform(0, 1.5)) == -signal.SIGKILL, driver.log()
    assert driver.life(None) == 0, driver.log()
    driver.ledger.check()


@pytest.mark.campaign
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("seed", range(2))
def test_records_fail_while_the_driver_is_killed_10_times(kit: ModuleType, tmp_path: Path, seed: int) -> None:
    driver = Driver(kit, tmp_path, 40_000, "fails")
    draw = random.Random(seed)
    for _ in range(10):
        assert driver.life(draw.uniform(0, 1.5)) == -signal.SIGKILL, driver.log()
    assert driver.life(None) == 0, driver.log()
    driver.ledger.check_dead(tmp_path / "checkpoints")
    driver.ledger.check(in_order=False)
