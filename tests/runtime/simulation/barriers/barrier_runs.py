"""Runs of a world from a seed: what goes wrong, when, and what has to hold in the end."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from barrier_outside import Outside
from barrier_topologies import Case
from barrier_world import Setting, World

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.config import TopologyOptions
from ftlayer.runtime.coordinator.events import JobState

MOST_MOVES = 60_000

SMALL = TopologyOptions(
    batch_rows=4,
    batch_age_ms=3,
    channel_bytes=1 << 10,
    heartbeat_ms=100,
    heartbeat_timeout_ms=2_000,
    start_timeout_ms=60_000,
)

MODES: dict[str, dict[str, Any]] = {
    "aligned": {},
    "at-least-once": {"mode": "at-least-once"},
    "unaligned": {"unaligned": True},
    "turning": {"unaligned": True, "aligned_timeout": 10},
}


class Run:
    """One world, with its directory."""

    def __init__(self, name: str, seed: int, *, parallelism: int = 2, **config: Any) -> None:
        root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.directory = Path(tempfile.mkdtemp(prefix="barriers-", dir=root))
        options: dict[str, Any] = {
            "interval": 30,
            "timeout": "2s",
            "tolerable_failures": 1_000,
            "directory": str(self.directory / "checkpoints"),
            "memory_threshold": 64,
            "max_parallelism": 8,
            "state_directory": str(self.directory),
            **config,
        }
        exact = options.get("mode") != "at-least-once"
        self.case = Case(name, Outside(), exact=exact)
        self.world = World(
            self.case, Setting(SMALL, CheckpointConfig(**options), parallelism), seed, self.directory
        )
        self.seed = seed

    def __enter__(self) -> Run:
        self._installed = self.world.installed()
        self._installed.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._installed.__exit__(*error)
        shutil.rmtree(self.directory, ignore_errors=True)

    def to_the_end(self) -> None:
        """Go on until the job is over, and check everything."""
        world = self.world
        for _ in range(MOST_MOVES):
            if world.driver.verdict is not None:
                break
            world.step()
        else:
            raise AssertionError(f"the job does not end:\n{world.report()}")
        assert world.driver.verdict.state is JobState.ENDED, world.driver.verdict
        world.finish()


def simple(name: str, seed: int, **config: Any) -> Run:
    with Run(name, seed, **config) as run:
        run.world.begin()
        run.to_the_end()
        assert run.case.outside.wrong == []
        run.case.check()
    return run


_ = Random
