from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.checkpoint.barrier import Alignment


@pytest.mark.parametrize("mode", ["aligned", "at-least-once", "unaligned", "turning"])
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_every_checkpoint_is_what_came_before_its_barriers(
    kit: Any, tools: Any, mode: str, draw: random.Random, slots: int, concurrent: int, debloating: bool
) -> None:
    config, alignment, timeout_ms = kit.modes[mode]
    if config.unaligned:
        concurrent = 1
    world = kit.world(tools, replace(config, debloating=debloating), slots)
    story = kit.story(world, draw)
    for _ in range(20_000):
        if len(story.under_way) < concurrent and len(story.checkpoints) < 5 and draw.random() < 0.1:
            story.trigger(alignment, timeout_ms)
        elif story.under_way and draw.random() < 0.01:
            story.abort(story.under_way[0])
        if not story.go_on() and len(story.checkpoints) == 5 and not story.under_way:
            break
    story.end()
    assert not any(slot.shelf.given_up for slot in world.slots)
    for number in set(range(1, 6)) - story.aborted:
        assert world.complete(number)
        if mode == "at-least-once":
            assert set(world.held(number, "sink")) >= set(world.held(number, "source"))
        else:
            world.check_exact(number)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_checkpoints_that_get_in_each_others_way(
    kit: Any, tools: Any, draw: random.Random, slots: int
) -> None:
    """Savepoints that align meet checkpoints that do not wait: some are given up, nothing is stuck or wrong."""
    world = kit.world(tools, kit.unaligned, slots)
    story = kit.story(world, draw)
    kinds = [(Alignment.ALIGNED, None), (Alignment.ALIGNED, 15), (Alignment.UNALIGNED, None)]
    for _ in range(20_000):
        if len(story.checkpoints) < 8 and draw.random() < 0.05:
            story.trigger(*draw.choice(kinds))
        for slot in world.slots:
            for _, number in slot.shelf.given_up:
                if number not in story.aborted and draw.random() < 0.3:
                    story.abort(number)
        given_up = {number for slot in world.slots for _, number in slot.shelf.given_up}
        if not story.go_on() and len(story.checkpoints) == 8 and set(story.under_way) <= given_up:
            break
    story.end()
    for barrier in story.checkpoints:
        if world.complete(barrier.checkpoint):
            world.check_exact(barrier.checkpoint)
        else:
            assert barrier.checkpoint in given_up
