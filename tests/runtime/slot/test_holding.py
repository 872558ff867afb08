"""A task that holds its input, because its state is too much for memory: the slot obeys, and goes on beside it."""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.common.clock import Now
from ftlayer.config import TopologyOptions
from ftlayer.runtime.task.actions import Action, ElementCame, HoldInput, TaskEvent, TimeCame

SOURCE = ("source", 0)
PAUSE_MS = 2
ROWS = 30


class Slot:
    """source → work → sink. ``work`` holds its input behind a batch, for as many looks as the test says."""

    def __init__(self, tools: Any, looks: list[int]) -> None:
        options = TopologyOptions(batch_rows=5, batch_age_ms=0, channel_bytes=1 << 20)
        self.slot = tools.slot.of(tools.graph_of(1), 0, options)
        self.core, self.work, self.tools = self.slot.core, self.slot.tasks["work", 0], tools
        self.looks = looks
        self.now_ms = 0
        self.left = 0
        self.held_until_ms = 0
        self.work.handle = partial(self.handle, self.work.handle)

    @property
    def now(self) -> Now:
        return Now(self.now_ms, self.now_ms)

    def handle(self, handle: Any, event: TaskEvent, now: Now) -> list[Action]:
        actions: list[Action] = handle(event, now)
        match event:
            case ElementCame():
                assert now.mono_ms >= self.held_until_ms, "a held task was given input"
                self.left = self.looks.pop(0) if self.looks else 0
            case TimeCame():
                self.left -= self.left > 0
            case _:
                return actions
        return [*actions, *self.hold(now)]

    def hold(self, now: Now) -> list[Action]:
        if not self.left:
            return []
        self.held_until_ms = now.mono_ms + PAUSE_MS
        return [HoldInput(self.held_until_ms)]

    def turn(self) -> None:
        self.core.on_time(self.now)
        while self.core.run_next(self.now):
            pass
        self.core.idle(self.now_ms)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 4), max_size=8))
def test_a_held_task_takes_nothing_and_everything_comes_in_order_behind_that(
    tools: Any, looks: list[int]
) -> None:
    slot = Slot(tools, list(looks))
    for first in range(0, ROWS, 5):
        slot.core.rows(SOURCE, tools.source_rows(first, 5), slot.now)
    slot.core.source_ended(SOURCE, slot.now)
    for _ in range(1_000):
        slot.turn()
        if slot.core.has_ended:
            break
        assert slot.core.due_ms is not None, "it waits for nothing, and has not ended"
        assert slot.core.due_ms > slot.now_ms, "a turn that did nothing, and another one at once"
        slot.now_ms = slot.core.due_ms
    assert slot.core.has_ended
    assert slot.work.taken == list(range(ROWS))
    assert slot.slot.tasks["sink", 0].taken == list(range(ROWS))


def test_the_others_go_on_beside_a_held_task(tools: Any) -> None:
    slot = Slot(tools, [1_000])
    slot.core.rows(SOURCE, tools.source_rows(0, 5), slot.now)
    slot.turn()
    slot.core.rows(SOURCE, tools.source_rows(5, 5), slot.now)
    slot.turn()
    assert slot.work.taken == list(range(5))
    # What it had sent goes on to the sink; the second batch waits in front of it, and the look is due.
    assert slot.slot.tasks["sink", 0].taken == list(range(5))
    assert slot.core.due_ms == PAUSE_MS
    assert not slot.core.is_quiet
