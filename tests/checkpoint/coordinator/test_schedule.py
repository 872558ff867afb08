"""When a checkpoint is triggered, and what its barrier asks."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.checkpoint.barrier import Alignment, Barrier, SnapshotKind
from ftlayer.checkpoint.coordinator.events import (
    BacklogChanged,
    CheckpointRequested,
    PartDeclined,
    SavepointRequested,
    TasksRestarting,
    TasksRestored,
    TasksRunning,
)
from ftlayer.checkpoint.options import CheckpointingMode

Make = Any


def test_the_first_checkpoint_is_due_one_interval_after_the_job_runs(desk: Make) -> None:
    it = desk(interval="1s").begin()
    assert it.wait(999) == []
    (barrier,) = it.wait(1).triggered
    assert barrier == Barrier(1, it.now.wall_ms, Alignment.ALIGNED)


def test_the_interval_goes_from_trigger_to_trigger(desk: Make) -> None:
    it = desk(interval="1s").begin()
    it.wait(1_000)
    it.wait(400)
    it.complete(1)
    assert it.wait(599) == []
    assert [barrier.checkpoint for barrier in it.wait(1).triggered] == [2]


def test_a_checkpoint_that_takes_longer_holds_the_next_one_up(desk: Make) -> None:
    it = desk(interval="1s").begin()
    it.wait(1_000)
    assert it.wait(5_000) == []
    assert it.complete(1).triggered == [Barrier(2, it.now.wall_ms)]
    # Those that were left out in the meantime are not made up for.
    assert not it.complete(2).triggered
    assert it.coordinator.due_ms == it.mono_ms + 1_000


def test_the_pause_begins_with_the_completion(desk: Make) -> None:
    it = desk(interval="1s", min_pause="800ms").begin()
    it.wait(1_000)
    it.wait(900)
    it.complete(1)
    assert it.coordinator.due_ms == it.mono_ms + 800
    assert it.wait(799) == []
    assert it.wait(1).triggered


def test_a_checkpoint_that_failed_is_followed_by_no_pause(desk: Make) -> None:
    it = desk(interval="1s", min_pause="5s", tolerable_failures=9).begin()
    it.wait(1_000)
    it.call(PartDeclined(1, ("count", 0), "disk full"))
    assert it.wait(1_000).triggered


def test_several_at_a_time(desk: Make) -> None:
    it = desk(interval="1s", max_concurrent=2).begin()
    assert len(it.wait(10_000).triggered) == 2
    assert it.complete(1).triggered
    assert it.coordinator.in_progress == (2, 3)


def test_without_interval_none_begins_by_itself(desk: Make) -> None:
    it = desk(interval=None).begin()
    assert it.wait(3_600_000) == []
    assert it.coordinator.due_ms is None
    assert it.call(CheckpointRequested(1)).triggered


def test_another_interval_during_a_backlog(desk: Make) -> None:
    it = desk(interval="1s", interval_during_backlog="10s").begin()
    planned = it.coordinator.due_ms
    it.wait(500)
    it.call(BacklogChanged(("source", 1), True))
    # What is planned stays; the longer interval holds from the next trigger on.
    assert it.coordinator.due_ms == planned
    assert it.trigger() == 1
    it.complete(1)
    it.mono_ms = it.coordinator.due_ms - 9_000
    it.call(BacklogChanged(("source", 1), False))
    assert it.coordinator.due_ms == it.mono_ms + 1_000


def test_no_checkpoint_during_a_backlog(desk: Make) -> None:
    it = desk(interval="1s", interval_during_backlog=0).begin()
    it.call(BacklogChanged(("source", 0), True))
    it.call(BacklogChanged(("source", 1), True))
    it.call(BacklogChanged(("source", 0), False))
    assert it.wait(60_000) == []
    it.call(BacklogChanged(("source", 1), False))
    assert it.wait(1_000).triggered


def test_sources_that_begin_again_have_no_backlog_until_they_say_so(desk: Make) -> None:
    it = desk(interval="1s", interval_during_backlog=0).begin()
    it.call(BacklogChanged(("source", 0), True))
    it.call(TasksRestarting(2))
    it.call(TasksRestored(None))
    it.call(TasksRunning())
    assert it.wait(1_000).triggered


@pytest.mark.parametrize(
    ("options", "alignment", "timeout_ms"),
    [
        ({}, Alignment.ALIGNED, None),
        ({"mode": CheckpointingMode.AT_LEAST_ONCE}, Alignment.AT_LEAST_ONCE, None),
        ({"unaligned": True}, Alignment.UNALIGNED, None),
        ({"unaligned": True, "aligned_timeout": "2s"}, Alignment.ALIGNED, 2_000),
    ],
)
def test_what_a_barrier_asks(desk: Make, options: Any, alignment: Alignment, timeout_ms: int | None) -> None:
    it = desk(**options).begin()
    (barrier,) = it.wait(10_000).triggered
    assert (barrier.alignment, barrier.timeout_ms) == (alignment, timeout_ms)
    assert barrier.kind is SnapshotKind.CHECKPOINT
    (savepoint,) = it.call(SavepointRequested(1, location="/save")).triggered
    assert (savepoint.alignment, savepoint.timeout_ms) == (Alignment.ALIGNED, None)
    assert (savepoint.kind, savepoint.location) == (SnapshotKind.SAVEPOINT, "/save")


def test_ids_go_on_above_every_one_that_was_used(desk: Make) -> None:
    old = desk().begin()
    old.complete(old.trigger())
    it = desk({"known": old.coordinator.completed, "highest": 41}).begin()
    assert it.trigger() == 42


def test_a_later_checkpoint_is_the_later_one_though_a_clock_was_set_back(desk: Make) -> None:
    """ "The latest" of a directory is the one that was completed last."""
    old = desk().begin()
    old.complete(old.trigger())
    it = desk({"known": old.coordinator.completed}).begin()
    for hours in (1, 2):
        it.wall_ms -= hours * 3_600_000
        it.complete(it.trigger())
    (before,), (latest,) = old.coordinator.completed, it.coordinator.completed
    assert latest.completed_ms == before.completed_ms + 2
