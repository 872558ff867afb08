"""The coordinator's rules in barrier mode: tables of events, and a world that loses slots at any moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ftlayer.checkpoint.snapshots import Restore
from ftlayer.common.rules.restart import ExponentialDelay, FixedDelay, NoRestart, RestartStrategy
from ftlayer.config import TopologyOptions
from ftlayer.errors import CheckpointError, SlotLostError
from ftlayer.runtime.barrier_mode.driver.rules.job_rules import MOST_EXCUSED, BarrierJob
from ftlayer.runtime.driver.rules.events import (
    AllRunning,
    Broke,
    CancelRequested,
    CancelSlot,
    CheckpointComplete,
    Crew,
    DrainRequested,
    EndTasksRequested,
    Event,
    JobInstruction,
    JobState,
    Over,
    PrepareRestore,
    RegionDeployed,
    RestartRequested,
    RestoreFailed,
    RestoreReady,
    Said,
    SendTo,
    SparkJobEnded,
    SubmitSlot,
    Tick,
)
from ftlayer.runtime.driver.rules.job_core import JobCore
from ftlayer.runtime.protocol.messages import (
    Cancel,
    Death,
    Deploy,
    EndTasks,
    FromSlot,
    Heartbeat,
    Hello,
    ResetTasks,
    SlotEnded,
    SlotFailed,
    StopSources,
    TasksStarted,
)

OPTIONS = TopologyOptions(heartbeat_ms=100, heartbeat_timeout_ms=1_000, start_timeout_ms=5_000)


def hello(slot: int, instance: str, *deaths: Death) -> Said:
    return Said(slot, instance, Hello(slot, instance, f"grpc://127.0.0.1:{slot}", "host", 1, deaths))


class Played:
    """A core, its clock, and what it has decided since the last look."""

    def __init__(
        self, *regions: set[int], restart: RestartStrategy | None = None, options: TopologyOptions = OPTIONS
    ) -> None:
        self.now = 0
        crew = Crew(sum(map(len, regions)), options.start_timeout_ms)
        mode = BarrierJob(
            crew,
            regions=[frozenset(region) for region in regions],
            run="run",
            restart=restart or FixedDelay(attempts=100, delay="10ms"),
        )
        self.core = JobCore(crew, options, mode)
        self.decided: list[JobInstruction] = self.core.start(self.now)

    def on(self, *events: Event, after_ms: int = 0) -> list[JobInstruction]:
        self.now += after_ms
        self.decided = []
        for event in events:
            self.decided += self.core.handle(event, self.now)
            self.core.validate()
        return self.decided

    def sent(self, kind: type) -> list[tuple[int, object]]:
        return [
            (made.slot, made.message)
            for made in self.decided
            if isinstance(made, SendTo) and isinstance(made.message, kind)
        ]

    def asked(self) -> list[PrepareRestore]:
        return [made for made in self.decided if isinstance(made, PrepareRestore)]

    def running(self, slots: int = 2) -> None:
        """Bring a job of one region up."""
        (asked,) = self.asked()
        self.on(RestoreReady(asked.number, 0, {}), *(hello(slot, f"{slot}a") for slot in range(slots)))
        assert len(self.sent(Deploy)) == slots
        self.on(*(Said(slot, f"{slot}a", TasksStarted()) for slot in range(slots)))
        assert self.decided == [AllRunning()]


def ready(asked: PrepareRestore, checkpoint: int) -> RestoreReady:
    return RestoreReady(
        asked.number, checkpoint, {slot: Restore(checkpoint, "where", ()) for slot in asked.slots}
    )


def test_slots_are_deployed_when_all_are_there_and_the_restore_point_is_known() -> None:
    job = Played({0, 1})
    (asked,) = job.asked()
    assert [made for made in job.decided if isinstance(made, SubmitSlot)] == [
        SubmitSlot(0, 1),
        SubmitSlot(1, 1),
    ]
    job.on(hello(0, "0a"), hello(1, "1a"))
    assert not job.sent(Deploy)
    job.on(ready(asked, 7))
    assert [deploy.restore and deploy.restore.checkpoint for _, deploy in job.sent(Deploy)] == [7, 7]  # type: ignore[attr-defined]
    assert RegionDeployed((0, 1), 7) in job.decided
    assert AllRunning() not in job.decided
    assert job.core.state is JobState.INITIALIZING
    job.on(Said(0, "0a", TasksStarted()))
    assert job.decided == []
    # It is restored when the last one has its state.
    job.on(Said(1, "1a", TasksStarted()))
    assert job.decided == [AllRunning()]
    assert job.core.state is JobState.RUNNING


def test_survivors_are_reset_once_it_is_certain_what_stands() -> None:
    job = Played({0, 1})
    job.running()
    job.on(Broke(1, "1a", "gone"))
    (asked,) = job.asked()
    assert not job.sent(ResetTasks)
    assert job.core.state is JobState.RECOVERING
    job.on(ready(asked, 3))
    assert job.sent(ResetTasks) == [(0, ResetTasks(2, 3))]
    job.on(hello(0, "0b"))
    assert not job.sent(Deploy)
    job.on(hello(1, "1b"), after_ms=20)
    assert [slot for slot, _ in job.sent(Deploy)] == [0, 1]
    assert job.core.restarts == 1
    assert job.core.state is JobState.RECOVERING
    assert AllRunning() in job.on(Said(1, "1b", TasksStarted()), Said(0, "0b", TasksStarted()))
    assert job.core.state is JobState.RUNNING


def test_restarts_are_those_that_the_strategy_allows() -> None:
    job = Played({0}, restart=FixedDelay(attempts=2, delay="10ms"))
    job.running(1)
    for attempt in (2, 3):
        job.on(Broke(0, f"0{'abc'[attempt - 2]}", "gone"), SparkJobEnded(0, attempt - 1, None))
        (asked,) = job.asked()
        job.on(Tick(), after_ms=20)
        job.on(ready(asked, 3), hello(0, f"0{'abc'[attempt - 1]}"))
        assert job.core.restarts == attempt - 1
        assert job.core.state is JobState.RECOVERING
        job.on(Said(0, f"0{'abc'[attempt - 1]}", TasksStarted()))
    (end,) = [
        made for made in job.on(Broke(0, "0c", "gone"), SparkJobEnded(0, 3, None)) if isinstance(made, Over)
    ]
    assert isinstance(end.error, SlotLostError)
    assert job.core.restarts == 2
    assert job.core.slots[0].restarts == 2


def test_regions_that_go_back_together_are_one_failure() -> None:
    job = Played({0}, {1}, restart=FixedDelay(attempts=1, delay="10ms"))
    both = job.asked()
    job.on(*(ready(asked, 1) for asked in both), hello(0, "0a"), hello(1, "1a"))
    job.on(Said(0, "0a", TasksStarted()), Said(1, "1a", TasksStarted()))
    job.on(RestartRequested("too many checkpoints failed"))
    assert len(job.asked()) == 2
    assert job.core.restarts == 1
    assert job.core.state is JobState.RECOVERING


def test_a_slot_that_is_lost_while_it_restores_begins_its_region_again() -> None:
    job = Played({0, 1})
    (asked,) = job.asked()
    job.on(ready(asked, 7), hello(0, "0a"), hello(1, "1a"), Said(0, "0a", TasksStarted()))
    job.on(Broke(1, "1a", "gone"))
    (asked,) = job.asked()
    job.on(ready(asked, 7), hello(0, "0b"), hello(1, "1b"))
    assert not [made for made in job.decided if isinstance(made, AllRunning)]
    job.on(Tick(), after_ms=20)
    assert [slot for slot, _ in job.sent(Deploy)] == [0, 1]
    assert AllRunning() not in job.on(Said(1, "1b", TasksStarted()))
    assert AllRunning() in job.on(Said(0, "0b", TasksStarted()))


def test_survivors_keep_what_a_checkpoint_holds_that_may_turn_out_to_exist() -> None:
    job = Played({0, 1})
    job.running()
    job.on(Broke(1, "1a", "gone"))
    (asked,) = job.asked()
    job.on(RestoreReady(asked.number, 3, {}, undecided=5))
    assert job.sent(ResetTasks) == [(0, ResetTasks(2, 5))]


def test_the_strategys_pause_holds_the_deployment_up() -> None:
    job = Played({0}, restart=FixedDelay(attempts=3, delay="2s"))
    job.running(1)
    job.on(Said(0, "0a", SlotFailed("a function raised", "map-1")))
    (asked,) = job.asked()
    job.on(ready(asked, 1), hello(0, "0b"))
    assert not job.sent(Deploy)
    job.on(Tick(), after_ms=1_999)
    assert not job.sent(Deploy)
    job.on(Tick(), after_ms=1)
    assert len(job.sent(Deploy)) == 1


def test_a_strategy_that_gives_up_fails_the_job_with_the_reason() -> None:
    job = Played({0}, restart=NoRestart())
    job.running(1)
    job.on(Said(0, "0a", SlotFailed("a function raised", "map-1")), SparkJobEnded(0, 1, None))
    verdict = next(made for made in job.decided if isinstance(made, Over))
    assert verdict.state is JobState.FAILED
    assert isinstance(verdict.error, SlotLostError)
    assert "a function raised" in str(verdict.error)
    assert "map-1" in str(verdict.error)


@pytest.mark.parametrize("completes", [False, True])
def test_a_mistake_of_the_program_ends_a_job_before_its_first_checkpoint(completes: bool) -> None:
    job = Played({0})
    job.running(1)
    if completes:
        job.on(CheckpointComplete())
    failed = SlotFailed("NameError: name 'sprak' is not defined", lasting=True)
    job.on(Said(0, "0a", failed), SparkJobEnded(0, 1, None))
    ends = [made for made in job.decided if isinstance(made, Over)]
    assert bool(ends) is not completes
    assert all("sprak" in str(end.error) for end in ends)


def test_what_fails_slowly_is_given_up_unless_checkpoints_complete() -> None:
    for completes in (False, True):
        job = Played({0}, restart=ExponentialDelay("1ms", "1ms", "1m", attempts=3))
        job.running(1)
        for attempt in range(5):
            if completes:
                job.on(CheckpointComplete())
            instance = f"0{chr(ord('a') + attempt)}"
            job.on(
                Said(0, instance, SlotFailed("slow")), SparkJobEnded(0, attempt + 1, None), after_ms=120_000
            )
            if any(isinstance(made, Over) for made in job.decided):
                break
            (asked,) = job.asked()
            job.on(RestoreReady(asked.number, 0, {}), Tick(), after_ms=10)
            job.on(hello(0, f"0{chr(ord('b') + attempt)}"))
            job.on(Tick(), after_ms=1)
        assert (attempt == 3) is not completes


def test_regions_restart_by_themselves() -> None:
    job = Played({0, 1}, {2})
    first, second = job.asked()
    job.on(ready(first, 0), ready(second, 0), hello(0, "0a"), hello(1, "1a"), hello(2, "2a"))
    job.on(*(Said(slot, f"{slot}a", TasksStarted()) for slot in range(3)))
    assert job.core.state is JobState.RUNNING
    job.on(Broke(2, "2a", "gone"))
    (asked,) = job.asked()
    assert asked.slots == (2,)
    job.on(ready(asked, 4), hello(2, "2b"))
    assert not job.sent(ResetTasks)
    job.on(Tick(), after_ms=20)
    assert [slot for slot, _ in job.sent(Deploy)] == [2]


def test_a_restart_that_is_asked_for_resets_everybody() -> None:
    job = Played({0, 1})
    job.running()
    job.on(RestartRequested("too many checkpoints failed"))
    (asked,) = job.asked()
    job.on(ready(asked, 2))
    assert [slot for slot, _ in job.sent(ResetTasks)] == [0, 1]


def test_a_restore_that_fails_is_tried_again_by_the_strategy_and_given_up_if_it_lasts() -> None:
    job = Played({0})
    (asked,) = job.asked()
    job.on(RestoreFailed(asked.number, CheckpointError("the storage is away")), hello(0, "0a"))
    assert not job.asked()
    assert job.core.state is JobState.RECOVERING
    job.on(Tick(), after_ms=10)
    (again,) = job.asked()
    job.on(RestoreFailed(again.number, CheckpointError("it does not fit"), lasting=True))
    assert job.core.state is JobState.STOPPING
    assert "does not fit" in job.core.last_failure


def test_a_restore_that_the_strategy_gives_up_says_how_often_it_was_tried() -> None:
    job = Played({0}, restart=FixedDelay(attempts=2, delay="10ms"))
    for _ in range(3):
        (asked,) = job.asked()
        job.on(RestoreFailed(asked.number, CheckpointError("the storage is away")))
        job.on(Tick(), after_ms=10)
    assert job.core.state is JobState.STOPPING
    assert "given up after 3 restores that failed, the last: the storage is away" in job.core.last_failure


def test_a_survivor_that_does_not_come_back_is_ended_and_submitted_again() -> None:
    job = Played({0, 1})
    job.running()
    job.on(Broke(1, "1a", "gone"))
    job.on(ready(job.asked()[0], 1), hello(1, "1b"))
    job.on(Tick(), after_ms=OPTIONS.start_timeout_ms)
    assert CancelSlot(0, 1) in job.decided
    job.on(SparkJobEnded(0, 1, "cancelled"))
    job.on(Tick(), after_ms=5)
    assert SubmitSlot(0, 2) in job.decided


def test_the_end_comes_when_all_slots_have_ended_behind_the_final_checkpoint() -> None:
    job = Played({0, 1})
    job.running()
    job.on(EndTasksRequested())
    assert [slot for slot, _ in job.sent(EndTasks)] == [0, 1]
    ends: list[Event] = [Said(0, "0a", SlotEnded()), Said(1, "1a", SlotEnded())]
    job.on(*ends, SparkJobEnded(0, 1, None), SparkJobEnded(1, 1, None))
    assert Over(JobState.ENDED) in job.decided


def test_a_slot_lost_behind_the_final_checkpoint_is_no_loss() -> None:
    job = Played({0, 1})
    job.running()
    job.on(EndTasksRequested(), Broke(0, "0a", "killed"))
    assert job.core.state is JobState.STOPPING
    job.on(SparkJobEnded(0, 1, "killed"), SparkJobEnded(1, 1, None))
    assert Over(JobState.ENDED) in job.decided


def test_a_new_instance_hears_that_the_sources_are_to_stop() -> None:
    job = Played({0})
    job.running(1)
    job.on(DrainRequested(), Broke(0, "0a", "killed"))
    job.on(ready(job.asked()[0], 1), hello(0, "0b"))
    job.on(Tick(), after_ms=20)
    assert [type(message) for _, message in job.sent(object)] == [Deploy, StopSources]


def test_a_slot_that_is_silent_is_lost() -> None:
    job = Played({0, 1})
    job.running()
    for _ in range(4):
        job.on(Said(0, "0a", Heartbeat(0, 1, False)), Tick(), after_ms=300)
    assert job.asked() or job.core.state is JobState.RECOVERING
    assert "slot 1" in job.core.last_failure


# ---------------------------------------------------------------- records that end processes


def death(instance: str, digest: bytes = b"") -> Death:
    return Death(instance, 0, "Aborted", "explode" if digest else "", digest)


class Killed(Played):
    """A job of one region with two slots; the process of slot 0 ends again and again."""

    def __init__(self, attempts: int) -> None:
        super().__init__({0, 1}, restart=FixedDelay(attempts=attempts, delay="10ms"))
        self.running()
        self.lives = 1

    @property
    def instance(self) -> str:
        return f"0{'abcdefghijklmnop'[self.lives - 1]}"

    def end_process(self, *deaths: Death) -> list[Deploy]:
        """Let slot 0 end, and its successor, or the survivor, say how; return what is deployed."""
        self.on(Broke(0, self.instance, "gone"), SparkJobEnded(0, self.lives, None))
        if self.core.is_stopping:
            return []
        (asked,) = self.asked()
        self.lives += 1
        mine, others = self.instance, self.instance.replace("0", "1")
        self.on(ready(asked, 1))
        self.on(hello(0, mine), hello(1, others, *deaths), after_ms=20)
        deployed = [deploy for _, deploy in self.sent(Deploy)]
        self.on(Said(0, mine, TasksStarted()), Said(1, others, TasksStarted()))
        assert self.core.state is JobState.RUNNING
        return deployed  # type: ignore[return-value]


def test_all_slots_are_armed_behind_a_death_and_told_who_is_convicted() -> None:
    job = Killed(attempts=1)
    first = job.end_process(death("0a"))
    assert [(deploy.armed, deploy.convictions) for deploy in first] == [(True, ())] * 2
    second = job.end_process(death("0b", b"1"))
    assert [(deploy.armed, deploy.convictions) for deploy in second] == [(True, ())] * 2
    assert job.core.isolation is not None
    assert job.core.isolation.suspects == 1
    assert "it ended itself, with a record of 'explode' in hand: Aborted" in job.core.last_failure
    third = job.end_process(death("0c", b"1"))
    assert "'explode' makes a record a dead letter" in job.core.last_failure
    assert [deploy.armed for deploy in third] == [True] * 2
    assert [[each.digest for each in deploy.convictions] for deploy in third] == [[b"1"]] * 2
    job.on(*(CheckpointComplete(frozenset({("explode", b"1")}), read) for read in (1, 2, 3)))
    assert job.core.isolation is None
    # Three restarts, of which the strategy has judged the first alone.
    assert job.core.restarts == 3
    assert job.end_process() == []
    assert isinstance(job.core.error, SlotLostError)


def test_a_loss_that_leaves_nothing_in_writing_arms_nobody() -> None:
    job = Killed(attempts=2)
    for _ in range(2):
        deployed = job.end_process()
        assert [(deploy.armed, deploy.convictions) for deploy in deployed] == [(False, ())] * 2
    assert job.core.isolation is None


def test_a_slot_that_says_why_it_ends_is_not_excused_by_a_search() -> None:
    job = Killed(attempts=1)
    job.end_process(death("0a"))
    job.on(Said(0, job.instance, SlotFailed("a disk is full")))
    assert isinstance(job.core.error, SlotLostError)


def test_a_search_excuses_so_many_losses_and_no_more() -> None:
    job = Killed(attempts=2)
    job.end_process(death("0a"))
    for number in range(MOST_EXCUSED + 1):
        assert job.end_process(death(str(number), bytes([number])))
    assert job.end_process() == []
    assert isinstance(job.core.error, SlotLostError)


# ---------------------------------------------------------------- any order of events


@dataclass
class Process:
    """An instance of a slot in the world."""

    name: str
    slot: int
    deployed: int | None = None  # the checkpoint it began with
    started: bool = False
    epoch: int = 0
    over: bool = False


class World(RuleBasedStateMachine):
    """Three slots in two regions. A checkpoint is a number that grows while a region runs."""

    regions = (frozenset({0, 1}), frozenset({2}))

    @initialize()
    def begin(self) -> None:
        self.now = 0
        self.names = 0
        # A start that takes too long fails the job, which is another test's matter.
        options = TopologyOptions(heartbeat_ms=100, heartbeat_timeout_ms=1_000, start_timeout_ms=1 << 30)
        crew = Crew(3, options.start_timeout_ms)
        restart = ExponentialDelay("10ms", "100ms", "1m", attempts=None)
        mode = BarrierJob(crew, regions=self.regions, run="run", restart=restart)
        self.core = JobCore(crew, options, mode)
        self.jobs: dict[int, int | None] = dict.fromkeys(range(3))
        self.current: dict[int, Process | None] = dict.fromkeys(range(3))
        self.asked: dict[int, PrepareRestore] = {}
        self.checkpoint = 0
        self.deaths: Counter[bytes] = Counter()  # by what was in hand
        self.deaths_since = 0  # the last complete checkpoint
        self.over: Over | None = None
        self.carry_out(self.core.start(0))

    def carry_out(self, decisions: list[JobInstruction]) -> None:
        for made in decisions:
            match made:
                case SubmitSlot(slot, attempt):
                    assert self.jobs[slot] is None, "two Spark jobs for one slot"
                    self.jobs[slot] = attempt
                case PrepareRestore(number, slots):
                    assert frozenset(slots) in self.regions
                    self.asked[number] = made
                case SendTo(slot, instance, message):
                    process = self.current[slot]
                    if process is not None and process.name == instance:
                        self.told(process, message)
                case AllRunning():
                    processes = [process for process in self.current.values() if process is not None]
                    assert len(processes) == len(self.current)
                    assert all(process.started for process in processes)
                case Over():
                    assert self.over is None
                    self.over = made

    def told(self, process: Process, message: object) -> None:
        match message:
            case Deploy(epoch, _, peers, _, restore, armed, convictions):
                assert process.deployed is None
                assert armed or not self.deaths_since
                assert all(self.deaths[each.digest] >= 2 for each in convictions)
                region = next(region for region in self.regions if process.slot in region)
                assert {peer.slot for peer in peers} == region
                process.deployed = 0 if restore is None else restore.checkpoint
                process.epoch = epoch
            case ResetTasks():
                assert process.deployed is not None
                process.over = True
            case Cancel():
                process.over = True

    def event(self, event: Event) -> None:
        instructions = self.core.handle(event, self.now)
        self.core.validate()
        self.carry_out(instructions)

    @rule(slot=st.integers(0, 2), in_hand=st.lists(st.sampled_from([b"", b"1", b"2"]), max_size=3))
    def starts(self, slot: int, in_hand: Sequence[bytes] = ()) -> None:
        if self.jobs[slot] is not None and self.current[slot] is None:
            self.names += 1
            self.current[slot] = Process(f"i{self.names}", slot)
            self.deaths.update(in_hand)
            self.deaths_since += len(in_hand)
            deaths = [death(f"i{self.names}-{place}", digest) for place, digest in enumerate(in_hand)]
            self.event(hello(slot, f"i{self.names}", *deaths))

    @rule(slot=st.integers(0, 2))
    def is_restored(self, slot: int) -> None:
        process = self.current[slot]
        if process is not None and process.deployed is not None and not process.over and not process.started:
            process.started = True
            self.event(Said(slot, process.name, TasksStarted()))

    @rule(slot=st.integers(0, 2))
    def comes_back_in_its_process(self, slot: int) -> None:
        process = self.current[slot]
        if process is not None and process.over and self.jobs[slot] is not None:
            self.current[slot] = None
            self.starts(slot)

    @rule(slot=st.integers(0, 2), said=st.booleans())
    def dies(self, slot: int, said: bool) -> None:
        process = self.current[slot]
        if process is None or self.jobs[slot] is None:
            return
        attempt, self.jobs[slot], self.current[slot] = self.jobs[slot], None, None
        if said:
            self.event(Broke(slot, process.name, "killed"))
        self.event(SparkJobEnded(slot, attempt or 0, "killed"))
        if not said:
            self.event(Broke(slot, process.name, "killed"))

    @rule(slot=st.integers(0, 2))
    def fails(self, slot: int) -> None:
        process = self.current[slot]
        if process is not None and not process.over:
            process.over = True
            self.event(Said(slot, process.name, SlotFailed("a function raised")))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), works=st.integers(0, 4))
    def restore_point(self, data: st.DataObject, works: int) -> None:
        asked = self.asked.pop(data.draw(st.sampled_from(sorted(self.asked))))
        if works:
            self.event(ready(asked, self.checkpoint))
        else:
            self.event(RestoreFailed(asked.number, CheckpointError("away")))

    @precondition(lambda self: self.core.state is JobState.RUNNING)
    @rule(condemned=st.frozensets(st.sampled_from([b"1", b"2"])))
    def completes(self, condemned: frozenset[bytes]) -> None:
        self.checkpoint += 1
        self.deaths_since = 0
        dead = frozenset(("explode", digest) for digest in condemned)
        self.event(CheckpointComplete(dead, self.checkpoint))

    @rule(passed=st.integers(1, 400))
    def time_passes(self, passed: int) -> None:
        self.now += passed
        for slot, process in self.current.items():
            if process is not None:
                self.event(Said(slot, process.name, Heartbeat(0, 0, False)))
        self.event(Tick())

    @rule()
    def restart_is_asked_for(self) -> None:
        self.event(RestartRequested("checkpoints fail"))

    @invariant()
    def what_runs_together_began_together(self) -> None:
        for region in self.regions:
            running = [
                process
                for slot in region
                if (process := self.current[slot]) is not None
                and process.deployed is not None
                and not process.over
            ]
            latest = max((process.epoch for process in running), default=0)
            began = {process.deployed for process in running if process.epoch == latest}
            assert len(began) <= 1

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(400):
            for number in sorted(self.asked):
                self.event(ready(self.asked.pop(number), self.checkpoint))
            for slot in range(3):
                self.comes_back_in_its_process(slot)
                self.starts(slot)
                self.is_restored(slot)
            self.time_passes(50)
            if self.core.state is JobState.RUNNING:
                break
        assert self.core.state is JobState.RUNNING, "the job came to a standstill"
        self.event(CancelRequested("enough"))
        for slot, attempt in self.jobs.items():
            if attempt is not None:
                self.event(SparkJobEnded(slot, attempt, None))
        assert self.over is not None
        assert self.over.state is JobState.CANCELLED


TestAnyOrder = World.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("kind", [SlotFailed("x"), SlotEnded()])
def test_what_an_instance_of_the_past_says_is_not_heard(kind: FromSlot) -> None:
    job = Played({0, 1})
    job.running()
    job.on(Said(0, "long ago", kind))
    assert job.core.state is JobState.RUNNING
    assert job.core.restarts == 0
