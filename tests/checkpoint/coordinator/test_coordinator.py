"""Sequences of events, and what has to come of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ftlayer.checkpoint.barrier import Alignment, Barrier, SnapshotKind
from ftlayer.checkpoint.coordinator.events import (
    BacklogChanged,
    CheckpointEvent,
    CheckpointRequested,
    CommitFailed,
    JobOver,
    JobStopping,
    PartDeclined,
    PartWritten,
    Published,
    PublishFailed,
    SavepointRequested,
    SinksCommitted,
    StopRequested,
    SubtaskFinished,
    TasksRestarting,
    TasksRestored,
    TasksRunning,
)
from ftlayer.checkpoint.coordinator.instructions import (
    Answer,
    CheckpointInstruction,
    CommitSinks,
    Discard,
    DiscardParts,
    FailJob,
    FinishTasks,
    JobEnd,
    NotifyAborted,
    NotifyCompleted,
    Publish,
    RestoreFrom,
    Trigger,
)
from ftlayer.checkpoint.coordinator.statistics import CheckpointState
from ftlayer.checkpoint.options import CheckpointingMode, Retention
from ftlayer.checkpoint.pieces import Piece, Scope
from ftlayer.checkpoint.snapshots import (
    ChannelState,
    KeyedSnapshot,
    SnapshotTimes,
    StatePiece,
    SubtaskSnapshot,
)
from ftlayer.errors import ConfigError

Make = Any
CONFIG_ERROR = ConfigError("no such key")


def of(decisions: list[CheckpointInstruction], kind: type) -> list[Any]:
    return [decision for decision in decisions if isinstance(decision, kind)]


def ids(decisions: list[CheckpointInstruction], kind: type) -> list[int]:
    found = of(decisions, kind)
    return [getattr(each.checkpoint, "checkpoint", each.checkpoint) for each in found]


def triggered(decisions: list[CheckpointInstruction]) -> list[Barrier]:
    return [decision.barrier for decision in of(decisions, Trigger)]


# ---------------------------------------------------------------- the schedule


def test_the_first_checkpoint_is_due_one_interval_after_the_job_runs(desk: Make) -> None:
    it = desk(interval="1s").begin()
    assert it.wait(999) == []
    (barrier,) = triggered(it.wait(1))
    assert barrier == Barrier(1, it.now.wall_ms, Alignment.ALIGNED)


def test_the_interval_goes_from_trigger_to_trigger(desk: Make) -> None:
    it = desk(interval="1s").begin()
    it.wait(1_000)
    it.wait(400)
    it.complete(1)
    assert it.wait(599) == []
    assert [barrier.checkpoint for barrier in triggered(it.wait(1))] == [2]


def test_a_checkpoint_that_takes_longer_holds_the_next_one_up(desk: Make) -> None:
    it = desk(interval="1s").begin()
    it.wait(1_000)
    assert it.wait(5_000) == []
    assert triggered(it.complete(1)) == [Barrier(2, it.now.wall_ms)]
    # Those that were left out in the meantime are not made up for.
    assert not triggered(it.complete(2))
    assert it.coordinator.due_ms == it.mono_ms + 1_000


def test_the_pause_begins_with_the_completion(desk: Make) -> None:
    it = desk(interval="1s", min_pause="800ms").begin()
    it.wait(1_000)
    it.wait(900)
    it.complete(1)
    assert it.coordinator.due_ms == it.mono_ms + 800
    assert it.wait(799) == []
    assert triggered(it.wait(1))


def test_a_checkpoint_that_failed_is_followed_by_no_pause(desk: Make) -> None:
    it = desk(interval="1s", min_pause="5s", tolerable_failures=9).begin()
    it.wait(1_000)
    it.call(PartDeclined(1, ("count", 0), "disk full"))
    assert triggered(it.wait(1_000))


def test_several_at_a_time(desk: Make) -> None:
    it = desk(interval="1s", max_concurrent=2).begin()
    assert len(triggered(it.wait(10_000))) == 2
    assert triggered(it.complete(1))
    assert it.coordinator.in_progress == (2, 3)


def test_without_interval_none_begins_by_itself(desk: Make) -> None:
    it = desk(interval=None).begin()
    assert it.wait(3_600_000) == []
    assert it.coordinator.due_ms is None
    assert triggered(it.call(CheckpointRequested(1)))


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
    assert triggered(it.wait(1_000))


def test_sources_that_begin_again_have_no_backlog_until_they_say_so(desk: Make) -> None:
    it = desk(interval="1s", interval_during_backlog=0).begin()
    it.call(BacklogChanged(("source", 0), True))
    it.call(TasksRestarting(2))
    it.call(TasksRestored(None))
    it.call(TasksRunning())
    assert triggered(it.wait(1_000))


# ---------------------------------------------------------------- barriers


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
    (barrier,) = triggered(it.wait(10_000))
    assert (barrier.alignment, barrier.timeout_ms) == (alignment, timeout_ms)
    assert barrier.kind is SnapshotKind.CHECKPOINT
    (savepoint,) = triggered(it.call(SavepointRequested(1, location="/save")))
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


# ---------------------------------------------------------------- completion


def test_the_way_of_a_checkpoint(desk: Make) -> None:
    it = desk(interval="1s").begin()
    it.trigger()
    (publish,) = it.ack_all(1, committables=True)
    checkpoint = publish.checkpoint
    assert publish == Publish(checkpoint, "")
    assert [(part.uid, part.subtask) for part in checkpoint.subtasks] == sorted(it.facts.subtasks)
    assert (checkpoint.job, checkpoint.run, checkpoint.kind) == ("job", "run", "checkpoint")
    assert checkpoint.completed_ms == it.now.wall_ms
    assert not checkpoint.unaligned
    written = replace(checkpoint, location="/chk-1")
    assert it.call(Published(written)) == [CommitSinks(written)]
    assert it.call(SinksCommitted(1)) == [NotifyCompleted(1)]
    assert it.coordinator.completed == (written,)


def test_nothing_is_committed_where_nothing_was_written(desk: Make) -> None:
    it = desk().begin()
    assert it.complete(it.trigger()) == [NotifyCompleted(1)]


def test_what_one_checkpoint_has_committed_the_next_one_leaves_out(desk: Make) -> None:
    it = desk().begin()
    number = it.trigger()
    (publish,) = it.ack_all(number, committables=True)
    it.publish(publish.checkpoint)
    it.call(SinksCommitted(1))
    it.trigger()
    # The sinks had not heard of the first one yet: nothing is new.
    old = publish.checkpoint.subtasks
    for part in old:
        decided = it.call(PartWritten(2, part))
    assert it.publish(decided[0].checkpoint)[0] == NotifyCompleted(2)
    it.trigger()
    (publish,) = it.ack_all(3, committables=True)
    (commit,) = it.publish(publish.checkpoint)
    assert commit == CommitSinks(publish.checkpoint)


def test_acks_in_any_order_twice_and_from_strangers(desk: Make) -> None:
    it = desk().begin()
    it.trigger()
    for uid, subtask in [("count", 1), ("count", 1), ("stranger", 0), ("source", 0), ("count", 0)]:
        assert it.call(PartWritten(1, SubtaskSnapshot(uid, subtask))) == []
    (publish,) = it.call(PartWritten(1, SubtaskSnapshot("source", 1)))
    assert len(publish.checkpoint.subtasks) == 4
    assert it.call(PartWritten(1, SubtaskSnapshot("source", 1))) == []
    assert it.call(PartWritten(99, SubtaskSnapshot("source", 1))) == []


def test_a_later_checkpoint_subsumes_earlier_ones(desk: Make) -> None:
    it = desk(interval="1s", max_concurrent=3).begin()
    it.wait(2_000)
    it.call(CheckpointRequested(7))
    part = SubtaskSnapshot("count", 0)
    it.call(PartWritten(1, part))
    decided = it.complete(2)
    assert decided[:2] == [NotifyAborted(1, of(decided, NotifyAborted)[0].reason), DiscardParts(1, (part,))]
    assert NotifyCompleted(2) in decided
    assert it.coordinator.in_progress == (3,)
    # A part that comes too late is removed.
    late = SubtaskSnapshot("count", 1)
    assert it.call(PartWritten(1, late)) == [DiscardParts(1, (late,))]
    assert not of(it.said, FailJob)


def test_who_asked_for_a_subsumed_checkpoint_gets_the_later_one(desk: Make) -> None:
    it = desk(interval="1s", max_concurrent=2).begin()
    it.call(CheckpointRequested(7))
    it.wait(1_000)
    (answer,) = of(it.complete(2), Answer)
    assert (answer.request, answer.checkpoint.checkpoint, answer.error) == (7, 2, None)


def test_one_is_published_at_a_time_and_the_earliest_first(desk: Make) -> None:
    it = desk(interval="1s", max_concurrent=3).begin()
    it.wait(3_000)
    (publish,) = it.ack_all(1)
    assert it.ack_all(3) == []
    assert it.ack_all(2) == []
    decided = it.publish(publish.checkpoint)
    assert ids(decided, NotifyCompleted) == [1]
    assert ids(decided, Publish) == [2]


def test_as_many_are_kept_as_retained_says(desk: Make) -> None:
    it = desk(retained=2).begin()
    for _ in range(4):
        it.complete(it.trigger())
    assert [each.checkpoint for each in it.coordinator.completed] == [3, 4]
    assert ids(it.said, Discard) == [1, 2]


@pytest.mark.parametrize(
    ("options", "full"),
    [
        ({"retained": 3, "incremental": True}, [2, 12, 22]),
        ({"retained": 2, "changelog": True, "directory": "/chk"}, [2, 12, 22]),
        ({"retained": 1, "incremental": True}, []),
        ({"retained": 3}, []),
    ],
)
def test_of_several_retained_checkpoints_that_share_files_one_shares_none(
    desk: Make, options: dict[str, Any], full: list[int]
) -> None:
    it = desk(**options).begin()
    base: Piece | None = None
    found = []
    for number in range(1, 26):
        it.said.clear()
        it.trigger()
        (barrier,) = [decision.barrier for decision in it.said if isinstance(decision, Trigger)]
        if barrier.full:
            found.append(number)
        if base is None or barrier.full:
            base = Piece(b"", 9, None, f"shared/{number}", 0, Scope.SHARED)
        state = KeyedSnapshot(0, 128, (), (StatePiece("entries", base, 1, number),))
        for uid, subtask in it.facts.subtasks:
            decided = it.call(PartWritten(number, SubtaskSnapshot(uid, subtask, keyed=state)))
        (publish,) = [decision for decision in decided if isinstance(decision, Publish)]
        it.publish(publish.checkpoint)
        kept = it.coordinator.completed
        shared = {one.checkpoint: one.subtasks[0].keyed.pieces[0].piece.path for one in kept}  # type: ignore[union-attr]
        if full and number > 1:
            assert len(set(shared.values())) == 2
            assert len(kept) <= options["retained"] + 1
        assert list(shared)[-1] == number
    assert found == full


def test_unaligned_if_records_are_in_it(desk: Make) -> None:
    it = desk(unaligned=True).begin()
    it.trigger()
    piece = Piece(b"", 3, b"abc")
    channel = ChannelState("source", "", "count", 0, 0, 0, False, piece, 1)
    for uid, subtask in it.facts.subtasks:
        channels = (channel,) if (uid, subtask) == ("count", 0) else ()
        decided = it.call(PartWritten(1, SubtaskSnapshot(uid, subtask, channels=channels)))
    assert decided[0].checkpoint.unaligned


def test_answers_that_were_not_asked_for(desk: Make) -> None:
    it = desk().begin()
    it.trigger()
    (publish,) = it.ack_all(1)
    with pytest.raises(ValueError, match="checkpoint 2 "):
        it.call(PublishFailed(2, ""))
    with pytest.raises(ValueError, match="checkpoint 1 "):
        it.call(SinksCommitted(1))
    it.publish(publish.checkpoint)
    with pytest.raises(ValueError, match="checkpoint 1 "):
        it.publish(publish.checkpoint)


# ---------------------------------------------------------------- failures


def test_a_checkpoint_expires(desk: Make) -> None:
    it = desk(interval="1s", timeout="5s", tolerable_failures=1).begin()
    it.wait(1_000)
    assert it.wait(4_999) == []
    decided = it.wait(1)
    assert ids(decided, NotifyAborted) == [1]
    assert [barrier.checkpoint for barrier in triggered(decided)] == [2]


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
        assert not of(it.call(PartDeclined(it.trigger(), ("count", 0), "disk full")), FailJob)
    decided = it.call(PartDeclined(it.trigger(), ("count", 0), "disk full"))
    (failure,) = of(decided, FailJob)
    assert "'count', subtask 0: disk full" in failure.reason
    assert it.wait(60_000) == []


def test_a_success_between_them_begins_the_count_anew(desk: Make) -> None:
    it = desk(tolerable_failures=1).begin()
    for _ in range(5):
        it.call(PartDeclined(it.trigger(), ("count", 0), "disk full"))
        it.complete(it.trigger())
    assert not of(it.said, FailJob)
    assert it.coordinator.counts.failures_in_a_row == 0


def test_nothing_begins_behind_what_the_job_ends_with(desk: Make) -> None:
    it = desk(interval="1s", max_concurrent=3).begin()
    it.call(StopRequested(1, location="/save"))
    assert not triggered(it.wait(60_000))
    it = desk(interval="1s", max_concurrent=3).begin()
    for source in (0, 1):
        it.call(SubtaskFinished(("source", source)))
    assert [barrier.final for barrier in triggered(it.said)] == [True]
    assert not triggered(it.wait(60_000))


def test_a_failure_from_before_the_last_success_does_not_count(desk: Make) -> None:
    """A savepoint may overtake a checkpoint, and does not subsume it."""
    it = desk(tolerable_failures=0, timeout="5s").begin()
    number = it.trigger()
    it.call(SavepointRequested(1, location="/save"))
    it.complete(number + 1)
    assert ids(it.wait(5_000), NotifyAborted) == [number]
    assert not of(it.said, FailJob)


def test_after_it_failed_the_job_the_count_begins_anew(desk: Make) -> None:
    it = desk(tolerable_failures=1).begin()
    for _ in range(2):
        it.call(PartDeclined(it.trigger(), ("count", 0), "disk full"))
    it.call(TasksRestarting(2))
    it.call(TasksRestored(None))
    it.call(TasksRunning())
    it.call(PartDeclined(it.trigger(), ("count", 0), "disk full"))
    assert len(of(it.said, FailJob)) == 1


@pytest.mark.parametrize("count", [1, 5])
def test_a_checkpoint_counts_once_however_many_decline(desk: Make, count: int) -> None:
    it = desk(tolerable_failures=1).begin()
    number = it.trigger()
    for subtask in range(count):
        it.call(PartDeclined(number, ("count", subtask), "disk full"))
    assert it.coordinator.counts.failures_in_a_row == 1
    assert ids(it.said, NotifyAborted) == [1]


def test_storage_that_fails_in_the_driver_counts(desk: Make) -> None:
    it = desk().begin()
    it.ack_all(it.trigger())
    decided = it.call(PublishFailed(1, "no space left"))
    assert ids(decided, NotifyAborted) == ids(decided, DiscardParts) == [1]
    assert "no space left" in of(decided, FailJob)[0].reason


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
    (failure,) = of(it.call(event), FailJob)
    assert failure.final is CONFIG_ERROR
    assert "no such key" in failure.reason


def test_it_says_so_of_the_failure_that_fails_the_job_alone(desk: Make) -> None:
    it = desk(tolerable_failures=1).begin()
    assert not of(
        it.call(PartDeclined(it.trigger(), ("count", 0), "no such key", final=CONFIG_ERROR)), FailJob
    )
    (failure,) = of(it.call(PartDeclined(it.trigger(), ("count", 0), "disk full")), FailJob)
    assert failure.final is None


def test_what_is_given_up_by_tasks_does_not_count(desk: Make) -> None:
    it = desk().begin()
    decided = it.call(PartDeclined(it.trigger(), ("count", 0), "overtaken", counts=False))
    assert ids(decided, NotifyAborted) == [1]
    assert not of(decided, FailJob)
    assert it.coordinator.counts.failures_in_a_row == 0


def test_a_savepoint_to_stop_with_that_cannot_be_committed_says_where_it_is(desk: Make) -> None:
    """The job goes on from it, and a driver that dies then would not find it by "latest"."""
    it = desk(interval=None).begin()
    it.call(StopRequested(1, location="/save"))
    (publish,) = it.ack_all(1, committables=True)
    it.call(Published(replace(publish.checkpoint, location="/save")))
    decided = it.call(CommitFailed(1, "no connection"))
    assert "goes on from savepoint /save" in str(of(decided, Answer)[0].error)
    assert "no connection" in of(decided, FailJob)[0].reason


def test_failed_savepoints_do_not_count(desk: Make) -> None:
    it = desk(timeout="5s", interval=None).begin()
    it.call(SavepointRequested(1, location="/save"))
    it.call(PartDeclined(1, ("count", 0), "disk full"))
    it.call(SavepointRequested(2, location="/save"))
    it.wait(5_000)
    it.call(SavepointRequested(3, location="/save"))
    it.ack_all(3)
    it.call(PublishFailed(3, "no such bucket"))
    assert [answer.request for answer in of(it.said, Answer) if answer.error] == [1, 2, 3]
    assert not of(it.said, FailJob)


def test_sinks_that_cannot_be_committed_restart_the_job_from_that_checkpoint(desk: Make) -> None:
    it = desk().begin()
    it.call(CheckpointRequested(5))
    (publish,) = it.ack_all(1, committables=True)
    it.publish(publish.checkpoint)
    decided = it.call(CommitFailed(1, "no connection"))
    assert "no connection" in of(decided, FailJob)[0].reason
    assert "no connection" in str(of(decided, Answer)[0].error)
    assert not of(it.said, NotifyCompleted)
    assert it.call(TasksRestarting(2)) == [RestoreFrom(2, publish.checkpoint)]


def test_nothing_is_published_behind_a_failed_commit_until_the_job_is_restored(desk: Make) -> None:
    """What is committed in part would be committed once more, under another id."""
    it = desk(interval="1s", max_concurrent=2).begin()
    first, second = it.trigger(), it.trigger()
    (publish,) = it.ack_all(first, committables=True)
    it.publish(publish.checkpoint)
    assert not of(it.ack_all(second, committables=True), Publish)
    assert not of(it.call(CommitFailed(first, "no connection")), Publish)
    assert ids(it.call(TasksRestarting(2)), NotifyAborted) == [second]
    it.call(TasksRestored(publish.checkpoint))
    it.call(TasksRunning())
    assert of(it.ack_all(it.trigger(), committables=True), Publish)


# ---------------------------------------------------------------- restarts


def test_a_restart_gives_up_what_is_under_way(desk: Make) -> None:
    it = desk(interval="1s").begin()
    it.complete(it.trigger())
    it.trigger()
    it.call(CheckpointRequested(5))
    decided = it.call(TasksRestarting(2))
    assert ids(decided, NotifyAborted) == [2]
    assert [answer.request for answer in of(decided, Answer)] == [5]
    assert decided[-1] == RestoreFrom(2, it.coordinator.completed[0])
    assert it.wait(60_000) == []
    it.call(TasksRestored(it.coordinator.completed[0]))
    it.call(TasksRunning())
    assert it.trigger() == 3
    assert not of(it.said, FailJob)


def test_a_restart_waits_for_what_is_being_published_and_committed(desk: Make) -> None:
    it = desk().begin()
    it.trigger()
    (publish,) = it.ack_all(1, committables=True)
    assert it.call(TasksRestarting(2)) == []
    assert it.call(TasksRestarting(3)) == []
    (commit,) = it.publish(publish.checkpoint)
    assert isinstance(commit, CommitSinks)
    decided = it.call(SinksCommitted(1))
    assert decided == [NotifyCompleted(1), *(RestoreFrom(number, publish.checkpoint) for number in (2, 3))]


def test_a_restart_goes_back_where_publishing_fails(desk: Make) -> None:
    it = desk().begin()
    it.complete(it.trigger())
    it.ack_all(it.trigger())
    it.call(TasksRestarting(2))
    decided = it.call(PublishFailed(2, "gone"))
    assert ids(decided, NotifyAborted) == [2]
    assert decided[-1] == RestoreFrom(2, it.coordinator.completed[0])
    assert not of(decided, FailJob)


def test_what_is_behind_the_restored_one_does_not_stand(desk: Make) -> None:
    it = desk(retained=3).begin()
    for _ in range(3):
        it.complete(it.trigger())
    first = it.coordinator.completed[0]
    it.call(TasksRestarting(2))
    assert ids(it.call(TasksRestored(first)), Discard) == [2, 3]
    assert it.coordinator.completed == (first,)


def test_a_foreign_checkpoint_is_never_discarded(desk: Make) -> None:
    old = desk().begin()
    old.complete(old.trigger())
    (checkpoint,) = old.coordinator.completed
    it = desk({"known": (checkpoint,), "claimed": False})
    assert it.call(TasksRestarting(1)) == [RestoreFrom(1, checkpoint)]
    it.call(TasksRestored(checkpoint))
    it.call(TasksRunning())
    it.complete(it.trigger())
    assert [each.checkpoint for each in it.coordinator.completed] == [2]
    assert not of(it.said, Discard)


def test_checkpoints_of_an_earlier_run_are_taken_over(desk: Make) -> None:
    old = desk(retained=2).begin()
    for _ in range(2):
        old.complete(old.trigger())
    it = desk({"known": old.coordinator.completed}, retained=1).begin()
    it.complete(it.trigger())
    assert ids(it.said, Discard) == [1, 2]


def test_only_some_sources_begin_again(desk: Make) -> None:
    it = desk(interval=None).begin()
    it.call(SubtaskFinished(("source", 0)))
    it.call(TasksRestarting(2, sources=[("source", 1)]))
    it.call(TasksRestored(None))
    it.call(TasksRunning())
    assert triggered(it.call(SubtaskFinished(("source", 1))))[0].final


def ack_pieces(it: Any, number: int, *places: tuple[str, int]) -> list[CheckpointInstruction]:
    """All subtasks ack; one of them refers to these shared pieces."""
    pieces = tuple(
        ChannelState("a", "", "b", 0, 0, 0, False, Piece(b"", 1, None, path, offset, Scope.SHARED), 1)
        for path, offset in places
    )
    for uid, subtask in sorted(it.facts.subtasks):
        channels = pieces if (uid, subtask) == ("count", 0) else ()
        decided: list[CheckpointInstruction] = it.call(
            PartWritten(number, SubtaskSnapshot(uid, subtask, channels=channels))
        )
    return decided


def test_a_checkpoint_on_a_base_that_is_gone_is_given_up(desk: Make) -> None:
    it = desk(interval="1s", max_concurrent=2).begin()
    base, one, two, three = [(f"shared/{name}", 0) for name in ("base", "one", "two", "three")]
    it.wait(1_000)
    it.publish(ack_pieces(it, 1, base, one)[0].checkpoint)  # type: ignore[union-attr]
    it.wait(3_000)
    assert it.coordinator.in_progress == (2, 3)
    it.publish(ack_pieces(it, 2, base, two)[0].checkpoint)  # type: ignore[union-attr]
    # The news of 2 had not reached the task when the barrier of 3 did: it builds on 1, which is discarded.
    decided = ack_pieces(it, 3, base, one, three)
    assert ids(decided, NotifyAborted) == [3]
    assert not of(decided, FailJob)
    assert ids(ack_pieces(it, 4, base, two), Publish) == [4]


def test_a_file_that_is_written_on_is_no_base(desk: Make) -> None:
    it = desk(interval="1s").begin()
    for number, places in [(1, [("shared/one", 0)]), (2, []), (3, [("shared/one", 10)])]:
        it.trigger()
        (publish,) = ack_pieces(it, number, *places)
        it.publish(publish.checkpoint)  # type: ignore[union-attr]
    assert ids(it.said, NotifyCompleted) == [1, 2, 3]


# ---------------------------------------------------------------- users


def test_a_manual_checkpoint_waits_for_no_pause(desk: Make) -> None:
    it = desk(interval="1h", min_pause="1h").begin()
    it.call(CheckpointRequested(1))
    it.complete(1)
    assert triggered(it.call(CheckpointRequested(2)))


def test_manual_checkpoints_wait_for_the_one_under_way_and_share_the_next(desk: Make) -> None:
    it = desk(interval="1s").begin()
    it.trigger()
    assert it.call(CheckpointRequested(1)) == it.call(CheckpointRequested(2)) == []
    assert [barrier.checkpoint for barrier in triggered(it.complete(1))] == [2]
    answers = of(it.complete(2), Answer)
    assert [(answer.request, answer.checkpoint.checkpoint) for answer in answers] == [(1, 2), (2, 2)]


def test_savepoints_wait_for_nothing(desk: Make) -> None:
    it = desk(interval="1s", min_pause="10m").begin()
    it.complete(it.trigger())
    it.call(CheckpointRequested(1))
    for request in range(2, 5):
        assert triggered(it.call(SavepointRequested(request, location=f"/{request}")))
    assert it.coordinator.in_progress == (2, 3, 4, 5)


def test_a_savepoint_holds_periodic_ones_up(desk: Make) -> None:
    it = desk(interval="1s").begin()
    it.call(SavepointRequested(1, location="/save"))
    assert it.wait(30_000) == []
    assert triggered(it.complete(1))


def test_a_savepoint_neither_subsumes_nor_commits_nor_is_restored_from(desk: Make) -> None:
    it = desk(interval="1s", max_concurrent=2).begin()
    it.trigger()
    it.call(SavepointRequested(9, location="/save"))
    (publish,) = it.ack_all(2, committables=True)
    assert publish.location == "/save"
    decided = it.publish(publish.checkpoint, "/save")
    assert of(decided, Answer) == [Answer(9, replace(publish.checkpoint, location="/save"))]
    assert not of(decided, NotifyCompleted) + of(decided, CommitSinks) + of(decided, NotifyAborted)
    assert it.coordinator.completed == ()
    assert 1 in it.coordinator.in_progress


def test_a_savepoint_is_never_subsumed(desk: Make) -> None:
    it = desk(interval="1s", max_concurrent=2).begin()
    it.call(SavepointRequested(9, location="/save"))
    it.complete(it.trigger())
    assert 1 in it.coordinator.in_progress
    assert of(it.complete(1), Answer)[0].error is None


def requests(number: int) -> list[CheckpointEvent]:
    return [
        CheckpointRequested(number),
        SavepointRequested(number, "/save"),
        StopRequested(number, "/save"),
    ]


@pytest.mark.parametrize("request_", requests(1))
def test_no_request_while_the_job_does_not_run(desk: Make, request_: CheckpointEvent) -> None:
    it = desk()
    (answer,) = it.call(request_)
    assert "does not run" in str(answer.error)


def test_stop_with_savepoint(desk: Make) -> None:
    it = desk(interval="1s").begin()
    it.complete(it.trigger())
    it.trigger()
    (barrier,) = triggered(it.call(StopRequested(1, location="/save")))
    assert barrier.final
    for request in requests(2):
        assert "coming to its end" in str(of(it.call(request), Answer)[0].error)
    assert not triggered(it.wait(60_000))
    (publish,) = it.ack_all(3, committables=True)
    decided = it.publish(publish.checkpoint, "/save")
    # It takes the place of checkpoints before it.
    assert ids(decided, NotifyAborted) == [2]
    assert isinstance(decided[-1], CommitSinks)
    decided = it.call(SinksCommitted(3))
    assert ids(decided, Discard) == [1]
    assert of(decided, Answer)[0].checkpoint.location == "/save"
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


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("interval", [None, "1h"])
def test_the_final_checkpoint(desk: Make, interval: str | None) -> None:
    it = desk(interval=interval, unaligned=True).begin()
    assert it.call(SubtaskFinished(("source", 0))) == []
    (barrier,) = triggered(it.call(SubtaskFinished(("source", 1))))
    assert barrier == Barrier(1, it.now.wall_ms, Alignment.ALIGNED, final=True)
    assert it.complete(1) == [NotifyCompleted(1), FinishTasks(drain=True)]
    assert it.wait(60_000) == []


def test_the_final_checkpoint_waits_for_the_one_under_way(desk: Make) -> None:
    it = desk(interval="1s", min_pause="1h").begin()
    it.trigger()
    for subtask in range(2):
        assert it.call(SubtaskFinished(("source", subtask))) == []
    it.call(CheckpointRequested(4))
    assert triggered(it.complete(1))[0].final
    decided = it.complete(2)
    assert of(decided, Answer)[0].request == 4
    assert decided[-1] == FinishTasks(drain=True)


def test_the_final_checkpoint_is_taken_again(desk: Make) -> None:
    it = desk(interval="1h", tolerable_failures=2).begin()
    for subtask in range(2):
        it.call(SubtaskFinished(("source", subtask)))
    it.call(PartDeclined(1, ("count", 0), "disk full"))
    assert it.wait(999) == []
    assert triggered(it.wait(1))[0] == Barrier(2, it.now.wall_ms, final=True)
    assert it.complete(2)[-1] == FinishTasks(drain=True)


def test_after_a_restart_the_sources_end_again(desk: Make) -> None:
    it = desk().begin()
    for subtask in range(2):
        it.call(SubtaskFinished(("source", subtask)))
    it.call(TasksRestarting(2))
    it.call(TasksRestored(None))
    it.call(SubtaskFinished(("source", 0)))
    # The other one has more to say this time.
    assert triggered(it.call(TasksRunning())) == []
    assert not triggered(it.wait(10_000))[0].final
    it.call(TasksRestarting(3))
    it.call(TasksRestored(None))
    it.call(SubtaskFinished(("source", 0)))
    it.call(SubtaskFinished(("source", 1)))
    # Before all tasks run: the barrier is for all of them.
    assert triggered(it.call(TasksRunning()))[0].final


def test_savepoints_under_way_end_before_the_tasks_do(desk: Make) -> None:
    it = desk(interval=None, max_concurrent=2).begin()
    it.call(SavepointRequested(1, location="/save"))
    for subtask in range(2):
        it.call(SubtaskFinished(("source", subtask)))
    assert it.complete(2) == [NotifyCompleted(2)]
    assert "end" in str(of(it.call(SavepointRequested(2, location="/more")), Answer)[0].error)
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
    assert ids(decided, NotifyAborted) == [3]
    assert len(of(decided, Answer)) == 1
    decided = it.call(JobOver(end))
    assert ids(decided, Discard) == ([] if kept else [1, 2])
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
    assert ids(it.call(JobOver(JobEnd.FAILED)), Discard) == ([1, 2, 3] if own else [])


@pytest.mark.parametrize("retention", [Retention.RETAIN_ON_CANCELLATION, Retention.DELETE_ON_CANCELLATION])
def test_what_is_published_after_the_end(desk: Make, retention: Retention) -> None:
    it = desk(retention=retention, directory="/chk").begin()
    it.complete(it.trigger())
    it.trigger()
    (publish,) = it.ack_all(2, committables=True)
    first = ids(it.call(JobOver(JobEnd.CANCELLED)), Discard)
    decided = it.publish(publish.checkpoint)
    assert not of(decided, CommitSinks)
    if retention is Retention.RETAIN_ON_CANCELLATION:
        assert (first, ids(decided, Discard)) == ([], [1])
    else:
        assert (first, ids(decided, Discard)) == ([1], [2])


# ---------------------------------------------------------------- statistics


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
    assert (first.checkpoint, first.state, first.duration_ms) == (1, CheckpointState.COMPLETED, 50)
    assert first.ended_ms == first.triggered_ms + 50
    assert (first.written_bytes, first.state_bytes, first.in_flight_bytes) == (40, 400, 44)
    assert (first.start_delay_ms, first.alignment_ms, first.sync_ms) == (1, 7, 0.5)
    assert [(chain.uid, chain.acked, chain.state_bytes) for chain in first.chains] == [
        ("count", 2, 200),
        ("source", 2, 200),
    ]
    assert first.location == "/chk-1"
    assert (second.state, second.acked) == (CheckpointState.FAILED, 0)
    assert "disk full" in second.failure
    assert (third.state, third.acked, third.subtasks) == (CheckpointState.IN_PROGRESS, 1, 4)
    assert third.ended_ms is None
    counts = it.coordinator.counts
    assert (counts.triggered, counts.in_progress, counts.completed, counts.failed) == (3, 1, 1, 1)
    assert counts.failures_in_a_row == 1


def test_the_history_has_an_end(desk: Make) -> None:
    it = desk(interval="1s").begin()
    for _ in range(120):
        it.complete(it.trigger())
    history = it.coordinator.history(it.now)
    assert [each.checkpoint for each in history] == list(range(120, 20, -1))
