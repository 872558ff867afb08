"""The coordinator's rules one by one, by hand: time is an argument, and every race is a sequence of events."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from ftlayer.config import TopologyOptions
from ftlayer.errors import (
    FunctionLoadError,
    JobError,
    JobStartError,
    SessionLostError,
    SlotLostError,
    SourceRowError,
)
from ftlayer.restart import ExponentialDelay, FixedDelay, NoRestart, RestartStrategy
from ftlayer.runtime.acker_mode.driver.isolation import LEFTOVERS
from ftlayer.runtime.acker_mode.driver.job_mode import AckerJob
from ftlayer.runtime.driver.crew import Crew
from ftlayer.runtime.driver.events import (
    AskSession,
    AskVertexStatus,
    Broke,
    Broken,
    CancelRequested,
    CancelSlot,
    CountTasks,
    DrainRequested,
    Event,
    JobInstruction,
    JobState,
    Over,
    RecallDone,
    RecallStreams,
    Said,
    SendTo,
    SessionOver,
    SlotDown,
    SlotUp,
    SparkJobEnded,
    StatusKnown,
    SubmitSlot,
    TaskCounts,
    TasksCounted,
    Tick,
)
from ftlayer.runtime.driver.job_core import JobCore
from ftlayer.runtime.driver.mode import JobMode
from ftlayer.runtime.driver.untracked import UntrackedJob
from ftlayer.runtime.protocol.messages import (
    Cancel,
    Deploy,
    DropPeers,
    EndReplays,
    Heartbeat,
    Hello,
    PeersDropped,
    PeersUp,
    Probe,
    ReplayNow,
    SlotEnded,
    SlotFailed,
    StopSources,
    TasksStarted,
)
from ftlayer.vertex.calls import StreamStatus

OPTIONS = TopologyOptions(heartbeat_ms=100, heartbeat_timeout_ms=1_000, start_timeout_ms=5_000)
TIMEOUT_MS = 1_200
DRAINED = StreamStatus(0, 0, 0, 0, -1)
UNLOADABLE = """Traceback (most recent call last):
  File "submit.py", line 126, in task
    mine = replace(pickle.loads(order), slot=slot)
ModuleNotFoundError: No module named 'helper'
"""


def recalls_of(decisions: list[JobInstruction]) -> list[int]:
    return [it.number for it in decisions if isinstance(it, RecallStreams)]


class Rig:
    """A core with a clock, and short names for what happens to it."""

    def __init__(self, slots: int = 2, tracked: bool = True, restart: RestartStrategy | None = None) -> None:
        restart = ExponentialDelay("50ms", "1s", "1m") if restart is None else restart
        crew = Crew(slots, OPTIONS.start_timeout_ms)
        mode: JobMode = UntrackedJob(crew, run="r", restart=restart)
        if tracked:
            mode = AckerJob(crew, run="r", restart=restart, timeout_ms=TIMEOUT_MS)
        self.core = JobCore(crew, OPTIONS, mode)
        self.now = 0
        self.began = self.core.start(0)
        self.recalls = recalls_of(self.began)

    def tell(self, event: Event) -> list[JobInstruction]:
        decisions = self.core.handle(event, self.now)
        self.core.validate()
        self.recalls += recalls_of(decisions)
        return decisions

    def recalled(self) -> list[JobInstruction]:
        """The vertex answers all it was asked to recall."""
        decisions: list[JobInstruction] = []
        while self.recalls:
            decisions += self.tell(RecallDone(self.recalls.pop(0), 0))
        return decisions

    def said(self, instance: str, message: Any) -> list[JobInstruction]:
        return self.tell(Said(int(instance[0]), instance, message))

    def hello(self, instance: str) -> list[JobInstruction]:
        return self.said(instance, Hello(int(instance[0]), instance, f"grpc://{instance}", "host", 1))

    def up(self) -> list[JobInstruction]:
        """Bring all slots up, as instances "0a", "1a", …"""
        self.recalled()
        decisions: list[JobInstruction] = []
        for slot in range(len(self.core.slots)):
            decisions += self.hello(f"{slot}a")
        for slot in range(len(self.core.slots)):
            decisions += self.started(f"{slot}a")
        return decisions

    def started(self, instance: str) -> list[JobInstruction]:
        """An instance says that its tasks run."""
        return self.said(instance, TasksStarted())

    def pass_ms(self, ms: int, beats: tuple[str, ...] = ()) -> list[JobInstruction]:
        decisions: list[JobInstruction] = []
        for _ in range(ms // 50):
            self.now += 50
            for instance in beats:
                decisions += self.said(instance, Heartbeat(0, 1, False))
            decisions += self.tell(Tick())
        return decisions


def sent(decisions: list[JobInstruction], kind: type | None = None) -> list[tuple[str, Any]]:
    found = [(it.instance, it.message) for it in decisions if isinstance(it, SendTo)]
    return [one for one in found if kind is None or isinstance(one[1], kind)]


def over(decisions: list[JobInstruction]) -> Over:
    (found,) = [it for it in decisions if isinstance(it, Over)]
    return found


def lose(rig: Rig, instance: str) -> list[JobInstruction]:
    return rig.tell(Broke(int(instance[0]), instance, "gone"))


def test_a_start() -> None:
    rig = Rig()
    assert rig.began == [RecallStreams(1), SubmitSlot(0, 1), SubmitSlot(1, 1)]
    assert rig.core.state is JobState.STARTING
    assert rig.hello("0a") == []
    assert rig.hello("1a") == []  # the vertex has not recalled yet
    decisions = rig.tell(RecallDone(1, 0))
    (_, deploy), (_, other) = sent(decisions, Deploy)
    assert deploy == other
    assert (deploy.epoch, deploy.run, [peer.instance for peer in deploy.peers]) == (1, "r/1", ["0a", "1a"])
    assert [it for it in decisions if isinstance(it, SlotUp)] == [SlotUp(0), SlotUp(1)]
    assert [instance for instance, _ in sent(decisions, ReplayNow)] == ["0a", "1a"]
    assert rig.core.state is JobState.INITIALIZING
    assert rig.started("1a") == []
    assert rig.core.state is JobState.INITIALIZING
    assert rig.started("0a") == []
    assert rig.core.state is JobState.RUNNING


def test_a_job_ends_at_once_when_its_session_is_gone() -> None:
    rig = Rig(restart=FixedDelay(attempts=1 << 20, delay="10ms"))
    rig.up()
    lose(rig, "0a")
    error = SessionLostError("the JVM is gone")
    decisions = rig.tell(SessionOver(error))
    # Spark jobs are not waited for: no one is left to tell of their end.
    assert over(decisions) == Over(JobState.FAILED, error)
    assert not [it for it in decisions if isinstance(it, CancelSlot)]
    assert [instance for instance, _ in sent(decisions, Cancel)] == ["1a"]


def test_a_job_that_is_being_cancelled_does_not_wait_for_a_session_that_is_gone() -> None:
    rig = Rig()
    rig.up()
    rig.tell(CancelRequested("enough"))
    assert AskSession() in rig.pass_ms(6_000)
    assert over(rig.tell(SessionOver(SessionLostError("gone")))).state is JobState.CANCELLED


def test_the_session_is_asked_for_while_a_slot_is_missing() -> None:
    rig = Rig()
    rig.up()
    assert AskSession() not in rig.pass_ms(20_000, ("0a", "1a"))
    decisions = lose(rig, "1a") + rig.pass_ms(9_000, ("0a",))
    assert decisions.count(AskSession()) == 2


def test_a_failure_says_once_what_spark_said() -> None:
    rig = Rig(restart=FixedDelay(attempts=1 << 20, delay="10ms"))
    rig.up()
    lose(rig, "1a")
    for attempt in range(1, 9):
        rig.tell(SparkJobEnded(1, attempt, f"refused {attempt}"))
        rig.pass_ms(50, ("0a",))
    assert rig.core.slots[1].failure == "slot 1: gone; Spark says: refused 8"


def test_a_repair() -> None:
    rig = Rig(3)
    rig.up()
    decisions = lose(rig, "1a")
    assert sent(decisions) == [("0a", DropPeers(2, (1,))), ("2a", DropPeers(2, (1,)))]
    assert SlotDown(1) in decisions
    assert rig.core.state is JobState.RECOVERING
    assert rig.tell(SparkJobEnded(1, 1, "crashed")) == []
    assert rig.pass_ms(50, ("0a", "2a")) == [SubmitSlot(1, 2)]
    assert rig.hello("1b") == []
    assert rig.said("0a", PeersDropped(2)) == []
    rig.recalled()
    assert rig.core.state is JobState.RECOVERING
    assert len(recalls_of(rig.said("2a", PeersDropped(2)))) == 1
    decisions = rig.recalled()
    (peer,) = sent(decisions, PeersUp)[0][1].peers
    assert (peer.slot, peer.instance) == (1, "1b")
    assert [to for to, _ in sent(decisions, PeersUp)] == ["0a", "2a"]
    ((to, deploy),) = sent(decisions, Deploy)
    assert (to, deploy.epoch, deploy.run, len(deploy.peers)) == ("1b", 2, "r/2", 3)
    assert [to for to, _ in sent(decisions, ReplayNow)] == ["0a", "1b", "2a"]
    assert rig.core.state is JobState.RECOVERING
    rig.started("1b")
    assert rig.core.state is JobState.RUNNING
    assert rig.core.last_failure.startswith("slot 1: gone")


def test_a_second_loss_during_a_repair_begins_it_again() -> None:
    rig = Rig(3)
    rig.up()
    lose(rig, "1a")
    rig.hello("1b")
    rig.said("0a", PeersDropped(2))
    rig.said("2a", PeersDropped(2))
    assert sent(lose(rig, "2a")) == [("0a", DropPeers(3, (2,)))]
    assert sent(rig.recalled()) == []  # from before the second loss, or before all know of it
    rig.hello("2b")
    assert len(recalls_of(rig.said("0a", PeersDropped(3)))) == 1
    decisions = rig.recalled()
    assert sorted(peer.instance for peer in sent(decisions, PeersUp)[0][1].peers) == ["1b", "2b"]
    assert [to for to, _ in sent(decisions, Deploy)] == ["1b", "2b"]


def test_all_slots_lost_at_once() -> None:
    rig = Rig()
    rig.up()
    lose(rig, "0a")
    assert sent(lose(rig, "1a")) == []
    rig.hello("0b")
    rig.recalled()
    assert len(recalls_of(rig.hello("1b"))) == 1
    assert [to for to, _ in sent(rig.recalled(), Deploy)] == ["0b", "1b"]


def test_what_is_pending_is_recalled_again_and_again_while_a_slot_is_away() -> None:
    """So that it does not time out: the lost slot's calls may come late, and some who send to it do not know."""
    rig = Rig(3)
    rig.up()
    assert len(recalls_of(lose(rig, "1a"))) == 1
    assert recalls_of(rig.said("0a", PeersDropped(2))) == []
    assert len(recalls_of(rig.said("2a", PeersDropped(2)))) == 1
    beats = ("0a", "2a")
    times = [rig.now for _ in range(100) if recalls_of(rig.pass_ms(50, beats))]
    gaps = [after - before for before, after in pairwise(times)]
    assert len(times) >= 10
    assert all(TIMEOUT_MS // 3 <= gap <= TIMEOUT_MS // 3 + 50 for gap in gaps)
    rig.hello("1b")
    assert [to for to, _ in sent(rig.recalled(), Deploy)] == ["1b"]
    assert recalls_of(rig.pass_ms(2 * TIMEOUT_MS, (*beats, "1b"))) == []


def test_the_pause_before_a_restart_begins_at_the_loss() -> None:
    """Spark says some tenths of a second later that the job of a process that is gone has ended."""
    rig = Rig(2, restart=FixedDelay(attempts=9, delay="300ms"))
    rig.up()
    lose(rig, "1a")
    assert not [it for it in rig.pass_ms(200, ("0a",)) if isinstance(it, SubmitSlot)]
    assert rig.tell(SparkJobEnded(1, 1, "crashed")) == []
    assert not [it for it in rig.pass_ms(50, ("0a",)) if isinstance(it, SubmitSlot)]
    assert SubmitSlot(1, 2) in rig.pass_ms(50, ("0a",))
    # It has never been up: nothing was lost, and its pause begins when it ends.
    rig.tell(SparkJobEnded(1, 2, "crashed"))
    assert not [it for it in rig.pass_ms(250, ("0a",)) if isinstance(it, SubmitSlot)]
    assert SubmitSlot(1, 3) in rig.pass_ms(100, ("0a",))


def test_what_a_cancelled_job_leaves_is_recalled_for_its_next_start() -> None:
    rig = Rig(1)
    rig.up()
    rig.tell(CancelRequested("the user wants it"))
    decisions = rig.tell(SparkJobEnded(0, 1, None))
    assert len(recalls_of(decisions)) == 1
    assert over(decisions) is decisions[-1]


def test_a_new_instance_fences_the_one_that_is_there() -> None:
    rig = Rig()
    rig.up()
    decisions = rig.hello("1b")
    assert sent(decisions, Cancel)[0][0] == "1a"
    assert ("0a", DropPeers(2, (1,))) in sent(decisions)
    assert rig.said("1a", PeersDropped(2)) == []
    assert lose(rig, "1a") == []
    assert len(recalls_of(rig.said("0a", PeersDropped(2)))) == 1


def test_silence_is_a_loss_and_ends_the_spark_job() -> None:
    rig = Rig()
    rig.up()
    decisions = rig.pass_ms(1_000, ("0a",))
    assert ("0a", DropPeers(2, (1,))) in sent(decisions)
    assert CancelSlot(1, 1) in decisions
    assert not [it for it in rig.pass_ms(9_900, ("0a",)) if isinstance(it, SubmitSlot)]
    # It cannot even be ended: another one takes its place all the same.
    assert SubmitSlot(1, 2) in rig.pass_ms(200, ("0a",))
    assert rig.tell(SparkJobEnded(1, 1, "at last")) == []


def test_a_driver_that_stood_still_blames_no_slot() -> None:
    rig = Rig()
    rig.up()
    rig.now += 60_000
    assert rig.tell(Tick()) == []
    assert rig.core.state is JobState.RUNNING


def test_a_slot_that_does_not_come_back_is_ended_and_submitted_again() -> None:
    rig = Rig()
    rig.up()
    lose(rig, "1a")  # but its Spark job goes on: Spark may try again by itself
    assert not [it for it in rig.pass_ms(4_900, ("0a",)) if not isinstance(it, RecallStreams)]
    assert CancelSlot(1, 1) in rig.pass_ms(200, ("0a",))
    # The pause has long been over.
    assert SubmitSlot(1, 2) in rig.tell(SparkJobEnded(1, 1, "cancelled"))


def test_slots_that_do_not_come_up() -> None:
    rig = Rig()
    rig.hello("0a")
    assert rig.pass_ms(5_000, ("0a",)).count(CountTasks()) == 1
    decisions = rig.tell(TasksCounted(None))
    assert sent(decisions, Cancel)[0][0] == "0a"
    assert CancelSlot(1, 1) in decisions
    rig.tell(SparkJobEnded(0, 1, None))
    end = over(rig.tell(SparkJobEnded(1, 1, "cancelled")))
    assert end.state is JobState.FAILED
    assert isinstance(end.error, JobStartError)
    assert "slot 1 of 2 were not up within 5000 ms" in str(end.error)


def test_what_spark_says_of_slots_that_do_not_come_up() -> None:
    def error(counts: TaskCounts) -> str:
        rig = Rig(3)
        rig.hello("0a")
        rig.pass_ms(5_000, ("0a",))
        rig.tell(TasksCounted(counts))
        rig.tell(SparkJobEnded(0, 1, None))
        rig.tell(SparkJobEnded(1, 1, None))
        return str(over(rig.tell(SparkJobEnded(2, 1, None))).error)

    both = error(TaskCounts(4, 4, frozenset({0, 1})))
    assert "Spark has started the tasks of slot 1: their Python processes still start and import" in both
    assert "Spark has not started the tasks of slot 2: of 4 task slots 4 are busy and 0 free" in both
    assert "end the other Spark jobs" in both
    slow = error(TaskCounts(4, 3, frozenset({0, 1, 2})))
    assert "slots 1, 2" in slow
    assert "start_timeout_ms=…" in slow
    assert "other Spark jobs" not in slow
    assert "2 free, so it is about to" in error(TaskCounts(3, 1, frozenset({0})))
    assert "there is no executor yet" in error(TaskCounts(0, 0, frozenset()))


def test_slots_that_come_up_while_spark_is_asked_are_taken() -> None:
    rig = Rig()
    rig.hello("0a")
    assert CountTasks() in rig.pass_ms(5_000, ("0a",))
    rig.up()
    assert rig.tell(TasksCounted(TaskCounts(4, 4, frozenset()))) == []
    assert rig.core.state is JobState.RUNNING


def test_waiting_for_what_spark_says_has_an_end() -> None:
    rig = Rig(1)
    assert CountTasks() in rig.pass_ms(5_000)
    rig.pass_ms(5_000)
    assert rig.core.state is JobState.STOPPING


@pytest.mark.parametrize("error", ["ImportError: no module", None])
def test_a_slot_that_never_starts(error: str | None) -> None:
    rig = Rig(1)
    rig.tell(SparkJobEnded(0, 1, error))
    assert SubmitSlot(0, 2) in rig.pass_ms(100)
    end = over(rig.tell(SparkJobEnded(0, 2, error)))
    assert isinstance(end.error, JobStartError)
    assert (error or "before it had reached the driver") in str(end.error)


def test_what_kept_a_slot_from_its_hello_is_told() -> None:
    rig = Rig(1)
    for attempt in (1, 2):
        rig.said("0x", SlotFailed("address in use", "", "trace"))
        decisions = rig.tell(SparkJobEnded(0, attempt, None))
        if attempt == 1:
            decisions = rig.pass_ms(100)
    assert "address in use" in str(over(decisions).error)


def test_what_another_attempt_would_not_mend_ends_a_job_that_has_never_worked() -> None:
    rig = Rig(1)
    rig.up()
    rig.tell(SparkJobEnded(0, 1, None))
    end = over(rig.said("0a", SlotFailed("slot 1 cannot be reached", lasting=True)))
    assert isinstance(end.error, JobStartError)
    assert "slot 1 cannot be reached" in str(end.error)


def test_a_row_that_does_not_fit_ends_the_job() -> None:
    rig = Rig()
    rig.up()
    rig.said("1a", SlotFailed("source 'numbers' gave 'x'", "numbers", "trace", code=SourceRowError.code))
    rig.tell(SparkJobEnded(1, 1, None))
    end = over(rig.tell(SparkJobEnded(0, 1, None)))
    assert end.state is JobState.FAILED
    assert isinstance(end.error, SourceRowError)
    assert str(end.error) == "source 'numbers' gave 'x'"
    assert rig.core.restarts == 0


def test_what_no_restart_mends_ends_the_job_before_a_slot_is_up_too() -> None:
    rig = Rig(1)
    rig.said("0x", SlotFailed("No module named 'helper'", "", "trace", code=FunctionLoadError.code))
    end = over(rig.tell(SparkJobEnded(0, 1, None)))
    assert isinstance(end.error, FunctionLoadError)


@pytest.mark.parametrize("began", [False, True])
def test_a_plan_that_cannot_be_loaded_ends_the_job_at_its_first_slot(began: bool) -> None:
    """The slot has not come as far as to say so itself: Spark's text has the worker's traceback."""
    rig = Rig(1)
    if began:
        rig.up()
        rig.tell(Broke(0, "0a", "it was lost"))
    end = over(rig.tell(SparkJobEnded(0, 1, UNLOADABLE, "'map-1' (map(parse))")))
    assert isinstance(end.error, FunctionLoadError)
    assert str(end.error).startswith("'map-1' (map(parse)): ModuleNotFoundError: No module named 'helper'")


def test_one_that_has_worked_is_repaired_from_it() -> None:
    rig = Rig(1)
    rig.up()
    for instance in "ab":
        rig.said(f"0{instance}", SlotFailed("slot 1 cannot be reached", lasting=instance == "b"))
        rig.tell(SparkJobEnded(0, rig.core.slots[0].attempt, None))
        rig.pass_ms(60_000 if instance == "a" else 100)
        if instance == "a":
            rig.hello("0b")
            rig.recalled()
    assert not rig.core.state.is_final


def test_the_restart_strategy_gives_up() -> None:
    rig = Rig(1, restart=FixedDelay(1, "10ms"))
    rig.up()
    rig.said("0a", SlotFailed("out of memory", "count", "trace"))
    rig.tell(SparkJobEnded(0, 1, None))
    assert SubmitSlot(0, 2) in rig.pass_ms(50)
    rig.hello("0b")
    rig.recalled()
    assert rig.core.restarts == 1
    rig.tell(SparkJobEnded(0, 2, None))
    end = over(rig.said("0b", SlotFailed("out of memory", "count", "trace")))
    assert isinstance(end.error, SlotLostError)
    assert "given up. Last failure: slot 0: it failed in count: out of memory" in str(end.error)
    assert (rig.core.restarts, rig.core.slots[0].restarts) == (1, 1)  # the second loss was no restart


def test_a_slot_that_another_process_takes_over_has_restarted() -> None:
    rig = Rig(1)
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
            "the restart strategy has given up. Last failure: slot 0: gone; Spark says: crashed (while no record",
        ),
    ],
)
def test_losses_right_after_replays_are_suspicious(attempts: int, losses: int, expected: str) -> None:
    rig = Rig(1, restart=FixedDelay(attempts, "10ms"))
    rig.up()
    for attempt in range(1, losses + 1):
        rig.tell(SparkJobEnded(0, attempt, "crashed"))
        decisions = lose(rig, f"0{'abcdefgh'[attempt - 1]}")
        if attempt < losses:
            rig.pass_ms(50)
            rig.hello(f"0{'abcdefgh'[attempt]}")
            rig.recalled()
    message = str(over(decisions).error)
    assert message.startswith(expected)
    assert "Spark says: crashed" in message


def test_untracked_a_loss_ends_the_job() -> None:
    rig = Rig(tracked=False, restart=FixedDelay(5, "10ms"))
    assert not [it for it in rig.began if isinstance(it, RecallStreams)]
    rig.hello("0a")
    lose(rig, "0a")  # before anything ran: harmless
    rig.hello("0b")
    assert sent(rig.hello("1a"), Deploy)
    decisions = lose(rig, "1a")
    assert sent(decisions, Cancel)[0][0] == "0b"
    rig.tell(SparkJobEnded(0, 1, None))
    assert isinstance(over(rig.tell(SparkJobEnded(1, 1, "killed"))).error, SlotLostError)


def quiet_until_probed(rig: Rig, instances: tuple[str, ...]) -> int:
    decisions: list[JobInstruction] = []
    for instance in instances:
        decisions += rig.said(instance, Heartbeat(0, 5, True))
    return int(sent(decisions, Probe)[0][1].number)


def test_a_bounded_job_ends() -> None:
    rig = Rig()
    rig.up()
    first = quiet_until_probed(rig, ("0a", "1a"))
    rig.said("0a", Heartbeat(first, 5, True))
    assert rig.said("1a", Heartbeat(first, 5, True)) == [AskVertexStatus(first)]
    probes = sent(rig.tell(StatusKnown(first, DRAINED)), Probe)
    second = probes[0][1].number
    rig.said("0a", Heartbeat(second, 5, True))
    assert sent(rig.said("1a", Heartbeat(second, 5, True))) == [("0a", EndReplays()), ("1a", EndReplays())]
    assert rig.core.state is JobState.ENDING
    for slot in (0, 1):
        rig.said(f"{slot}a", SlotEnded())
        rig.tell(Broke(slot, f"{slot}a", "over"))
    assert rig.core.state is JobState.STOPPING
    rig.tell(SparkJobEnded(0, 1, None))
    assert over(rig.tell(SparkJobEnded(1, 1, None))) == Over(JobState.ENDED)
    assert rig.core.state is JobState.ENDED


def test_activity_between_the_rounds_puts_the_end_off() -> None:
    rig = Rig(1)
    rig.up()
    first = quiet_until_probed(rig, ("0a",))
    rig.said("0a", Heartbeat(first, 5, True))
    (second,) = sent(rig.tell(StatusKnown(first, DRAINED)), Probe)
    assert not sent(rig.said("0a", Heartbeat(second[1].number, 6, True)), EndReplays)


def test_pending_records_put_the_end_off() -> None:
    rig = Rig(1)
    rig.up()
    first = quiet_until_probed(rig, ("0a",))
    rig.said("0a", Heartbeat(first, 5, True))
    assert rig.tell(StatusKnown(first, StreamStatus(0, 0, 3, 0, 700))) == []
    assert not sent(rig.pass_ms(650), Probe)
    assert sent(rig.pass_ms(100), Probe)


def test_a_loss_while_ending_is_an_end() -> None:
    rig = Rig(1)
    rig.up()
    first = quiet_until_probed(rig, ("0a",))
    rig.said("0a", Heartbeat(first, 5, True))
    (second,) = sent(rig.tell(StatusKnown(first, DRAINED)), Probe)
    rig.said("0a", Heartbeat(second[1].number, 5, True))
    lose(rig, "0a")
    assert over(rig.tell(SparkJobEnded(0, 1, "killed"))) == Over(JobState.ENDED)


def test_slots_that_had_ended_start_again_with_a_lost_one() -> None:
    rig = Rig(3)
    rig.up()
    rig.said("2a", SlotEnded())
    rig.tell(SparkJobEnded(2, 1, None))
    decisions = lose(rig, "1a")
    assert sent(decisions) == [("0a", DropPeers(2, (1, 2)))]
    assert SubmitSlot(2, 2) in decisions


def test_a_slot_that_ends_during_a_repair_starts_again() -> None:
    rig = Rig(3)
    rig.up()
    lose(rig, "1a")
    decisions = rig.said("2a", SlotEnded())
    assert ("0a", DropPeers(3, (2,))) in sent(decisions)


def test_drain_reaches_slots_that_come_later() -> None:
    rig = Rig()
    rig.up()
    lose(rig, "1a")
    assert sent(rig.tell(DrainRequested())) == [("0a", StopSources())]
    assert rig.tell(DrainRequested()) == []
    rig.hello("1b")
    rig.said("0a", PeersDropped(2))
    assert [to for to, _ in sent(rig.recalled(), StopSources)] == ["1b"]
    rig.started("1b")
    assert rig.core.state is JobState.DRAINING


def test_cancel() -> None:
    rig = Rig()
    rig.up()
    assert sent(rig.tell(CancelRequested("enough"))) == [("0a", Cancel("enough")), ("1a", Cancel("enough"))]
    rig.said("0a", SlotEnded())
    rig.tell(SparkJobEnded(0, 1, None))
    # The other one does not listen.
    assert CancelSlot(1, 1) not in rig.pass_ms(4_900)
    assert CancelSlot(1, 1) in rig.pass_ms(1_200)
    assert over(rig.tell(SparkJobEnded(1, 1, "cancelled"))) == Over(JobState.CANCELLED)
    assert rig.tell(Tick()) == []
    assert rig.hello("1b") == []


def test_an_end_that_spark_does_not_bring_about() -> None:
    rig = Rig(1)
    rig.up()
    rig.tell(CancelRequested("enough"))
    assert over(rig.pass_ms(15_000)) == Over(JobState.CANCELLED)


def test_who_comes_while_the_job_stops_is_sent_away() -> None:
    rig = Rig()
    rig.tell(CancelRequested("enough"))
    assert sent(rig.hello("0a"), Cancel)


def test_a_broken_driver_side() -> None:
    rig = Rig(restart=NoRestart())
    rig.up()
    error = JobError("the vertex is gone\nfor good")
    assert sent(rig.tell(Broken(error)))[0] == ("0a", Cancel("the vertex is gone"))
    rig.tell(SparkJobEnded(0, 1, None))
    assert over(rig.tell(SparkJobEnded(1, 1, None))).error is error
