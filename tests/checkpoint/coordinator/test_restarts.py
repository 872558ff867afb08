"""Tasks that are restarted: what is given up, and what they go back to."""

from __future__ import annotations

from typing import Any

from ftlayer.checkpoint.coordinator.events import (
    Answer,
    CheckpointInstruction,
    CheckpointRequested,
    CommitSinks,
    Discard,
    FailJob,
    NotifyAborted,
    NotifyCompleted,
    PartWritten,
    Publish,
    PublishFailed,
    RestoreFrom,
    SinksCommitted,
    SubtaskFinished,
    TasksRestarting,
    TasksRestored,
    TasksRunning,
)
from ftlayer.checkpoint.snapshots import ChannelState, Piece, Scope, SubtaskSnapshot

Make = Any


def test_a_start_from_nothing_is_no_restore(desk: Make) -> None:
    it = desk(interval="1s").begin()
    assert it.coordinator.counts.restored == 0
    it.call(TasksRestarting(2))
    it.call(TasksRestored(None))
    it.call(TasksRunning())
    assert it.coordinator.counts.restored == 0, "there was no checkpoint yet"
    it.complete(it.trigger())
    it.call(TasksRestarting(3))
    it.call(TasksRestored(it.coordinator.completed[0]))
    assert it.coordinator.counts.restored == 1


def test_a_restart_gives_up_what_is_under_way(desk: Make) -> None:
    it = desk(interval="1s").begin()
    it.complete(it.trigger())
    it.trigger()
    it.call(CheckpointRequested(5))
    decided = it.call(TasksRestarting(2))
    assert decided.ids(NotifyAborted) == [2]
    assert [answer.request for answer in decided.of(Answer)] == [5]
    assert decided[-1] == RestoreFrom(2, it.coordinator.completed[0])
    assert it.wait(60_000) == []
    it.call(TasksRestored(it.coordinator.completed[0]))
    it.call(TasksRunning())
    assert it.trigger() == 3
    assert not it.said.of(FailJob)


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
    assert decided.ids(NotifyAborted) == [2]
    assert decided[-1] == RestoreFrom(2, it.coordinator.completed[0])
    assert not decided.of(FailJob)


def test_what_is_behind_the_restored_one_does_not_stand(desk: Make) -> None:
    it = desk(retained=3).begin()
    for _ in range(3):
        it.complete(it.trigger())
    first = it.coordinator.completed[0]
    it.call(TasksRestarting(2))
    assert it.call(TasksRestored(first)).ids(Discard) == [2, 3]
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
    assert not it.said.of(Discard)


def test_checkpoints_of_an_earlier_run_are_taken_over(desk: Make) -> None:
    old = desk(retained=2).begin()
    for _ in range(2):
        old.complete(old.trigger())
    it = desk({"known": old.coordinator.completed}, retained=1).begin()
    it.complete(it.trigger())
    assert it.said.ids(Discard) == [1, 2]


def test_only_some_sources_begin_again(desk: Make) -> None:
    it = desk(interval=None).begin()
    it.call(SubtaskFinished(("source", 0)))
    it.call(TasksRestarting(2, sources=[("source", 1)]))
    it.call(TasksRestored(None))
    it.call(TasksRunning())
    assert it.call(SubtaskFinished(("source", 1))).triggered[0].final


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
    assert decided.ids(NotifyAborted) == [3]
    assert not decided.of(FailJob)
    assert ack_pieces(it, 4, base, two).ids(Publish) == [4]


def test_a_file_that_is_written_on_is_no_base(desk: Make) -> None:
    it = desk(interval="1s").begin()
    for number, places in [(1, [("shared/one", 0)]), (2, []), (3, [("shared/one", 10)])]:
        it.trigger()
        (publish,) = ack_pieces(it, number, *places)
        it.publish(publish.checkpoint)  # type: ignore[union-attr]
    assert it.said.ids(NotifyCompleted) == [1, 2, 3]
