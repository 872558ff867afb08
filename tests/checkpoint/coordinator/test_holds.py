"""A chain that holds its input, for its breaker or since too much waits: checkpoints overtake it, or fail nobody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ftlayer.checkpoint.barrier import Alignment
from ftlayer.checkpoint.coordinator.events import (
    Answer,
    CheckpointRequested,
    FailJob,
    InputHeld,
    NotifyAborted,
    PartWritten,
    SavepointRequested,
    StopRequested,
    SubtaskFinished,
)
from ftlayer.checkpoint.coordinator.in_flight import LASTING_MS
from ftlayer.checkpoint.snapshots import SubtaskSnapshot

Make = Any
HELD = InputHeld(frozenset(["count"]))
FREE = InputHeld(frozenset())


def begun(desk: Make, **config: Any) -> Any:
    """Return a coordinator whose barriers may overtake, and whose checkpoint 1 is under way."""
    it = desk({"may_overtake": True}, **{"interval": "10s", "timeout": "60s", **config}).begin()
    assert it.trigger() == 1
    return it


def alignments(decided: Any) -> list[Alignment]:
    return [barrier.alignment for barrier in decided.triggered]


def test_checkpoints_overtake_records_while_a_chain_holds_its_input_for_long(desk: Make) -> None:
    it = begun(desk)
    it.complete(1)
    it.call(HELD)
    it.wait(9_000)
    it.call(HELD)  # again and again
    decided = it.wait(1_000)
    assert alignments(decided) == [Alignment.UNALIGNED]
    it.complete(2)
    it.call(FREE)
    assert alignments(it.wait(10_000)) == [Alignment.ALIGNED]


def test_a_short_hold_changes_nothing(desk: Make) -> None:
    it = begun(desk)
    it.wait(4_000)
    for _ in range(3):
        it.call(HELD)
        assert it.wait(LASTING_MS - 1) == []
        it.call(FREE)
    it.complete(1)
    assert it.said.ids(NotifyAborted) == []


def test_a_checkpoint_that_waits_behind_a_hold_is_given_up_for_one_that_overtakes(desk: Make) -> None:
    it = begun(desk)
    it.call(HELD)
    decided = it.wait(LASTING_MS)
    assert decided.ids(NotifyAborted) == [1]
    assert (
        "'count' took no input meanwhile, since too many of its records failed"
        in decided.of(NotifyAborted)[0].reason
    )
    assert it.coordinator.counts.failures_in_a_row == 0
    assert not it.said.of(FailJob)
    assert alignments(it.wait(10_000)) == [Alignment.UNALIGNED]


def test_who_has_asked_for_it_gets_the_one_that_overtakes(desk: Make) -> None:
    it = desk({"may_overtake": True}, interval=None).begin()
    it.call(CheckpointRequested(7))
    it.call(HELD)
    decided = it.wait(LASTING_MS)
    assert decided.ids(NotifyAborted) == [1]
    assert alignments(decided) == [Alignment.UNALIGNED]
    (answer,) = it.complete(2).of(Answer)
    assert (answer.request, answer.checkpoint.checkpoint) == (7, 2)


def test_a_chain_that_has_written_its_part_is_waited_for_no_more(desk: Make) -> None:
    it = begun(desk)
    for subtask in range(2):
        it.call(PartWritten(1, SubtaskSnapshot("count", subtask)))
    it.call(HELD)
    assert it.wait(LASTING_MS) == []
    it.complete(1)
    assert it.coordinator.counts.completed == 1


def test_the_final_checkpoint_and_savepoints_wait(desk: Make) -> None:
    for events in ([SavepointRequested(1, "/save")], [SubtaskFinished(("source", n)) for n in (0, 1)]):
        it = desk({"may_overtake": True}, interval=None).begin()
        it.call(HELD)
        it.wait(LASTING_MS)
        for event in events:
            it.call(event)
        assert it.wait(LASTING_MS) == []
        assert alignments(it.said) == [Alignment.ALIGNED]


@pytest.mark.parametrize("config", [{"mode": "at-least-once"}, {"max_concurrent": 2}], ids=str)
def test_where_nothing_may_overtake_it_expires_says_why_and_is_no_failure(desk: Make, config: Any) -> None:
    it = desk(interval="10s", timeout="60s", **config).begin()
    number = it.trigger()
    it.call(HELD)
    decided = it.wait(60_000)
    assert decided.ids(NotifyAborted) == [number]
    reason = decided.of(NotifyAborted)[0].reason
    assert "it took longer than the timeout, and 'count' took no input meanwhile" in reason
    assert not it.said.of(FailJob)
    # A hold that was over before, or what has no part in it, is no excuse; one that has just ended is.
    it.wait(1)
    it.call(FREE)
    it.wait(59_999)
    assert not it.said.of(FailJob)
    it.call(InputHeld(frozenset(["another"])))
    it.wait(70_000)
    assert it.said.of(FailJob)


def test_what_a_hold_has_left_no_time_for_is_no_failure(desk: Make) -> None:
    """The hold ends just before the timeout: its chain has its part written, and those behind it have not."""
    it = desk(interval="10s", timeout="60s", max_concurrent=2).begin()
    number = it.trigger()
    it.call(HELD)
    it.wait(59_990)
    it.call(FREE)
    for subtask in range(2):
        it.call(PartWritten(number, SubtaskSnapshot("count", subtask)))
    decided = it.wait(10)
    assert decided.ids(NotifyAborted) == [number]
    assert "'count' took no input meanwhile" in decided.of(NotifyAborted)[0].reason
    assert not it.said.of(FailJob)


@pytest.mark.parametrize("request_", [SavepointRequested(1, "/save"), StopRequested(1, "/save")], ids=str)
def test_a_savepoint_that_expires_behind_a_hold_says_so(desk: Make, request_: Any) -> None:
    it = desk({"may_overtake": True}, interval=None, timeout="60s").begin()
    it.call(replace(request_))
    it.call(HELD)
    (answer,) = it.wait(60_000).of(Answer)
    assert "'count' took no input meanwhile, since too many" in str(answer.error)
