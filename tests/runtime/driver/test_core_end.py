"""How the rules of a job bring it to its end: every race is a sequence of events."""

from __future__ import annotations

from typing import Any

from ftlayer.common.rules.restart import NoRestart
from ftlayer.errors import JobError
from ftlayer.runtime.driver.rules.events import (
    AskVertexStatus,
    Broke,
    Broken,
    CancelRequested,
    CancelSlot,
    DrainRequested,
    JobState,
    Over,
    SparkJobEnded,
    StatusKnown,
    SubmitSlot,
    Tick,
)
from ftlayer.runtime.protocol.messages import (
    Cancel,
    DropPeers,
    EndReplays,
    Heartbeat,
    PeersDropped,
    Probe,
    SlotEnded,
    StopSources,
)
from ftlayer.vertex.calls import StreamStatus

Make = Any
DRAINED = StreamStatus(0, 0, 0, 0, -1)


def test_a_bounded_job_ends(make: Make) -> None:
    rig = make()
    rig.up()
    first = rig.quiet_until_probed(("0a", "1a"))
    rig.said("0a", Heartbeat(first, 5, True))
    assert rig.said("1a", Heartbeat(first, 5, True)) == [AskVertexStatus(first)]
    probes = rig.tell(StatusKnown(first, DRAINED)).sent(Probe)
    second = probes[0][1].number
    rig.said("0a", Heartbeat(second, 5, True))
    assert rig.said("1a", Heartbeat(second, 5, True)).sent() == [("0a", EndReplays()), ("1a", EndReplays())]
    assert rig.core.state is JobState.ENDING
    for slot in (0, 1):
        rig.said(f"{slot}a", SlotEnded())
        rig.tell(Broke(slot, f"{slot}a", "over"))
    assert rig.core.state is JobState.STOPPING
    rig.tell(SparkJobEnded(0, 1, None))
    assert rig.tell(SparkJobEnded(1, 1, None)).over == Over(JobState.ENDED)
    assert rig.core.state is JobState.ENDED


def test_activity_between_the_rounds_puts_the_end_off(make: Make) -> None:
    rig = make(1)
    rig.up()
    first = rig.quiet_until_probed(("0a",))
    rig.said("0a", Heartbeat(first, 5, True))
    (second,) = rig.tell(StatusKnown(first, DRAINED)).sent(Probe)
    assert not rig.said("0a", Heartbeat(second[1].number, 6, True)).sent(EndReplays)


def test_pending_records_put_the_end_off(make: Make) -> None:
    rig = make(1)
    rig.up()
    first = rig.quiet_until_probed(("0a",))
    rig.said("0a", Heartbeat(first, 5, True))
    assert rig.tell(StatusKnown(first, StreamStatus(0, 0, 3, 0, 700))) == []
    assert not rig.pass_ms(650).sent(Probe)
    assert rig.pass_ms(100).sent(Probe)


def test_a_loss_while_ending_is_an_end(make: Make) -> None:
    rig = make(1)
    rig.up()
    first = rig.quiet_until_probed(("0a",))
    rig.said("0a", Heartbeat(first, 5, True))
    (second,) = rig.tell(StatusKnown(first, DRAINED)).sent(Probe)
    rig.said("0a", Heartbeat(second[1].number, 5, True))
    rig.lose("0a")
    assert rig.tell(SparkJobEnded(0, 1, "killed")).over == Over(JobState.ENDED)


def test_slots_that_had_ended_start_again_with_a_lost_one(make: Make) -> None:
    rig = make(3)
    rig.up()
    rig.said("2a", SlotEnded())
    rig.tell(SparkJobEnded(2, 1, None))
    decisions = rig.lose("1a")
    assert decisions.sent() == [("0a", DropPeers(2, (1, 2)))]
    assert SubmitSlot(2, 2) in decisions


def test_a_slot_that_ends_during_a_repair_starts_again(make: Make) -> None:
    rig = make(3)
    rig.up()
    rig.lose("1a")
    decisions = rig.said("2a", SlotEnded())
    assert ("0a", DropPeers(3, (2,))) in decisions.sent()


def test_drain_reaches_slots_that_come_later(make: Make) -> None:
    rig = make()
    rig.up()
    rig.lose("1a")
    assert rig.tell(DrainRequested()).sent() == [("0a", StopSources())]
    assert rig.tell(DrainRequested()) == []
    rig.hello("1b")
    rig.said("0a", PeersDropped(2))
    assert [to for to, _ in rig.recalled().sent(StopSources)] == ["1b"]
    rig.started("1b")
    assert rig.core.state is JobState.DRAINING


def test_cancel(make: Make) -> None:
    rig = make()
    rig.up()
    assert rig.tell(CancelRequested("enough")).sent() == [("0a", Cancel("enough")), ("1a", Cancel("enough"))]
    rig.said("0a", SlotEnded())
    rig.tell(SparkJobEnded(0, 1, None))
    # The other one does not listen.
    assert CancelSlot(1, 1) not in rig.pass_ms(4_900)
    assert CancelSlot(1, 1) in rig.pass_ms(1_200)
    assert rig.tell(SparkJobEnded(1, 1, "cancelled")).over == Over(JobState.CANCELLED)
    assert rig.tell(Tick()) == []
    assert rig.hello("1b") == []


def test_an_end_that_spark_does_not_bring_about(make: Make) -> None:
    rig = make(1)
    rig.up()
    rig.tell(CancelRequested("enough"))
    assert rig.pass_ms(15_000).over == Over(JobState.CANCELLED)


def test_who_comes_while_the_job_stops_is_sent_away(make: Make) -> None:
    rig = make()
    rig.tell(CancelRequested("enough"))
    assert rig.hello("0a").sent(Cancel)


def test_a_broken_driver_side(make: Make) -> None:
    rig = make(restart=NoRestart())
    rig.up()
    error = JobError("the vertex is gone\nfor good")
    assert rig.tell(Broken(error)).sent()[0] == ("0a", Cancel("the vertex is gone"))
    rig.tell(SparkJobEnded(0, 1, None))
    assert rig.tell(SparkJobEnded(1, 1, None)).over.error is error
