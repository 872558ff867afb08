"""Checkpoints, savepoints and stops that users ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ftlayer.checkpoint.coordinator.events import (
    Answer,
    CheckpointEvent,
    CheckpointRequested,
    CommitSinks,
    Discard,
    FailJob,
    FinishTasks,
    JobEnd,
    JobOver,
    NotifyAborted,
    NotifyCompleted,
    PartDeclined,
    SavepointRequested,
    SinksCommitted,
    StopRequested,
    TasksRestarting,
    TasksRestored,
    TasksRunning,
)

Make = Any


def test_a_manual_checkpoint_waits_for_no_pause(desk: Make) -> None:
    it = desk(interval="1h", min_pause="1h").begin()
    it.call(CheckpointRequested(1))
    it.complete(1)
    assert it.call(CheckpointRequested(2)).triggered


def test_manual_checkpoints_wait_for_the_one_under_way_and_share_the_next(desk: Make) -> None:
    it = desk(interval="1s").begin()
    it.trigger()
    assert it.call(CheckpointRequested(1)) == it.call(CheckpointRequested(2)) == []
    assert [barrier.checkpoint for barrier in it.complete(1).triggered] == [2]
    answers = it.complete(2).of(Answer)
    assert [(answer.request, answer.checkpoint.checkpoint) for answer in answers] == [(1, 2), (2, 2)]


def test_savepoints_wait_for_nothing(desk: Make) -> None:
    it = desk(interval="1s", min_pause="10m").begin()
    it.complete(it.trigger())
    it.call(CheckpointRequested(1))
    for request in range(2, 5):
        assert it.call(SavepointRequested(request, location=f"/{request}")).triggered
    assert it.coordinator.in_progress == (2, 3, 4, 5)


def test_a_savepoint_holds_periodic_ones_up(desk: Make) -> None:
    it = desk(interval="1s").begin()
    it.call(SavepointRequested(1, location="/save"))
    assert it.wait(30_000) == []
    assert it.complete(1).triggered


def test_a_savepoint_neither_subsumes_nor_commits_nor_is_restored_from(desk: Make) -> None:
    it = desk(interval="1s", max_concurrent=2).begin()
    it.trigger()
    it.call(SavepointRequested(9, location="/save"))
    (publish,) = it.ack_all(2, committables=True)
    assert publish.location == "/save"
    decided = it.publish(publish.checkpoint, "/save")
    assert decided.of(Answer) == [Answer(9, replace(publish.checkpoint, location="/save"))]
    assert not decided.of(NotifyCompleted) + decided.of(CommitSinks) + decided.of(NotifyAborted)
    assert it.coordinator.completed == ()
    assert 1 in it.coordinator.in_progress


def test_a_savepoint_is_never_subsumed(desk: Make) -> None:
    it = desk(interval="1s", max_concurrent=2).begin()
    it.call(SavepointRequested(9, location="/save"))
    it.complete(it.trigger())
    assert 1 in it.coordinator.in_progress
    assert it.complete(1).of(Answer)[0].error is None


def requests(number: int) -> list[CheckpointEvent]:
    return [CheckpointRequested(number), SavepointRequested(number, "/save"), StopRequested(number, "/save")]


@pytest.mark.parametrize("request_", requests(1))
def test_no_request_while_the_job_does_not_run(desk: Make, request_: CheckpointEvent) -> None:
    it = desk()
    (answer,) = it.call(request_)
    assert "does not run" in str(answer.error)


def test_stop_with_savepoint(desk: Make) -> None:
    it = desk(interval="1s").begin()
    it.complete(it.trigger())
    it.trigger()
    (barrier,) = it.call(StopRequested(1, location="/save")).triggered
    assert barrier.final
    for request in requests(2):
        assert "coming to its end" in str(it.call(request).of(Answer)[0].error)
    assert not it.wait(60_000).triggered
    (publish,) = it.ack_all(3, committables=True)
    decided = it.publish(publish.checkpoint, "/save")
    # It takes the place of checkpoints before it.
    assert decided.ids(NotifyAborted) == [2]
    assert isinstance(decided[-1], CommitSinks)
    decided = it.call(SinksCommitted(3))
    assert decided.ids(Discard) == [1]
    assert decided.of(Answer)[0].checkpoint.location == "/save"
    assert decided[-1] == FinishTasks(drain=False)
    assert it.call(JobOver(JobEnd.FINISHED)) == []


def test_a_stop_that_fails_restarts_the_job(desk: Make) -> None:
    it = desk(interval="1s", tolerable_failures=9).begin()
    it.call(StopRequested(1, location="/save"))
    decided = it.call(PartDeclined(1, ("count", 1), "overtaken", counts=False))
    assert [type(decision) for decision in decided] == [NotifyAborted, Answer, FailJob]
    it.call(TasksRestarting(2))
    it.call(TasksRestored(None))
    it.call(TasksRunning())
    assert it.trigger() == 2


def test_nothing_is_restored_behind_the_last_checkpoint(desk: Make) -> None:
    it = desk().begin()
    it.call(StopRequested(1, location="/save"))
    (publish,) = it.ack_all(1, committables=True)
    it.publish(publish.checkpoint)
    assert it.call(TasksRestarting(2)) == []
    assert it.call(SinksCommitted(1))[-1] == FinishTasks(drain=False)
    assert it.call(TasksRestarting(3)) == [FinishTasks(drain=False)]
