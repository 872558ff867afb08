"""Whole jobs in barrier mode, whatever happens in whatever order: exactly once, and no end that never comes."""

from __future__ import annotations

import os
from typing import Any

import pytest

NAMES = ("counting", "union", "co", "side", "windows", "forward")
MODES = ("aligned", "at-least-once", "unaligned", "turning")
CHUNK = 15
CAMPAIGN = int(os.environ.get("FTLAYER_SEEDS", "3000"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_fails(runs: Any, name: str, mode: str) -> None:
    run = runs.Run(runs.Plan(name, seed=1, config=runs.MODES[mode])).run()
    assert run.world.driver.job._checkpoints.counts.completed > 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["union", "forward"])
def test_everything_fails_once(runs: Any, name: str, mode: str) -> None:
    events = tuple((120 * (place + 1), what) for place, what in enumerate(runs.ARMED))
    plan = runs.Plan(name, seed=2, events=events, config={**runs.MODES[mode], "interval": 10}, count=200)
    fired = runs.Run(plan).run().outside.fired
    # One may wait for another, which the job comes to an end before.
    assert len(fired) >= 5


@pytest.mark.parametrize("act", ["kill", "kill-all", "freeze", "driver", "savepoint", "stop"])
@pytest.mark.parametrize("mode", MODES)
def test_one_thing_happens(runs: Any, act: str, mode: str) -> None:
    for move in (50, 300, 500):
        runs.Run(runs.Plan("counting", seed=move, events=((move, act),), config=runs.MODES[mode])).run()


def test_what_another_region_wrote_is_not_aborted(runs: Any) -> None:
    """Its subtasks go on, and their next checkpoint holds it."""
    for seed in range(8):
        events = ((80 + 13 * seed, "die-in-write"),)
        runs.Run(
            runs.Plan("forward", seed, parallelism=3, events=events, config={"interval": 20}, parts=3)
        ).run()


def test_a_checkpoint_behind_a_failed_commit_waits_for_it(runs: Any) -> None:
    """Else its messages, some of which are committed, would be committed under two ids."""
    config = {"interval": 5, "max_concurrent": 3}
    for seed in range(8):
        runs.Run(runs.Plan("counting", seed, events=((150, "commit-middle"),), config=config)).run()


def test_the_end_of_a_source_that_is_reset_does_not_count(runs: Any) -> None:
    """Between a loss and the reset of the survivors their sources may come to their end, and begin again."""
    for seed in range(12):
        plan = runs.Plan(
            "counting",
            seed,
            parallelism=3,
            events=((0, "others-die"),),
            config={"interval": 60},
            count=30,
            parts=3,
        )
        runs.Run(plan).run()


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_checkpoint_that_was_perhaps_published_is_gone_before_its_rows_are_aborted(
    runs: Any, is_stuck: bool
) -> None:
    """Else a driver that goes on from the latest checkpoint may find it, and commit them. Or nothing is aborted."""
    for seed in range(16):
        at = 80 + 14 * seed
        faults = [(at, "publish-after"), (at + 10, "function"), (at + 60 + 5 * seed, "driver")]
        if is_stuck:
            faults.append((at, "unpublish"))
        config = {"interval": 10, "memory_threshold": 0}
        runs.Run(runs.Plan("counting", seed, parallelism=2, events=tuple(faults), config=config)).run()


@pytest.mark.parametrize("first", range(0, 90, CHUNK))
def test_anything_happens(runs: Any, first: int) -> None:
    for seed in range(first, first + CHUNK):
        runs.Run(runs.drawn(seed)).run()


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(1_000, 1_000 + CAMPAIGN, 100))
def test_campaign(runs: Any, first: int) -> None:
    for seed in range(first, first + 100):
        runs.Run(runs.drawn(seed)).run()
