"""What is told of a job's past: losses, restarts and changes of state, each once and in its order."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ftlayer.common.rules.restart import FixedDelay
from ftlayer.errors import FTLayerError
from ftlayer.runtime.driver.rules.events import Broke, Broken, JobState, SlotRecord, SparkJobEnded
from ftlayer.runtime.driver.rules.job_core import KEPT, PROCESS_GONE, Incidents
from ftlayer.runtime.driver.rules.job_rules import FailureNoted
from ftlayer.runtime.protocol.messages import Death, Hello, PeersDropped, SlotFailed, SourceFailed

Make = Any


def told(rig: Any) -> list[tuple[str, int, str]]:
    return [(each.kind, each.slot, each.text) for each in rig.core.incidents.at(0)]


def test_a_loss_and_what_comes_of_it(make: Make) -> None:
    rig = make(2)
    rig.up()
    assert told(rig) == [("state", -1, "starting → initializing"), ("state", -1, "initializing → running")]
    rig.now = 70
    rig.said("1a", SlotFailed("ValueError: no", "parse"))
    rig.tell(SparkJobEnded(1, 1, None))
    rig.pass_ms(50, ("0a",))
    rig.hello("1b")
    rig.said("0a", PeersDropped(2))
    rig.recalled()
    rig.started("1b")
    assert rig.core.state is JobState.RUNNING
    loss, recovering, restart, running = told(rig)[2:]
    assert loss[:2] == ("loss", 1)
    assert "ValueError: no" in loss[2]
    assert recovering[2].startswith("running → recovering: slot 1: ")
    assert restart == ("restart", 1, "slot 1 is started again (1) in 0.05 s, 1 of 10 in a row")
    assert running[2] == "recovering → running: runs again, restart 1"
    assert [each.at_ms for each in rig.core.incidents.at(1_000)][2:4] == [1_070, 1_070]


def test_a_process_that_is_gone_is_one_loss_that_names_it(make: Make) -> None:
    rig = make(1)
    rig.up()
    rig.tell(Broke(0, "0a", "it ended itself: it called os._exit(7)\nin f"))
    rig.tell(SparkJobEnded(0, 1, f"{PROCESS_GONE} (crashed)."))
    rig.pass_ms(50)
    rig.said(
        "0b", Hello(0, "0b", "grpc://0b", "host", 2, (Death("0a", 0, "it called os._exit(7)", stack="in f"),))
    )
    (loss,) = [each for each in told(rig) if each[0] == "loss"]
    assert loss == ("loss", 0, "slot 0 (process 1 on host): it ended itself: it called os._exit(7)\nin f")
    rig.recalled()
    rig.started("0b")
    # On another host only the next process can tell.
    rig.lose("0b")
    rig.tell(SparkJobEnded(0, 2, "ExecutorLostFailure: exit code 137"))
    rig.pass_ms(1_000)
    rig.said("0c", Hello(0, "0c", "grpc://0c", "host", 3, (Death("0b", 0, "Aborted"),)))
    assert [text for kind, _, text in told(rig) if kind == "loss"][1:] == [
        "slot 0 (process 2 on host): gone",
        "slot 0 (process 2 on host): gone; Spark says: ExecutorLostFailure: exit code 137",
        "slot 0: it ended itself: Aborted",
    ]


def test_a_failure_of_the_job_is_told_though_a_loss_reads_alike(make: Make) -> None:
    rig = make(1)
    rig.up()
    rig.lose("0a")
    rig.core._carry_out(FailureNoted("the commit failed: gone"), rig.now)
    assert rig.core.last_failure == "the commit failed: gone"


def test_a_source_that_fails_is_a_loss_and_the_end_says_why(make: Make) -> None:
    rig = make(1, restart=FixedDelay(1, "1s"))
    rig.up()
    rig.said("0a", SourceFailed("lines", 0, "disk full", 1_000))
    rig.tell(Broken(FTLayerError("no more")))
    texts = [text for _, _, text in told(rig)]
    assert "slot 0: disk full" in texts
    assert texts[-1] == "running → stopping"
    rig.tell(SparkJobEnded(0, 1, None))
    rig.pass_ms(40_000)
    assert told(rig)[-1] == ("state", -1, "stopping → failed: no more")


def test_what_is_said_again_of_one_failure_is_no_second_loss() -> None:
    incidents = Incidents()
    incidents.loss("slot 1: gone", 5, 1)
    incidents.loss("slot 1: gone", 6)
    assert [(each.at_ms, each.slot) for each in incidents.at(0)] == [(5, 1)]
    slot = SlotRecord(1, restarts=1)
    incidents.look(JobState.STARTING, [slot], "", 1, 7)
    incidents.loss("slot 1: gone", 8, 1)
    assert [each.kind for each in incidents.at(0)] == ["loss", "restart", "loss"]


@given(st.lists(st.tuples(st.sampled_from(["loss", "state", "restart"]), st.integers(0, 9)), max_size=200))
def test_the_last_ones_are_kept_in_their_order(events: list[tuple[str, int]]) -> None:
    incidents, slots, expected = Incidents(), [SlotRecord(0)], []
    states, state, lost = list(JobState), JobState.STARTING, ""
    for now, (kind, number) in enumerate(events):
        if kind == "loss":
            incidents.loss(f"loss {number}", now)
            if lost != f"loss {number}":
                lost = f"loss {number}"
                expected.append((now, kind))
        elif kind == "restart":
            slots[0].restarts += 1
            lost = ""
            incidents.look(state, slots, "", 0, now)
            expected.append((now, kind))
        else:
            before, state = state, states[number]
            incidents.look(state, slots, "", 0, now)
            expected += [(now, kind)] if state is not before else []
    assert [(each.at_ms, each.kind) for each in incidents.at(0)] == expected[-KEPT:]
