"""How the rules of a job repair it when slots are lost: every race is a sequence of events."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from ftlayer.common.rules.restart import ExponentialDelay, FixedDelay
from ftlayer.errors import SlotLostError
from ftlayer.runtime.acker_mode.driver.rules.isolation import LEFTOVERS
from ftlayer.runtime.driver.rules.events import (
    CancelRequested,
    CancelSlot,
    JobState,
    Over,
    RecallStreams,
    SlotDown,
    SparkJobEnded,
    SubmitSlot,
    Tick,
)
from ftlayer.runtime.protocol.messages import (
    Cancel,
    Deploy,
    DropPeers,
    Heartbeat,
    PeersDropped,
    PeersUp,
    ReplayNow,
    SlotFailed,
)

Make = Any


def test_a_repair(make: Make) -> None:
    rig = make(3)
    rig.up()
    decisions = rig.lose("1a")
    assert decisions.sent() == [("0a", DropPeers(2, (1,))), ("2a", DropPeers(2, (1,)))]
    assert SlotDown(1) in decisions
    assert rig.core.state is JobState.RECOVERING
    assert rig.tell(SparkJobEnded(1, 1, "crashed")) == []
    assert rig.pass_ms(50, ("0a", "2a")) == [SubmitSlot(1, 2)]
    assert rig.hello("1b") == []
    assert rig.said("0a", PeersDropped(2)) == []
    rig.recalled()
    assert rig.core.state is JobState.RECOVERING
    assert len(rig.said("2a", PeersDropped(2)).recalls) == 1
    decisions = rig.recalled()
    (peer,) = decisions.sent(PeersUp)[0][1].peers
    assert (peer.slot, peer.instance) == (1, "1b")
    assert [to for to, _ in decisions.sent(PeersUp)] == ["0a", "2a"]
    ((to, deploy),) = decisions.sent(Deploy)
    assert (to, deploy.epoch, deploy.run, len(deploy.peers)) == ("1b", 2, "r/2", 3)
    assert [to for to, _ in decisions.sent(ReplayNow)] == ["0a", "1b", "2a"]
    assert rig.core.state is JobState.RECOVERING
    rig.started("1b")
    assert rig.core.state is JobState.RUNNING
    assert rig.core.last_failure.startswith("slot 1 (process 1 on host): gone")


def test_a_second_loss_during_a_repair_begins_it_again(make: Make) -> None:
    rig = make(3)
    rig.up()
    rig.lose("1a")
    rig.hello("1b")
    rig.said("0a", PeersDropped(2))
    rig.said("2a", PeersDropped(2))
    assert rig.lose("2a").sent() == [("0a", DropPeers(3, (2,)))]
    assert rig.recalled().sent() == []  # from before the second loss, or before all know of it
    rig.hello("2b")
    assert len(rig.said("0a", PeersDropped(3)).recalls) == 1
    decisions = rig.recalled()
    assert sorted(peer.instance for peer in decisions.sent(PeersUp)[0][1].peers) == ["1b", "2b"]
    assert [to for to, _ in decisions.sent(Deploy)] == ["1b", "2b"]


def test_all_slots_lost_at_once(make: Make) -> None:
    rig = make()
    rig.up()
    rig.lose("0a")
    assert rig.lose("1a").sent() == []
    rig.hello("0b")
    rig.recalled()
    assert len(rig.hello("1b").recalls) == 1
    assert [to for to, _ in rig.recalled().sent(Deploy)] == ["0b", "1b"]


def test_what_is_pending_is_recalled_again_and_again_while_a_slot_is_away(make: Make) -> None:
    """So that it does not time out: the lost slot's calls may come late, and some who send to it do not know."""
    rig = make(3)
    rig.up()
    assert len(rig.lose("1a").recalls) == 1
    assert rig.said("0a", PeersDropped(2)).recalls == []
    assert len(rig.said("2a", PeersDropped(2)).recalls) == 1
    beats = ("0a", "2a")
    times = [rig.now for _ in range(100) if rig.pass_ms(50, beats).recalls]
    gaps = [after - before for before, after in pairwise(times)]
    assert len(times) >= 10
    assert all(rig.timeout_ms // 3 <= gap <= rig.timeout_ms // 3 + 50 for gap in gaps)
    rig.hello("1b")
    assert [to for to, _ in rig.recalled().sent(Deploy)] == ["1b"]
    assert rig.pass_ms(2 * rig.timeout_ms, (*beats, "1b")).recalls == []


def test_the_pause_before_a_restart_begins_at_the_loss(make: Make) -> None:
    """Spark says some tenths of a second later that the job of a process that is gone has ended."""
    rig = make(2, restart=FixedDelay(attempts=9, delay="300ms"))
    rig.up()
    rig.lose("1a")
    assert not [it for it in rig.pass_ms(200, ("0a",)) if isinstance(it, SubmitSlot)]
    assert rig.tell(SparkJobEnded(1, 1, "crashed")) == []
    assert not [it for it in rig.pass_ms(50, ("0a",)) if isinstance(it, SubmitSlot)]
    assert SubmitSlot(1, 2) in rig.pass_ms(50, ("0a",))
    # It has never been up: nothing was lost, and its pause begins when it ends.
    rig.tell(SparkJobEnded(1, 2, "crashed"))
    assert not [it for it in rig.pass_ms(250, ("0a",)) if isinstance(it, SubmitSlot)]
    assert SubmitSlot(1, 3) in rig.pass_ms(100, ("0a",))


def test_what_a_cancelled_job_leaves_is_recalled_for_its_next_start(make: Make) -> None:
    rig = make(1)
    rig.up()
    rig.tell(CancelRequested("the user wants it"))
    decisions = rig.tell(SparkJobEnded(0, 1, None))
    assert len(decisions.recalls) == 1
    assert decisions.over is decisions[-1]


def test_a_new_instance_fences_the_one_that_is_there(make: Make) -> None:
    rig = make()
    rig.up()
    decisions = rig.hello("1b")
    assert decisions.sent(Cancel)[0][0] == "1a"
    assert ("0a", DropPeers(2, (1,))) in decisions.sent()
    assert rig.said("1a", PeersDropped(2)) == []
    assert rig.lose("1a") == []
    assert len(rig.said("0a", PeersDropped(2)).recalls) == 1


def test_silence_is_a_loss_and_ends_the_spark_job(make: Make) -> None:
    rig = make()
    rig.up()
    decisions = rig.pass_ms(1_000, ("0a",))
    assert ("0a", DropPeers(2, (1,))) in decisions.sent()
    assert CancelSlot(1, 1) in decisions
    assert not [it for it in rig.pass_ms(9_900, ("0a",)) if isinstance(it, SubmitSlot)]
    # It cannot even be ended: another one takes its place all the same.
    assert SubmitSlot(1, 2) in rig.pass_ms(200, ("0a",))
    assert rig.tell(SparkJobEnded(1, 1, "at last")) == []


def test_a_driver_that_stood_still_blames_no_slot(make: Make) -> None:
    rig = make()
    rig.up()
    rig.now += 60_000
    assert rig.tell(Tick()) == []
    assert rig.core.state is JobState.RUNNING


def test_a_slot_that_does_not_come_back_is_ended_and_submitted_again(make: Make) -> None:
    rig = make()
    rig.up()
    rig.lose("1a")  # but its Spark job goes on: Spark may try again by itself
    assert not [it for it in rig.pass_ms(4_900, ("0a",)) if not isinstance(it, RecallStreams)]
    assert CancelSlot(1, 1) in rig.pass_ms(200, ("0a",))
    # The pause has long been over.
    assert SubmitSlot(1, 2) in rig.tell(SparkJobEnded(1, 1, "cancelled"))


def test_one_that_has_worked_is_repaired_from_it(make: Make) -> None:
    rig = make(1)
    rig.up()
    for instance in "ab":
        rig.said(f"0{instance}", SlotFailed("slot 1 cannot be reached", lasting=instance == "b"))
        rig.tell(SparkJobEnded(0, rig.core.slots[0].attempt, None))
        rig.pass_ms(60_000 if instance == "a" else 100)
        if instance == "a":
            rig.hello("0b")
            rig.recalled()
    assert not rig.core.state.is_final


def test_the_restart_strategy_gives_up(make: Make) -> None:
    rig = make(1, restart=FixedDelay(1, "10ms"))
    rig.up()
    rig.said("0a", SlotFailed("out of memory", "count", "trace"))
    rig.tell(SparkJobEnded(0, 1, None))
    assert SubmitSlot(0, 2) in rig.pass_ms(50)
    rig.hello("0b")
    rig.recalled()
    assert rig.core.restarts == 1
    rig.tell(SparkJobEnded(0, 2, None))
    end = rig.said("0b", SlotFailed("out of memory", "count", "trace")).over
    assert isinstance(end.error, SlotLostError)
    assert "given up after 1 restart: slot 0: it failed in count: out of memory" in str(end.error)
    assert (rig.core.restarts, rig.core.slots[0].restarts) == (1, 1)  # the second loss was no restart


@pytest.mark.parametrize("settled", [0, 1])
def test_a_slot_that_takes_records_and_does_none_is_not_started_for_ever(make: Make, settled: int) -> None:
    """It dies behind ``reset_after`` each time, so that time alone tells nothing. Some losses are a search's."""
    rig = make(1, restart=ExponentialDelay("10ms", "10ms", reset_after="1s", attempts=3))
    rig.up()
    for loss in range(1, 21):
        instance = f"0{chr(ord('a') + loss - 1)}"
        for _ in range(40):
            rig.said(instance, Heartbeat(0, 1, False, {"records_in/work": 5, "settled": settled}))
            rig.pass_ms(50)
        rig.tell(SparkJobEnded(0, loss, None))
        end = rig.said(instance, SlotFailed("out of memory", "work", "trace"))
        if any(isinstance(each, Over) for each in end):
            assert not settled
            assert isinstance(end.over.error, SlotLostError)
            return
        rig.pass_ms(50)
        rig.hello(f"0{chr(ord('a') + loss)}")
        rig.recalled()
        rig.started(f"0{chr(ord('a') + loss)}")
    assert settled


def test_a_slot_that_another_process_takes_over_has_restarted(make: Make) -> None:
    rig = make(1)
    rig.up()
    rig.hello("0b")
    assert rig.core.restarts == 1
    assert rig.core.state is JobState.RECOVERING


@pytest.mark.parametrize(
    ("attempts", "losses", "expected"),
    [
        (1, 2, "2 times in a row a slot was lost within 10 s of the replay"),
        (
            2,
            3 + LEFTOVERS,
            "the restart strategy has given up after 6 restarts: slot 0 (process 1 on host): gone; Spark says: crashed "
            "(while no record",
        ),
    ],
)
def test_losses_right_after_replays_are_suspicious(
    attempts: int, losses: int, expected: str, make: Make
) -> None:
    rig = make(1, restart=FixedDelay(attempts, "10ms"))
    rig.up()
    for attempt in range(1, losses + 1):
        rig.tell(SparkJobEnded(0, attempt, "crashed"))
        decisions = rig.lose(f"0{'abcdefgh'[attempt - 1]}")
        if attempt < losses:
            rig.pass_ms(50)
            rig.hello(f"0{'abcdefgh'[attempt]}")
            rig.recalled()
    message = str(decisions.over.error)
    assert message.startswith(expected)
    assert "Spark says: crashed" in message


def test_untracked_a_loss_ends_the_job(make: Make) -> None:
    rig = make(tracked=False, restart=FixedDelay(5, "10ms"))
    assert not [it for it in rig.began if isinstance(it, RecallStreams)]
    rig.hello("0a")
    rig.lose("0a")  # before anything ran: harmless
    rig.hello("0b")
    assert rig.hello("1a").sent(Deploy)
    decisions = rig.lose("1a")
    assert decisions.sent(Cancel)[0][0] == "0b"
    rig.tell(SparkJobEnded(0, 1, None))
    assert isinstance(rig.tell(SparkJobEnded(1, 1, "killed")).over.error, SlotLostError)
