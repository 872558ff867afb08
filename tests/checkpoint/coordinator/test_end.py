"""The end of a job: its final checkpoint, what is retained, and what was counted."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ftlayer.checkpoint.barrier import Alignment, Barrier
from ftlayer.checkpoint.coordinator.events import (
    Answer,
    CheckpointRequested,
    CommitSinks,
    Discard,
    FinishTasks,
    JobEnd,
    JobOver,
    JobStopping,
    NotifyAborted,
    NotifyCompleted,
    PartDeclined,
    PartWritten,
    SavepointRequested,
    SubtaskFinished,
    TasksRestarting,
    TasksRestored,
    TasksRunning,
)
from ftlayer.checkpoint.coordinator.in_flight import HISTORY, CheckpointState
from ftlayer.checkpoint.options import Retention
from ftlayer.checkpoint.snapshots import SnapshotTimes, SubtaskSnapshot
from ftlayer.vertex.calls.jobs import CheckpointDetails

Make = Any


@pytest.mark.parametrize("interval", [None, "1h"])
def test_the_final_checkpoint(desk: Make, interval: str | None) -> None:
    it = desk(interval=interval, unaligned=True).begin()
    assert it.call(SubtaskFinished(("source", 0))) == []
    (barrier,) = it.call(SubtaskFinished(("source", 1))).triggered
    assert barrier == Barrier(1, it.now.wall_ms, Alignment.ALIGNED, final=True)
    assert it.complete(1) == [NotifyCompleted(1), FinishTasks(drain=True)]
    assert it.wait(60_000) == []


def test_the_final_checkpoint_waits_for_the_one_under_way(desk: Make) -> None:
    it = desk(interval="1s", min_pause="1h").begin()
    it.trigger()
    for subtask in range(2):
        assert it.call(SubtaskFinished(("source", subtask))) == []
    it.call(CheckpointRequested(4))
    assert it.complete(1).triggered[0].final
    decided = it.complete(2)
    assert decided.of(Answer)[0].request == 4
    assert decided[-1] == FinishTasks(drain=True)


def test_the_final_checkpoint_is_taken_again(desk: Make) -> None:
    it = desk(interval="1h", tolerable_failures=2).begin()
    for subtask in range(2):
        it.call(SubtaskFinished(("source", subtask)))
    it.call(PartDeclined(1, ("count", 0), "disk full"))
    assert it.wait(999) == []
    assert it.wait(1).triggered[0] == Barrier(2, it.now.wall_ms, final=True)
    assert it.complete(2)[-1] == FinishTasks(drain=True)


def test_after_a_restart_the_sources_end_again(desk: Make) -> None:
    it = desk().begin()
    for subtask in range(2):
        it.call(SubtaskFinished(("source", subtask)))
    it.call(TasksRestarting(2))
    it.call(TasksRestored(None))
    it.call(SubtaskFinished(("source", 0)))
    # The other one has more to say this time.
    assert it.call(TasksRunning()).triggered == []
    assert not it.wait(10_000).triggered[0].final
    it.call(TasksRestarting(3))
    it.call(TasksRestored(None))
    it.call(SubtaskFinished(("source", 0)))
    it.call(SubtaskFinished(("source", 1)))
    # Before all tasks run: the barrier is for all of them.
    assert it.call(TasksRunning()).triggered[0].final


def test_savepoints_under_way_end_before_the_tasks_do(desk: Make) -> None:
    it = desk(interval=None, max_concurrent=2).begin()
    it.call(SavepointRequested(1, location="/save"))
    for subtask in range(2):
        it.call(SubtaskFinished(("source", subtask)))
    assert it.complete(2) == [NotifyCompleted(2)]
    assert "end" in str(it.call(SavepointRequested(2, location="/more")).of(Answer)[0].error)
    assert [type(each) for each in it.complete(1)] == [Answer, FinishTasks]


@pytest.mark.parametrize(
    ("retention", "end", "kept"),
    [
        (Retention.RETAIN_ON_CANCELLATION, JobEnd.FINISHED, False),
        (Retention.RETAIN_ON_CANCELLATION, JobEnd.CANCELLED, True),
        (Retention.RETAIN_ON_CANCELLATION, JobEnd.FAILED, True),
        (Retention.DELETE_ON_CANCELLATION, JobEnd.FINISHED, False),
        (Retention.DELETE_ON_CANCELLATION, JobEnd.CANCELLED, False),
        (Retention.DELETE_ON_CANCELLATION, JobEnd.FAILED, True),
        (Retention.NO_EXTERNALIZED_CHECKPOINTS, JobEnd.FINISHED, False),
        (Retention.NO_EXTERNALIZED_CHECKPOINTS, JobEnd.CANCELLED, False),
        (Retention.NO_EXTERNALIZED_CHECKPOINTS, JobEnd.FAILED, False),
        (None, JobEnd.FINISHED, False),
        (None, JobEnd.CANCELLED, True),
        (None, JobEnd.FAILED, True),
        (Retention.DELETE_ON_CANCELLATION, JobEnd.INTERRUPTED, True),
        (Retention.NO_EXTERNALIZED_CHECKPOINTS, JobEnd.INTERRUPTED, True),
    ],
)
def test_what_is_retained_in_the_end(
    desk: Make, retention: Retention | None, end: JobEnd, kept: bool
) -> None:
    it = desk(retained=2, retention=retention, directory="/chk").begin()
    for _ in range(2):
        it.complete(it.trigger())
    it.call(CheckpointRequested(5))
    decided = it.call(JobStopping())
    assert decided.ids(NotifyAborted) == [3]
    assert len(decided.of(Answer)) == 1
    decided = it.call(JobOver(end))
    assert decided.ids(Discard) == ([] if kept else [1, 2])
    assert len(it.coordinator.completed) == (2 if kept else 0)
    assert it.wait(60_000) == []


@pytest.mark.parametrize("own", [0, 1])
def test_a_job_that_fails_before_its_own_first_checkpoint_leaves_what_it_was_restored_from(
    desk: Make, own: int
) -> None:
    old = desk(retained=2).begin()
    for _ in range(2):
        old.complete(old.trigger())
    never = Retention.NO_EXTERNALIZED_CHECKPOINTS
    it = desk({"known": old.coordinator.completed}, retained=3, retention=never, directory="/chk")
    it.call(TasksRestarting(1))
    it.call(TasksRestored(old.coordinator.completed[-1]))
    it.call(TasksRunning())
    for _ in range(own):
        it.complete(it.trigger())
    assert it.call(JobOver(JobEnd.FAILED)).ids(Discard) == ([1, 2, 3] if own else [])


@pytest.mark.parametrize("retention", [Retention.RETAIN_ON_CANCELLATION, Retention.DELETE_ON_CANCELLATION])
def test_what_is_published_after_the_end(desk: Make, retention: Retention) -> None:
    it = desk(retention=retention, directory="/chk").begin()
    it.complete(it.trigger())
    it.trigger()
    (publish,) = it.ack_all(2, committables=True)
    first = it.call(JobOver(JobEnd.CANCELLED)).ids(Discard)
    decided = it.publish(publish.checkpoint)
    assert not decided.of(CommitSinks)
    if retention is Retention.RETAIN_ON_CANCELLATION:
        assert (first, decided.ids(Discard)) == ([], [1])
    else:
        assert (first, decided.ids(Discard)) == ([1], [2])


def test_statistics(desk: Make) -> None:
    it = desk(interval="1s", tolerable_failures=5).begin()
    it.wait(1_000)
    it.wait(50)
    for uid, subtask in sorted(it.facts.subtasks):
        times = SnapshotTimes(start_delay_ms=subtask, alignment_ms=7, sync_ms=0.5, in_flight_bytes=11)
        part = SubtaskSnapshot(uid, subtask, times=times, written_bytes=10, state_bytes=100)
        decided = it.call(PartWritten(1, part))
    it.publish(decided[0].checkpoint, "/chk-1")
    it.wait(950)
    it.call(PartDeclined(2, ("count", 0), "disk full"))
    it.wait(1_000)
    it.call(PartWritten(3, SubtaskSnapshot("count", 0)))
    third, second, first = it.coordinator.history(it.now)
    assert (first.number, first.state, first.duration_ms) == (1, CheckpointState.COMPLETED, 50)
    assert first.ended_ms == first.triggered_ms + 50
    assert (first.total.written_bytes, first.total.state_bytes, first.total.in_flight_bytes) == (40, 400, 44)
    assert (first.total.start_delay_ms, first.total.alignment_ms, first.total.sync_ms) == (1, 7, 0.5)
    assert [(uid, chain.acked, chain.state_bytes) for uid, chain in first.chains.items()] == [
        ("count", 2, 200),
        ("source", 2, 200),
    ]
    assert [(part.uid, part.subtask, part.start_delay_ms, part.written_bytes) for part in first.subtasks] == [
        ("count", 0, 0, 10),
        ("count", 1, 1, 10),
        ("source", 0, 0, 10),
        ("source", 1, 1, 10),
    ]
    assert first.location == "/chk-1"
    assert (second.state, second.total.acked) == (CheckpointState.FAILED, 0)
    assert "disk full" in second.failure
    assert (third.state, third.total.acked, third.expected) == (CheckpointState.IN_PROGRESS, 1, 4)
    assert [(part.uid, part.subtask) for part in third.subtasks] == [("count", 0)]
    assert third.ended_ms == 0
    counts = it.coordinator.counts
    assert (counts.triggered, counts.in_progress, counts.completed, counts.failed) == (3, 1, 1, 1)
    assert (counts.failures_in_a_row, counts.tolerable_failures, counts.interval_ms) == (1, 5, 1_000)
    assert counts.last_completed_ms == first.ended_ms
    assert counts.retained == ("/chk-1",)


def test_totals_show_no_password(desk: Make) -> None:
    it = desk(directory="s3://user:secret@bucket/a", savepoint_directory="s3://user:secret@bucket/b").begin()
    it.trigger()
    (publish,) = it.ack_all(1)
    it.publish(publish.checkpoint, "s3://user:secret@bucket/a/chk-1")
    counts = it.coordinator.counts
    assert (counts.directory, counts.savepoint_directory) == ("s3://bucket/a", "s3://bucket/b")
    assert counts.retained == ("s3://bucket/a/chk-1",)
    (done,) = it.coordinator.history(it.now)
    assert done.location == "s3://user:secret@bucket/a/chk-1", "to restore from it"


def test_the_history_has_an_end(desk: Make) -> None:
    it = desk(interval="1s").begin()
    for _ in range(120):
        it.complete(it.trigger())
    history = it.coordinator.history(it.now)
    assert [each.number for each in history] == list(range(120, 20, -1))


def test_another_thread_that_looks_on_misses_none(desk: Make) -> None:
    it = desk(interval="1s").begin()
    done, seen = threading.Event(), list[tuple[CheckpointDetails, ...]]()

    def look() -> None:
        while not done.is_set():
            seen.append(it.coordinator.history(it.now))

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(HISTORY):
        it.complete(it.trigger())
    done.set()
    looking.join()
    assert seen
    for history in seen:
        assert [each.number for each in history] == list(range(len(history), 0, -1))
        assert {each.expected for each in history} <= {len(it.facts.subtasks)}
        ended = [each.number for each in history if each.ended_ms]
        assert ended == list(range(len(ended), 0, -1))
