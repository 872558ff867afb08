"""How long checkpoints took, counted once each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.checkpoint.coordinator.in_flight import HISTORY, CheckpointState
from ftlayer.runtime.driver.rules.job_status import WHOLE, CheckpointTimes
from ftlayer.vertex.calls.jobs import CheckpointDetails, SubtaskCheckpointDetails

PARTS = tuple(
    SubtaskCheckpointDetails("count", index, 10, 20, 0.5, 30.0, 50, 50, 0, False) for index in (0, 1)
)
DONE = CheckpointDetails(1, "checkpoint", CheckpointState.COMPLETED, False, 0, 1_500, 1_500, 2, PARTS)


def _numbered(number: int, state: CheckpointState) -> CheckpointDetails:
    return replace(DONE, number=number, state=state)


def test_a_checkpoint_is_counted_as_a_whole_and_by_part() -> None:
    times = CheckpointTimes()
    times.take([DONE])
    times.take([DONE])
    assert times.written_bytes == 100
    totals = {name: (each.count, pytest.approx(each.total)) for name, each in times.histograms.items()}
    assert totals == {
        WHOLE: (1, 1.5),
        "checkpoint_start_delay|count": (2, 0.02),
        "checkpoint_alignment|count": (2, 0.04),
        "checkpoint_sync|count": (2, 0.001),
        "checkpoint_async|count": (2, 0.06),
    }


@given(st.lists(st.tuples(st.sampled_from(CheckpointState), st.booleans()), max_size=3 * HISTORY))
def test_each_completed_one_is_counted_once_whenever_it_is_looked(
    ended: list[tuple[CheckpointState, bool]],
) -> None:
    times = CheckpointTimes()
    history: list[CheckpointDetails] = []
    unseen = 0
    for number, (state, looks) in enumerate(ended, 1):
        history = [_numbered(number, state), *history][:HISTORY]
        unseen = 0 if looks else unseen + 1
        if looks or unseen == HISTORY:
            times.take(history)
            unseen = 0
    times.take(history)
    completed = sum(state is CheckpointState.COMPLETED for state, _ in ended)
    counted = times.histograms[WHOLE].count if times.histograms else 0
    assert counted == completed
