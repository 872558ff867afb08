"""Whole jobs in barrier mode whose records fail: each goes through a chain whole or not at all, or is dead once."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from ftlayer import FailurePolicy

NAMES = ("keyed", "both", "odd", "routed", "timed", "refused", "noted", "alarmed")
MODES = ("aligned", "at-least-once", "unaligned", "turning")
ACTS = ("kill", "kill-all", "driver", "savepoint", "stop", "commit-middle")
PAUSES: Any = {"backoff": ("2ms", "10ms"), "jitter": 0.5}
CAMPAIGN = int(os.environ.get("FTLAYER_SEEDS", "3000")) // 3


@pytest.fixture
def failing(runs: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`barrier_runs`, whose topologies fail."""
    monkeypatch.setattr(runs, "Case", sys.modules["barrier_failing"].FailingCase)
    return runs


def run(runs: Any, plan: Any) -> Any:
    """Run a plan with a policy, and look at the dead letters too."""
    attempts = sys.modules["barrier_failing"].MAX_ATTEMPTS
    policy = FailurePolicy(max_attempts=attempts, **PAUSES)
    plan = replace(plan, config={"failures": policy, **plan.config})
    done = runs.Run(plan).run()
    try:
        done.case.check_letters(list(done.world.letters.values()), done.extent)
    except BaseException as error:
        error.add_note(f"{plan}\nhappened: {done.happened}")
        raise
    return done


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_records_fails(failing: Any, name: str) -> None:
    # Each of them in one mode; the campaign has them all.
    config = {**failing.MODES[MODES[NAMES.index(name) % 4]], "interval": "10ms"}
    done = run(failing, failing.Plan(name, 1, config=config))
    assert len(done.world.letters) >= len(done.case.dead) + len(done.case.alarms) > 2
    assert done.world.driver.job.core.restarts == 0


@pytest.mark.parametrize("act", ACTS)
def test_one_thing_happens(failing: Any, act: str) -> None:
    place = ACTS.index(act)
    mode = MODES[place % 2]
    move = (80, 300, 500)[place % 3]
    config = {**failing.MODES[mode], "interval": "10ms", "backend": ("heap", "lmdb")[place % 2]}
    run(failing, failing.Plan(NAMES[place % 6], move, events=((move, act),), config=config))


def test_letters_come_back(failing: Any) -> None:
    events = [*((move, "requeue") for move in range(150, 900, 50)), (500, "driver"), (600, "die-after-keep")]
    died_again = 0
    # Names are drawn anew in each run, so in some of them users are too late for what they send back to die again.
    for seed in range(1, 30):
        done = run(
            failing, failing.Plan("odd", seed, events=tuple(events), vertex=True, config={"interval": "10ms"})
        )
        died_again += done.case.came_back and len(done.world.letters) > len(done.case.dead)
        if died_again == 2:
            return
    pytest.fail(f"of 29 runs {died_again} had records that came back and died again")


def test_a_savepoint_of_a_job_in_memory_holds_letters_that_the_vertex_has(failing: Any) -> None:
    config = {"directory": None, "retention": "no-externalized-checkpoints"}
    done = run(failing, failing.Plan("routed", 1, events=((282, "stop"),), vertex=True, config=config))
    assert done.world.lives == 2


def drawn(runs: Any, seed: int) -> Any:
    plan = runs.drawn(seed, names=NAMES)
    random = Random(seed + 1)
    in_memory = plan.config.get("directory", "") is None
    # A policy needs a place for letters.
    has_vertex = in_memory or random.random() < 0.6
    events = [*plan.events]
    if not in_memory:
        faults = sys.modules["barrier_letters"].LETTER_FAULTS
        events += [(random.randrange(1_000), random.choice(faults)) for _ in range(random.choice((0, 1, 3)))]
    if has_vertex and random.random() < 0.5:
        events += [(random.randrange(300, 1_200), "requeue") for _ in range(random.choice((1, 3)))]
    # Faults of the simulation's functions are failures of records, too: as many as the policy bears.
    return replace(plan, count=min(plan.count, 60), events=tuple(sorted(events)), vertex=has_vertex)


def test_anything_happens(failing: Any) -> None:
    for seed in range(3):
        run(failing, drawn(failing, seed))


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(1_000, 1_000 + CAMPAIGN, 50))
def test_campaign(failing: Any, first: int) -> None:
    for seed in range(first, first + 50):
        run(failing, drawn(failing, seed))
