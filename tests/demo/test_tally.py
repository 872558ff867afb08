from __future__ import annotations

import pytest

from ftlayer.cli.demo.choices import Kill, Kind, Victim
from ftlayer.cli.demo.driver import (
    BatchDone,
    Event,
    Finished,
    KillPlan,
    Progress,
    Restarted,
    Started,
    Writing,
    from_line,
    to_line,
)
from ftlayer.cli.demo.run import BatchTally, Recovery, TopologyTally
from ftlayer.cli.demo.supervisor import BackAgain, Happening, Killed, WentOn


def test_counts_follow_the_batches() -> None:
    tally = BatchTally()
    happenings: list[Happening] = [
        Started(),
        BatchDone(0, False, rows_in=100, waiting=5, dead=0, delivered=0, seconds=9.0),
        BatchDone(1, False, rows_in=100, waiting=4, dead=1, delivered=0, seconds=1.0),
        Killed(Victim.DRIVER, "in batch 2"),
        Started(),
        BackAgain(Victim.DRIVER, 3.0),
        BatchDone(2, True, rows_in=100, waiting=1, dead=0, delivered=0, seconds=8.0),
        WentOn(Victim.DRIVER, 7.0),
        BatchDone(3, False, rows_in=10, waiting=2, dead=2, delivered=10, seconds=3.0),
    ]
    for happening in happenings:
        tally.count(happening)
    assert (tally.batches, tally.seen, tally.done) == (4, 300, 295)
    assert (tally.waiting, tally.dead, tally.retried) == (2, 3, 10)
    # The first batch of each driver is left out of the rates.
    assert tally.batch_seconds == [1.0, 3.0]
    assert tally.lines_per_second == pytest.approx(110 / 4)
    assert tally.p50_batch_s == 2.0
    assert tally.recoveries == [Recovery("driver", "in batch 2", 3.0, 7.0)]


def test_a_topology_s_totals_are_those_of_all_its_drivers() -> None:
    tally = TopologyTally()
    happenings: list[Happening] = [
        Started(),
        Progress(100, 1, [7, 8], {"restores": 0, "waiting": 4}),
        Progress(200, 3, [7, 8], {"restores": 2, "waiting": 3}),
        Killed(Victim.DRIVER, "when 200 lines had been read"),
        Started(),
        BackAgain(Victim.DRIVER, 3.0),
        Progress(300, 1, [9, 0], {"restores": 1, "waiting": 5}),
        WentOn(Victim.DRIVER, 4.0),
    ]
    for happening in happenings:
        tally.count(happening)
    assert (tally.seen, tally.waiting) == (300, 5)
    assert tally.figures() == {"read": "300", "restores": "3", "waiting": "5"}
    assert tally.values() == {"restores": 3}
    assert tally.sentence() == "300 lines read, 3 restores, 5 waiting"
    assert tally.recoveries == [Recovery("driver", "when 200 lines had been read", 3.0, 4.0)]


@pytest.mark.parametrize(
    "event",
    [
        Started(),
        Writing(3),
        BatchDone(1, True, 10, 1, 2, 3, 0.5),
        Progress(7, 1, [0, 12], {"pending": 3}),
        Restarted("two\nlines"),
        Finished(),
    ],
)
def test_events_survive_the_pipe(event: Event) -> None:
    assert from_line(to_line(event)) == event
    assert from_line(to_line(event)[:-1]) is None


def test_kills_are_due_once_each_in_order() -> None:
    plan = KillPlan.of(Kind.QUERY, Kill.ALL, 20)
    due = [(batch, plan.due(batch)) for batch in range(20)]
    assert [(batch, victim) for batch, victim in due if victim] == [(7, Victim.VERTEX), (13, Victim.DRIVER)]
    assert KillPlan.of(Kind.QUERY, Kill.NONE, 20).due(19) is None
    # A batch that is written again, or one that was missed, does not lose a kill.
    late = KillPlan.of(Kind.QUERY, Kill.ALL, 20)
    assert [late.due(15), late.due(15), late.due(15)] == [Victim.VERTEX, Victim.DRIVER, None]
