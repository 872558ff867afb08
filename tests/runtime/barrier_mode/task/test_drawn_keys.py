"""Records without a key wait under numbers of their subtask's own key groups: of others nothing is restored."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftlayer.records.partitioning import groups_of
from ftlayer.runtime.barrier_mode.task.failing.attempts import DRAWN_AT_ONCE, DRAWN_KEY, DrawnKeys
from ftlayer.state.tables.layers import KeyGroups


@given(st.integers(1, 300), st.data())
def test_they_are_of_the_subtasks_groups(most: int, data: st.DataObject) -> None:
    parallelism = data.draw(st.integers(1, min(most, 40)))
    subtask = data.draw(st.integers(0, parallelism - 1))
    mine = groups_of(subtask, parallelism, most)
    keys = DrawnKeys(mine, most)
    drawn = [keys.draw() for _ in range(DRAWN_AT_ONCE)]
    assert len(set(drawn)) == len(drawn)
    assert {int(group) for group in KeyGroups("parse", DRAWN_KEY, most).of(drawn)} <= set(mine)
