"""The driver killed with SIGKILL; started again, it goes on with what its vertex's store has."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.spark


class Driver:
    """The lives of a driver over growing logs."""

    def __init__(self, kit: ModuleType, directory: Path, lines: list[str], replay: str) -> None:
        self.directory = directory
        self._replay = replay
        self._kit = kit
        self.logs = kit.GrowingLogs(directory, lines)
        self.logs.grow(200)
        self._out = kit.Notes(directory, "out")

    def log(self) -> str:
        return (self.directory / "driver.txt").read_text("utf-8", "replace")[-6_000:]

    def life(self, kill_after_s: float | None) -> int:
        """Run a life to its end, or until it is killed some seconds after records have come out; return its code."""
        (self.directory / "started").unlink(missing_ok=True)
        config = self._kit.DriverJob(str(self.directory), replay=self._replay).save()
        before = len(self._out.rows())
        with (self.directory / "driver.txt").open("ab") as log:
            process = subprocess.Popen([sys.executable, self._kit.__file__, config], stdout=log, stderr=log)
        try:
            if kill_after_s is not None:
                self._wait(process, lambda: len(self._out.rows()) > before)
                end = time.monotonic() + kill_after_s
                self._wait(process, lambda: time.monotonic() >= end)
                process.kill()
            return process.wait(self._kit.WAIT_S)
        finally:
            process.kill()
            process.wait()

    def _wait(self, process: subprocess.Popen[bytes], holds: Any) -> None:
        deadline = time.monotonic() + self._kit.WAIT_S
        while not holds():
            assert process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
            self.logs.grow(10)

    def finish(self) -> None:
        """Let a last life end by itself; it checks what is there against the recount."""
        (self.directory / "finish").touch()
        assert self.life(None) == 0, self.log()
        status: dict[str, Any] = json.loads((self.directory / "result.json").read_text())
        assert status["pending"] == status["waiting"] == 0

    def read_again(self) -> int:
        """Return how many bytes were read more than once."""
        reads: dict[str, list[tuple[int, int]]] = {}
        for file, begin, end in self._kit.Notes(self.directory, "reads").rows():
            reads.setdefault(file, []).append((begin, end))
        again = 0
        for ranges in reads.values():
            reached = 0
            for begin, end in sorted(ranges):
                again += max(0, min(reached, end) - begin)
                reached = max(reached, end)
        return again


@pytest.fixture(params=["store", "source"])
def replay(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def driver(logs_kit: ModuleType, tmp_path: Path, real_lines: list[str], replay: str) -> Driver:
    return Driver(logs_kit, tmp_path, real_lines, replay)


@pytest.mark.campaign
def test_a_killed_driver_goes_on(driver: Driver, logs_kit: ModuleType, replay: str) -> None:
    assert driver.life(0.3) == -signal.SIGKILL
    driver.finish()
    if replay == "store":
        # The one range of each file that was open may be read again, and nothing before it.
        assert driver.read_again() <= 3 * logs_kit.RANGE_BYTES


@pytest.mark.campaign
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("seed", range(2))
def test_a_driver_killed_20_times(driver: Driver, logs_kit: ModuleType, seed: int, replay: str) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        assert driver.life(draw.uniform(0, 2)) == -signal.SIGKILL
    driver.finish()
    if replay == "store":
        assert driver.read_again() <= 20 * 3 * logs_kit.RANGE_BYTES
