"""Checkpoints that fail: which failures count, and what they lead to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ftlayer.checkpoint.coordinator.events import (
    Answer,
    CheckpointEvent,
    CheckpointRequested,
    CommitFailed,
    DiscardParts,
    FailJob,
    NotifyAborted,
    NotifyCompleted,
    PartDeclined,
    Publish,
    Published,
    PublishFailed,
    RestoreFrom,
    SavepointRequested,
    StopRequested,
    SubtaskFinished,
    TasksRestarting,
    TasksRestored,
    TasksRunning,
)
from ftlayer.errors import ConfigError

Make = Any
CONFIG_ERROR = ConfigError("no such key")


def test_a_checkpoint_expires(desk: Make) -> None:
    it = desk(interval="1s", timeout="5s", tolerable_failures=1).begin()
    it.wait(1_000)
    assert it.wait(4_999) == []
    decided = it.wait(1)
    assert decided.ids(NotifyAborted) == [1]
    assert [barrier.checkpoint for barrier in decided.triggered] == [2]


def test_what_is_written_does_not_expire_while_it_is_published(desk: Make) -> None:
    it = desk(interval="1s", timeout="5s").begin()
    it.wait(1_000)
    (publish,) = it.ack_all(1)
    assert it.wait(60_000) == []
    assert NotifyCompleted(1) in it.publish(publish.checkpoint)


@pytest.mark.parametrize("tolerable", [0, 2])
def test_more_failures_in_a_row_than_tolerable_fail_the_job(desk: Make, tolerable: int) -> None:
    it = desk(tolerable_failures=tolerable).begin()
    for _ in range(tolerable):
        assert not it.call(PartDeclined(it.trigger(), ("count", 0), "disk full")).of(FailJob)
    decided = it.call(PartDeclined(it.trigger(), ("count", 0), "disk full"))
    (failure,) = decided.of(FailJob)
    assert "'count', subtask 0: disk full" in failure.reason
    assert it.wait(60_000) == []


def test_a_success_between_them_begins_the_count_anew(desk: Make) -> None:
    it = desk(tolerable_failures=1).begin()
    for _ in range(5):
        it.call(PartDeclined(it.trigger(), ("count", 0), "disk full"))
        it.complete(it.trigger())
    assert not it.said.of(FailJob)
    assert it.coordinator.counts.failures_in_a_row == 0


def test_nothing_begins_behind_what_the_job_ends_with(desk: Make) -> None:
    it = desk(interval="1s", max_concurrent=3).begin()
    it.call(StopRequested(1, location="/save"))
    assert not it.wait(60_000).triggered
    it = desk(interval="1s", max_concurrent=3).begin()
    for source in (0, 1):
        it.call(SubtaskFinished(("source", source)))
    assert [barrier.final for barrier in it.said.triggered] == [True]
    assert not it.wait(60_000).triggered


def test_a_failure_from_before_the_last_success_does_not_count(desk: Make) -> None:
    """A savepoint may overtake a checkpoint, and does not subsume it."""
    it = desk(tolerable_failures=0, timeout="5s").begin()
    number = it.trigger()
    it.call(SavepointRequested(1, location="/save"))
    it.complete(number + 1)
    assert it.wait(5_000).ids(NotifyAborted) == [number]
    assert not it.said.of(FailJob)


def test_after_it_failed_the_job_the_count_begins_anew(desk: Make) -> None:
    it = desk(tolerable_failures=1).begin()
    for _ in range(2):
        it.call(PartDeclined(it.trigger(), ("count", 0), "disk full"))
    it.call(TasksRestarting(2))
    it.call(TasksRestored(None))
    it.call(TasksRunning())
    it.call(PartDeclined(it.trigger(), ("count", 0), "disk full"))
    assert len(it.said.of(FailJob)) == 1


@pytest.mark.parametrize("count", [1, 5])
def test_a_checkpoint_counts_once_however_many_decline(desk: Make, count: int) -> None:
    it = desk(tolerable_failures=1).begin()
    number = it.trigger()
    for subtask in range(count):
        it.call(PartDeclined(number, ("count", subtask), "disk full"))
    assert it.coordinator.counts.failures_in_a_row == 1
    assert it.said.ids(NotifyAborted) == [1]


def test_storage_that_fails_in_the_driver_counts(desk: Make) -> None:
    it = desk().begin()
    it.ack_all(it.trigger())
    decided = it.call(PublishFailed(1, "no space left"))
    assert decided.ids(NotifyAborted) == decided.ids(DiscardParts) == [1]
    assert "no space left" in decided.of(FailJob)[0].reason


@pytest.mark.parametrize(
    "event",
    [
        PartDeclined(1, ("count", 0), "no such key", final=CONFIG_ERROR),
        PublishFailed(1, "no such key", CONFIG_ERROR),
        CommitFailed(1, "no such key", CONFIG_ERROR),
    ],
)
def test_a_failure_that_no_restart_mends_says_so(desk: Make, event: CheckpointEvent) -> None:
    it = desk().begin()
    it.trigger()
    if not isinstance(event, PartDeclined):
        (publish,) = it.ack_all(1, committables=True)
        if isinstance(event, CommitFailed):
            it.publish(publish.checkpoint)
    (failure,) = it.call(event).of(FailJob)
    assert failure.final is CONFIG_ERROR
    assert "no such key" in failure.reason


def test_it_says_so_of_the_failure_that_fails_the_job_alone(desk: Make) -> None:
    it = desk(tolerable_failures=1).begin()
    assert not it.call(PartDeclined(it.trigger(), ("count", 0), "no such key", final=CONFIG_ERROR)).of(
        FailJob
    )
    (failure,) = it.call(PartDeclined(it.trigger(), ("count", 0), "disk full")).of(FailJob)
    assert failure.final is None


def test_what_is_given_up_by_tasks_does_not_count(desk: Make) -> None:
    it = desk().begin()
    decided = it.call(PartDeclined(it.trigger(), ("count", 0), "overtaken", counts=False))
    assert decided.ids(NotifyAborted) == [1]
    assert not decided.of(FailJob)
    assert it.coordinator.counts.failures_in_a_row == 0


def test_a_savepoint_to_stop_with_that_cannot_be_committed_says_where_it_is(desk: Make) -> None:
    """The job goes on from it, and a driver that dies then would not find it by "latest"."""
    it = desk(interval=None).begin()
    it.call(StopRequested(1, location="/save"))
    (publish,) = it.ack_all(1, committables=True)
    it.call(Published(replace(publish.checkpoint, location="/save")))
    decided = it.call(CommitFailed(1, "no connection"))
    assert "goes on from savepoint /save" in str(decided.of(Answer)[0].error)
    assert "no connection" in decided.of(FailJob)[0].reason


def test_failed_savepoints_do_not_count(desk: Make) -> None:
    it = desk(timeout="5s", interval=None).begin()
    it.call(SavepointRequested(1, location="/save"))
    it.call(PartDeclined(1, ("count", 0), "disk full"))
    it.call(SavepointRequested(2, location="/save"))
    it.wait(5_000)
    it.call(SavepointRequested(3, location="/save"))
    it.ack_all(3)
    it.call(PublishFailed(3, "no such bucket"))
    assert [answer.request for answer in it.said.of(Answer) if answer.error] == [1, 2, 3]
    assert not it.said.of(FailJob)


def test_sinks_that_cannot_be_committed_restart_the_job_from_that_checkpoint(desk: Make) -> None:
    it = desk().begin()
    it.call(CheckpointRequested(5))
    (publish,) = it.ack_all(1, committables=True)
    it.publish(publish.checkpoint)
    decided = it.call(CommitFailed(1, "no connection"))
    assert "no connection" in decided.of(FailJob)[0].reason
    assert "no connection" in str(decided.of(Answer)[0].error)
    assert not it.said.of(NotifyCompleted)
    assert it.call(TasksRestarting(2)) == [RestoreFrom(2, publish.checkpoint)]


def test_nothing_is_published_behind_a_failed_commit_until_the_job_is_restored(desk: Make) -> None:
    """What is committed in part would be committed once more, under another id."""
    it = desk(interval="1s", max_concurrent=2).begin()
    first, second = it.trigger(), it.trigger()
    (publish,) = it.ack_all(first, committables=True)
    it.publish(publish.checkpoint)
    assert not it.ack_all(second, committables=True).of(Publish)
    assert not it.call(CommitFailed(first, "no connection")).of(Publish)
    assert it.call(TasksRestarting(2)).ids(NotifyAborted) == [second]
    it.call(TasksRestored(publish.checkpoint))
    it.call(TasksRunning())
    assert it.ack_all(it.trigger(), committables=True).of(Publish)
