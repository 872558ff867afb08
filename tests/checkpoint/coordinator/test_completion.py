"""From the acks of a checkpoint to its publication, its commit and what is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ftlayer.checkpoint.coordinator.events import (
    Answer,
    CheckpointRequested,
    CommitSinks,
    Discard,
    DiscardParts,
    FailJob,
    NotifyAborted,
    NotifyCompleted,
    PartWritten,
    Publish,
    Published,
    PublishFailed,
    SinksCommitted,
    Trigger,
)
from ftlayer.checkpoint.snapshots import (
    ChannelState,
    KeyedSnapshot,
    Piece,
    Scope,
    StatePiece,
    SubtaskSnapshot,
)

Make = Any


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
    assert decided[:2] == [NotifyAborted(1, decided.of(NotifyAborted)[0].reason), DiscardParts(1, (part,))]
    assert NotifyCompleted(2) in decided
    assert it.coordinator.in_progress == (3,)
    # A part that comes too late is removed.
    late = SubtaskSnapshot("count", 1)
    assert it.call(PartWritten(1, late)) == [DiscardParts(1, (late,))]
    assert not it.said.of(FailJob)


def test_who_asked_for_a_subsumed_checkpoint_gets_the_later_one(desk: Make) -> None:
    it = desk(interval="1s", max_concurrent=2).begin()
    it.call(CheckpointRequested(7))
    it.wait(1_000)
    (answer,) = it.complete(2).of(Answer)
    assert (answer.request, answer.checkpoint.checkpoint, answer.error) == (7, 2, None)


def test_one_is_published_at_a_time_and_the_earliest_first(desk: Make) -> None:
    it = desk(interval="1s", max_concurrent=3).begin()
    it.wait(3_000)
    (publish,) = it.ack_all(1)
    assert it.ack_all(3) == []
    assert it.ack_all(2) == []
    decided = it.publish(publish.checkpoint)
    assert decided.ids(NotifyCompleted) == [1]
    assert decided.ids(Publish) == [2]


def test_as_many_are_kept_as_retained_says(desk: Make) -> None:
    it = desk(retained=2).begin()
    for _ in range(4):
        it.complete(it.trigger())
    assert [each.checkpoint for each in it.coordinator.completed] == [3, 4]
    assert it.said.ids(Discard) == [1, 2]


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
