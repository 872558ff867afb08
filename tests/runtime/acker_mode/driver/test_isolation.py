"""Records that end the process that works on them: exactly they are found, whatever happens in which order."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.common.rules.restart import FixedDelay
from ftlayer.config import TopologyOptions
from ftlayer.errors import SlotLostError
from ftlayer.runtime.acker_mode.driver.rules.driver_half import AckerJob
from ftlayer.runtime.acker_mode.driver.rules.isolation import (
    FACTOR,
    FIRST_GROUP,
    LEFTOVERS,
    AllThrough,
    Convicted,
    GroupSizes,
    Isolation,
    RecallAll,
    ReplayInput,
    Tell,
)
from ftlayer.runtime.driver.rules.events import (
    AskVertexStatus,
    Broke,
    Condemn,
    Condemned,
    Crew,
    Event,
    JobInstruction,
    JobState,
    Over,
    RecallDone,
    RecallStreams,
    Said,
    SendTo,
    SparkJobEnded,
    StatusKnown,
    SubmitSlot,
    Tick,
)
from ftlayer.runtime.driver.rules.job_core import JobCore
from ftlayer.runtime.driver.rules.job_status import IsolationStatus
from ftlayer.runtime.protocol.messages import (
    AllowReplays,
    Cancel,
    Death,
    Deploy,
    DropPeers,
    EndReplays,
    Heartbeat,
    Hello,
    LetOut,
    PauseIntake,
    PeersDropped,
    Probe,
    ReplayNow,
    ReplaysOut,
    ResumeIntake,
    SlotEnded,
)
from ftlayer.vertex.calls import Failure, StreamStatus

OPTIONS = TopologyOptions(heartbeat_ms=1_000, heartbeat_timeout_ms=60_000, start_timeout_ms=60_000)
SLOTS, HOPS, INPUTS, READ = 3, 3, 2, 20


@dataclass
class Process:
    """One instance of a slot; ``work`` are (record, root, hop)."""

    name: str
    slot: int
    alive: bool = True
    deployed: bool = False
    mail: deque[Any] = field(default_factory=deque)
    work: deque[tuple[int, int, int]] = field(default_factory=deque)
    unread: deque[int] = field(default_factory=deque)
    paused: bool = False
    asking: bool = False
    group: AllowReplays | None = None
    taken: int = 0
    kept: tuple[int, int] | None = None
    activity: int = 0
    was_quiet: bool = False

    @property
    def quiet(self) -> bool:
        entering = self.asking if self.paused else bool(self.unread)
        return not (entering or self.work or self.mail)


class World:
    """Spark, slots and the vertex. Record i is of stream i % INPUTS, and visits a slot for each of its hops.

    ``culprits`` says at which hop a record ends the process it is in; ``held`` records come to an end only when no
    others are pending (as the rows of a join do when the watermark has passed).
    """

    def __init__(self, n: int, culprits: dict[int, int], held: set[int], kills: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.n, self.culprits, self.held, self.kills = n, culprits, held, kills
        self.now = 0
        crew = Crew(SLOTS, OPTIONS.start_timeout_ms)
        self.mode = AckerJob(
            crew,
            run="run",
            restart=FixedDelay(attempts=4 + 4 * kills, delay="10ms"),
            replays=[ReplayInput(f"in{stream}", stream) for stream in range(INPUTS)],
        )
        self.core = JobCore(crew, OPTIONS, self.mode)
        self.queue: deque[Callable[[], None]] = deque()  # what happens in its order: the vertex's answers
        self.told: deque[Event] = deque()  # on its way to the coordinator
        self.processes: dict[int, Process | None] = dict.fromkeys(range(SLOTS))
        self.names = 0
        self.read = [0] * SLOTS  # how many of its records a slot's source has persisted
        self.due: list[deque[int]] = [deque() for _ in range(INPUTS)]
        self.pending: dict[int, int] = {}  # root → record
        self.roots = 0
        self.done: set[int] = set()
        self.dead: dict[int, Failure] = {}
        self.losses = 0
        self.tells_deaths = seed % 2 == 1
        self.deaths: list[Death] = []  # what the next process on the host finds of those before it
        self.over: Over | None = None
        self.apply(self.core.start(0))

    # ------------------------------------------------------------ the coordinator's side

    def apply(self, decisions: list[JobInstruction]) -> None:
        for decision in decisions:
            match decision:
                case SubmitSlot(slot, _):
                    self.queue.append(lambda slot=slot: self.come_up(slot))
                case SendTo(slot, instance, message):
                    process = self.processes[slot]
                    if process is not None and process.name == instance:
                        process.mail.append(message)
                case RecallStreams(number):
                    self.queue.append(lambda number=number: self.recall(number))
                case AskVertexStatus(number):
                    self.queue.append(lambda number=number: self.answer(number))
                case Condemn(failure):
                    self.queue.append(lambda failure=failure: self.condemn(failure))
                case Over():
                    self.over = decision

    def tell(self, event: Event) -> None:
        instructions = self.core.handle(event, self.now)
        self.core.validate()
        self.apply(instructions)

    def say(self, process: Process, message: Any) -> None:
        self.told.append(Said(process.slot, process.name, message))

    # ------------------------------------------------------------ the vertex

    def register(self, record: int) -> int:
        self.roots += 1
        self.pending[self.roots] = record
        return self.roots

    def recall(self, number: int) -> None:
        for record in sorted(self.pending.values(), reverse=True):
            self.due[record % INPUTS].appendleft(record)
        rows = len(self.pending)
        self.pending.clear()
        self.told.append(RecallDone(number, rows))

    def answer(self, number: int) -> None:
        due = sum(map(len, self.due))
        if not due and set(self.pending.values()) <= self.held and not self.to_read():
            self.done |= set(self.pending.values())
            self.pending.clear()
        self.told.append(StatusKnown(number, StreamStatus(len(self.pending), due, 0, len(self.dead), -1)))

    def condemn(self, failure: Failure) -> None:
        record = self.pending.pop(failure.root, None)
        if record is not None:
            self.dead[record] = failure
        self.told.append(Condemned(failure.root))

    def take(self, process: Process, stream: int, limit: int) -> None:
        """The vertex answers; the slot acts as its replay task does."""
        found = []
        while self.due[stream] and len(found) < limit:
            record = self.due[stream].popleft()
            found.append((record, self.register(record)))
        if not process.alive:
            return
        process.asking = False
        if process.paused and process.group is None:
            return
        if process.paused and process.group is not None:
            group = process.group
            process.taken += len(found)
            if group.limit == 1 and found:
                process.kept = record, root = found[0]
                self.say(process, ReplaysOut(group.uid, group.group, 1, root, record + 1))
                return
            if found and process.taken < group.limit:
                self.ask(process, stream, group.limit - process.taken)
            else:
                self.say(process, ReplaysOut(group.uid, group.group, process.taken))
        elif found:
            self.ask(process, stream, READ)
        for record, root in found:
            self.send(record, root, 0)

    def ask(self, process: Process, stream: int, limit: int) -> None:
        process.asking = True
        self.queue.append(lambda: self.take(process, stream, limit))

    # ------------------------------------------------------------ slots

    def records_of(self, slot: int) -> range:
        return range(slot, self.n, SLOTS)

    def to_read(self) -> bool:
        return any(self.read[slot] < len(self.records_of(slot)) for slot in range(SLOTS))

    def come_up(self, slot: int) -> None:
        self.names += 1
        process = self.processes[slot] = Process(f"p{self.names}", slot)
        deaths, self.deaths = tuple(self.deaths), []
        self.say(process, Hello(slot, process.name, f"grpc://{process.name}", "host", 1, deaths))

    def send(self, record: int, root: int, hop: int) -> None:
        """Send a record; what is for an instance that is not deployed yet waits for that."""
        process = self.processes[(record * 7 + hop) % SLOTS]
        if process is not None:
            process.work.append((record, root, hop))

    def lose(self, process: Process) -> None:
        self.losses += process.deployed
        process.alive = False
        self.processes[process.slot] = None
        if self.tells_deaths and process.deployed:
            self.deaths.append(Death(process.name, process.slot, "Aborted", "chain", b"?" * 16, "in explode"))
        attempt = self.core.slots[process.slot].attempt
        ends: list[Event] = [
            Broke(process.slot, process.name, "its stream broke"),
            SparkJobEnded(process.slot, attempt, "exit 1"),
        ]
        if self.draw.random() < 0.5:
            ends.reverse()
        self.told.extend(ends)

    def hear(self, process: Process) -> None:
        message = process.mail.popleft()
        process.activity += not isinstance(message, Probe)
        match message:
            case Deploy():
                process.deployed, process.paused = True, message.paused
                process.unread = deque(list(self.records_of(process.slot))[self.read[process.slot] :])
                if not message.paused and process.slot < INPUTS:
                    self.ask(process, process.slot, READ)
            case DropPeers(epoch, _):
                self.say(process, PeersDropped(epoch))
            case PauseIntake():
                process.paused, process.group, process.kept = True, None, None
            case ResumeIntake():
                process.paused, process.group, process.kept = False, None, None
                self.poll(process)
            case ReplayNow():
                self.poll(process)
            case AllowReplays():
                assert process.paused
                assert not process.asking
                process.group, process.taken = message, 0
                self.ask(process, process.slot, message.limit)
            case LetOut(_, group):
                if process.group is not None and process.group.group == group and process.kept:
                    (record, root), process.kept = process.kept, None
                    self.send(record, root, 0)
            case Probe(number):
                self.beat(process, number)
            case EndReplays():
                assert not self.pending
                assert not any(self.due)
                self.say(process, SlotEnded())
            case Cancel():
                self.told.append(SparkJobEnded(process.slot, self.core.slots[process.slot].attempt, None))
                self.processes[process.slot] = None

    def poll(self, process: Process) -> None:
        if process.slot < INPUTS and not process.paused and not process.asking:
            self.ask(process, process.slot, READ)

    def beat(self, process: Process, probe: int = 0) -> None:
        self.say(process, Heartbeat(probe, process.activity, process.quiet))

    def run_one(self, process: Process) -> None:
        record, root, hop = process.work.popleft()
        process.activity += 1
        if self.culprits.get(record) == hop:
            self.lose(process)
        elif hop + 1 < HOPS:
            self.send(record, root, hop + 1)
        elif record not in self.held and self.pending.pop(root, None) is not None:
            self.done.add(record)

    def read_some(self, process: Process) -> None:
        for _ in range(min(READ, len(process.unread))):
            record = process.unread.popleft()
            self.read[process.slot] += 1
            self.send(record, self.register(record), 0)
        process.activity += 1

    # ------------------------------------------------------------ what happens next

    def step(self) -> None:
        if self.told and self.draw.random() < 0.5:
            self.tell(self.told.popleft())
            return
        if self.queue and self.draw.random() < 0.5:
            self.queue.popleft()()
            return
        running = [process for process in self.processes.values() if process is not None]
        process = self.draw.choice(running) if running else None
        if process is None:
            self.time_passes()
        elif self.kills and process.deployed and self.draw.random() < 0.01 and not self.on_trial():
            self.kills -= 1
            self.lose(process)
        elif process.mail:
            self.hear(process)
        elif process.work and process.deployed:
            self.run_one(process)
        elif process.deployed and process.unread and not process.paused:
            self.read_some(process)
        elif process.deployed and process.quiet != process.was_quiet:
            process.was_quiet = process.quiet
            self.beat(process)
        else:
            self.time_passes()

    def time_passes(self) -> None:
        busy = self.told or self.queue or any(it and (it.mail or it.work) for it in self.processes.values())
        before, self.now = self.now, self.now + (1 if busy else 20)
        self.tell(Tick())
        for process in self.processes.values():
            if process is not None and process.deployed and before // 1_000 < self.now // 1_000:
                self.beat(process)

    def on_trial(self) -> bool:
        """Whether a loss by chance would be taken for a proof."""
        return self.mode.on_trial

    def run(self) -> None:
        for _ in range(400_000):
            if self.over is not None:
                return
            self.step()
        raise AssertionError(f"{self.core.state}, {self.core.isolation}, pending {len(self.pending)}")


@st.composite
def worlds(draw: st.DrawFn) -> World:
    n = draw(st.integers(1, 400))
    record = st.integers(0, n - 1)
    culprits = draw(st.dictionaries(record, st.integers(0, HOPS - 1), max_size=3))
    held = draw(st.sets(record, max_size=5)) - culprits.keys()
    return World(n, culprits, held, draw(st.sampled_from([0, 0, 1, 3])), draw(st.integers(0, 2**32)))


@settings(max_examples=50, deadline=None)
@given(worlds())
def test_exactly_the_culprits_die(world: World) -> None:
    kills = world.kills
    world.run()
    assert world.over == Over(JobState.ENDED)
    assert set(world.dead) == set(world.culprits)
    assert world.done == set(range(world.n)) - set(world.culprits)
    for failure in world.dead.values():
        assert failure.fatal
        cause = failure.reason.partition(" ended while it ran this record and no other, twice: ")[2]
        if world.tells_deaths:
            assert (cause, failure.operator, failure.traceback) == ("Aborted", "chain", "in explode")
        else:
            assert cause.startswith(("its stream broke", "exit 1")), failure
    rounds = math.ceil(math.log2(world.n)) + 2
    assert world.losses - kills <= len(world.culprits) * (rounds + 2) + kills * rounds


def test_a_process_that_ends_by_itself_is_no_records_fault() -> None:
    """A slot that lives for 0.1 s, whatever it is given: no record is blamed, and the job gives up."""
    world = World(60, {}, set(), 0, 1)
    born: dict[str, int] = {}
    for _ in range(100_000):
        process = world.processes[1]
        if process is not None and process.deployed:
            age = world.now - born.setdefault(process.name, world.now)
            if age >= 100:
                world.lose(process)
        if world.over is not None:
            break
        world.step()
        world.now += 1
        if not world.draw.randrange(20):
            for each in filter(None, world.processes.values()):
                world.beat(each)
    assert world.over is not None
    assert isinstance(world.over.error, SlotLostError)
    assert "(while no record was out)" in str(world.over.error)
    assert not world.dead


# ---------------------------------------------------------------- sizes


def test_suspects_are_searched_in_parts_and_the_innocent_go_first() -> None:
    sizes = GroupSizes()
    assert sizes.next == FIRST_GROUP
    sizes.suspect_all()
    sizes.recalled(1_000)
    assert (sizes.suspects, sizes.next) == (1_000, 125)
    sizes.passed(125)
    assert (sizes.suspects, sizes.next) == (875, 110)
    sizes.lost(110)
    sizes.recalled(140)  # 30 of a join's buffer were there before
    assert sizes.next == 30
    sizes.passed(30)
    assert (sizes.suspects, sizes.next) == (110, 14)
    sizes.lost(14)
    sizes.recalled(12)  # two were done
    sizes.passed(2)
    assert (sizes.suspects, sizes.next) == (10, 2)
    sizes.lost(1)
    sizes.convicted()
    sizes.recalled(0)
    assert (sizes.suspects, sizes.next) == (0, FACTOR)
    sizes.passed(FACTOR)
    assert sizes.next == FACTOR * FACTOR


def test_a_group_that_is_not_full_was_the_last() -> None:
    sizes = GroupSizes()
    sizes.lost(1_000)
    sizes.recalled(1_000)
    sizes.passed(3)
    assert sizes.suspects == 0


# ---------------------------------------------------------------- rules one by one


def isolation(inputs: int = 1, rows: int = 9) -> Isolation:
    """One that has all recalled records as its suspects; of 9, the first group has 2."""
    made = Isolation([ReplayInput(f"in{place}", place) for place in range(inputs)])
    made.begin()
    assert made.recalled(rows, 0) == []
    made.deployed()
    assert made.at_rest(0) == [RecallAll()]
    return made


def told(steps: list[Any]) -> list[AllowReplays | LetOut]:
    assert all(isinstance(step, Tell) for step in steps)
    return [step.message for step in steps]


def repaired(made: Isolation, rows: int, now: int) -> list[Any]:
    assert made.recalled(rows, now) == []
    made.deployed()
    assert made.at_rest(now) == [RecallAll()]
    return made.recalled(0, now)


def test_groups_are_over_all_inputs() -> None:
    made = isolation(2)
    assert told(made.recalled(0, 0)) == [AllowReplays("in0", 1, 2)]
    assert told(made.took(ReplaysOut("in0", 1, 1), 0)) == [AllowReplays("in1", 1, 1)]
    assert not made.waits_for_rest
    assert told(made.took(ReplaysOut("in1", 1, 1, 7, 8), 0)) == [LetOut("in1", 1)]
    assert made.waits_for_rest
    assert made.status == IsolationStatus(group=2, suspects=9, found=0)
    assert made.lost(1, 10)
    assert made.convicted is None
    assert told(repaired(made, 2, 20)) == [AllowReplays("in0", 2, 1)]


def test_a_record_is_convicted_the_second_time_and_nothing_is_out_before_that() -> None:
    made = isolation()
    made.recalled(0, 0)
    made.took(ReplaysOut("in0", 1, 2), 0)
    assert made.lost(0, 0)
    assert told(repaired(made, 2, 0)) == [AllowReplays("in0", 2, 1)]
    made.took(ReplaysOut("in0", 2, 1, 5, 99), 1_000)
    assert made.lost(0, 1_400)
    assert made.convicted is None
    assert repaired(made, 1, 2_000) == []
    assert made.tick(2_799) == []
    assert told(made.tick(2_800)) == [AllowReplays("in0", 3, 1)]
    assert told(made.took(ReplaysOut("in0", 3, 1, 6, 99), 2_800)) == [LetOut("in0", 3)]
    assert made.lost(0, 2_900)
    assert made.convicted == Convicted(6, 99, 0)
    made.condemned()
    assert made.convicted is None
    assert told(repaired(made, 0, 3_000)) == [AllowReplays("in0", 4, FACTOR)]
    assert made.took(ReplaysOut("in0", 4, 0), 3_000) == [AllThrough()]
    assert not made.active
    assert made.found == 1


def test_losses_without_a_record_are_not_excused() -> None:
    made = isolation()
    made.recalled(0, 0)
    made.took(ReplaysOut("in0", 1, 2), 0)
    assert made.lost(0, 0)
    made.deployed()
    assert [made.lost(1, 0) for _ in range(LEFTOVERS + 1)] == [True] * LEFTOVERS + [False]
    assert told(repaired(made, 2, 0)) == [AllowReplays("in0", 2, 1)]
    assert not made.lost(0, 20)  # it was kept


def test_a_record_that_does_no_harm_alone_is_acquitted() -> None:
    made = isolation(rows=1)
    made.recalled(0, 0)
    made.took(ReplaysOut("in0", 1, 1, 5, 99), 0)
    assert made.lost(0, 10)
    assert repaired(made, 1, 20) == []
    made.tick(10_000)
    made.took(ReplaysOut("in0", 2, 1, 6, 99), 10_000)
    assert told(made.at_rest(10_100)) == [AllowReplays("in0", 3, FACTOR)]
    assert made.convicted is None
