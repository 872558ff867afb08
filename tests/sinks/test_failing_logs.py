"""Records fail, slots and drivers are killed: both sinks, state and dead letters are those of a plain recount."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark import cloudpickle

pytestmark = pytest.mark.spark

START_S = 1_200.0
"""A driver that has nothing to show by then, or is not at its end, has failed."""


@pytest.fixture(scope="module")
def kit(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    module = load_module(Path(__file__).with_name("failing_logs.py"))
    cloudpickle.register_pickle_by_value(module)
    return module


class Lives:
    """The lives of a job's drivers."""

    def __init__(self, kit: ModuleType, server: Any, job: Any, lines: list[str]) -> None:
        self.kit, self.job = kit, job
        (Path(job.directory) / "lines.txt").write_text("\n".join(lines), "ascii")
        server.execute(f"CREATE TABLE {job.table} (word text, place bigint, number bigint, count bigint)")
        self.ledger = kit.Ledger(job, server.execute)

    def killed(self, after_s: float, **options: Any) -> None:
        """A life that is killed some seconds after it has made more rows visible, if there are any."""
        before = self.ledger.in_database()
        with self._driver(**options) as process:
            self._wait(process, lambda: self.ledger.in_database() > before or self.ledger.is_all_there())
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(after_s)
            process.kill()
            assert process.wait() == -signal.SIGKILL, self.log()

    def last(self, **options: Any) -> None:
        """A life that comes to the job's end."""
        with self._driver(**options) as process:
            self._wait(process, self.ledger.is_all_there)
            self.job.gate.touch()
            assert process.wait(START_S) == 0, self.log()

    def log(self) -> str:
        return (Path(self.job.directory) / "driver.txt").read_text("utf-8", "replace")[-4_000:]

    @contextlib.contextmanager
    def _driver(self, **options: Any) -> Any:
        script = self.kit.save(replace(self.job, **options))
        with (Path(self.job.directory) / "driver.txt").open("ab") as log:
            process = subprocess.Popen([sys.executable, self.kit.__file__, script], stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _wait(self, process: subprocess.Popen[bytes], holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not holds():
            assert process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)


@pytest.mark.faults
def test_a_driver_and_a_slot_are_killed(
    spark: Any, kit: ModuleType, server: Any, tmp_path: Path, real_lines: list[str]
) -> None:
    job = kit.LogJob(str(tmp_path), server.dsn, 2_000, "logs_of_two_lives")
    lives = Lives(kit, server, job, real_lines)
    lives.killed(0, pace_s=0.2)
    env = kit.environment(spark, job)
    kit.build(env, job)
    running = env.execute_async(restore_from="latest")
    try:
        before = lives.ledger.in_database()
        while lives.ledger.in_database() <= before:
            assert not running.over(0.02), running.status()
        while not (victim := running.status().slots[0].pid):
            assert not running.over(0.02), running.status()
        os.kill(victim, signal.SIGKILL)
        while not (running.status().restarts and lives.ledger.is_all_there()):
            assert not running.over(0.02), running.status()
        job.gate.touch()
        assert running.wait(START_S)
    finally:
        running.cancel()
    lives.ledger.check()
    commits = server.execute("SELECT DISTINCT checkpoint FROM ftlayer_commits WHERE sink = %s", job.table)
    assert len(commits) > 2, "there were more than those of three beginnings"


@pytest.mark.campaign
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("seed", range(4))
def test_drivers_and_slots_are_killed_at_random(
    kit: ModuleType, server: Any, tmp_path: Path, real_lines: list[str], seed: int
) -> None:
    config = [
        {"backend": "lmdb", "incremental": True},
        {"unaligned": True},
        {"changelog": True, "backend": "lmdb"},
        {"max_concurrent": 3, "interval": "60ms"},
    ][seed]
    job = kit.LogJob(str(tmp_path), server.dsn, 20_000, f"logs_of_many_lives_{seed}", 0.6, config=config)
    lives = Lives(kit, server, job, real_lines)
    draw = random.Random(seed)
    for life in range(6):
        lives.killed(draw.uniform(0, 3), kills=100 * seed + life)
    lives.last(kills=100 * seed + 99)
    lives.ledger.check()
