"""Drivers killed with SIGKILL while they read a queue, in all ways; each life goes on where the one before it was."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark import cloudpickle

from ftlayer.connectors.queue_stream import owner_of

pytestmark = [pytest.mark.spark, pytest.mark.campaign]

PART, LIVES = 400, 3


@pytest.fixture(scope="module")
def script(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    module = load_module(Path(__file__).with_name("queue_drivers.py"))
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return module


class Lives:
    """The lives of a job's drivers; more messages come in each."""

    def __init__(self, script: ModuleType, kit: Any, way: str, directory: Path, wait_until: Any) -> None:
        self._script, self._kit, self._wait_until = script, kit, wait_until
        self._directory = directory
        spool = {"spool": f"{directory}/spool", "maxRowsPerTrigger": "200"} if kit.has_spool else {}
        self.job = script.QueueJob(
            way,
            str(directory),
            kit.column,
            kit.queue,
            kit.parallelism,
            kit.sink("out"),
            kit.data_source,
            kit.options | spool,
            kit.sink_format,
            kit.sink_options("out"),
        )
        self._is_kept = way in ("acker", "wrapped")

    def found(self) -> list[int]:
        numbers: list[int] = self._script.kept_in(self.job.out) if self._is_kept else self._kit.in_sink("out")
        return numbers

    def run(self) -> None:
        for life in range(LIVES):
            with self._driver() as process:
                for part in (2 * life, 2 * life + 1):
                    self._kit.put(part * PART, (part + 1) * PART)
                    # Killed with half of the second part on its way.
                    self._until(process, lambda part=part: len(set(self.found())) >= (part + 0.5) * PART)
                if life == LIVES - 1:
                    self._until(process, lambda: len(set(self.found())) >= 2 * LIVES * PART)
                    self._until(process, lambda: self._kit.pending() == 0)
                process.kill()
                assert process.wait() == -signal.SIGKILL, self._log()

    def _until(self, process: subprocess.Popen[bytes], holds: Callable[[], bool]) -> None:
        def held() -> bool:
            assert process.poll() is None, self._log()
            return holds()

        self._wait_until(held, "messages on their way")

    def _log(self) -> str:
        return (self._directory / "driver.txt").read_text("utf-8", "replace")[-6_000:]

    @contextlib.contextmanager
    def _driver(self) -> Iterator[subprocess.Popen[bytes]]:
        with (self._directory / "driver.txt").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, self._script.__file__, self.job.save()], stdout=log, stderr=log
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def run_lives(script: ModuleType, kit: Any, way: str, directory: Path, wait_until: Any) -> list[int]:
    lives = Lives(script, kit, way, directory, wait_until)
    lives.run()
    found = lives.found()
    assert set(found) == set(range(2 * LIVES * PART))
    return found


def test_barrier_mode(script: ModuleType, fed: Any, wait_until: Any, tmp_path: Path) -> None:
    fed.begin("messages/messages")
    found = run_lives(script, fed, "barrier", tmp_path, wait_until)
    if fed.enters_once:
        assert len(found) == len(set(found))


def test_acker_mode(script: ModuleType, fed: Any, wait_until: Any, tmp_path: Path) -> None:
    """Its sink sees what was in flight again."""
    fed.begin("messages/messages")
    run_lives(script, fed, "acker", tmp_path, wait_until)


def test_a_plain_query(script: ModuleType, fed: Any, wait_until: Any, tmp_path: Path) -> None:
    fed.begin(owner_of(str(tmp_path / "spool")))
    found = run_lives(script, fed, "query", tmp_path, wait_until)
    if fed.enters_once:
        assert len(found) == len(set(found))


def test_a_wrapped_query(script: ModuleType, fed: Any, wait_until: Any, tmp_path: Path) -> None:
    """Its sink sees a batch again whose commit was not noted."""
    fed.begin(owner_of(str(tmp_path / "spool")))
    run_lives(script, fed, "wrapped", tmp_path, wait_until)
