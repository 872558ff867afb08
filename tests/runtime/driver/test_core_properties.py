"""The coordinator against a world that loses slots at any moment: what has to hold in every order of events."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ftlayer.common.rules.restart import ExponentialDelay
from ftlayer.config import TopologyOptions
from ftlayer.runtime.acker_mode.driver.rules.driver_half import AckerJob
from ftlayer.runtime.acker_mode.driver.rules.isolation import ReplayInput
from ftlayer.runtime.driver.rules.events import (
    AskVertexStatus,
    Broke,
    CancelRequested,
    CancelSlot,
    Condemn,
    Condemned,
    Crew,
    DrainRequested,
    Event,
    JobInstruction,
    JobState,
    Over,
    RecallDone,
    RecallStreams,
    Said,
    SendTo,
    SlotDown,
    SlotUp,
    SparkJobEnded,
    StatusKnown,
    SubmitSlot,
    Tick,
)
from ftlayer.runtime.driver.rules.job_core import JobCore
from ftlayer.runtime.driver.rules.job_rules import JobMode
from ftlayer.runtime.environment import UntrackedJob
from ftlayer.runtime.protocol.messages import (
    AllowReplays,
    Cancel,
    Deploy,
    DropPeers,
    EndReplays,
    Heartbeat,
    Hello,
    LetOut,
    PauseIntake,
    PeersDropped,
    PeersUp,
    Probe,
    ReplayNow,
    ReplaysOut,
    ResumeIntake,
    SlotEnded,
    StopSources,
)
from ftlayer.vertex.calls import StreamStatus

OPTIONS = TopologyOptions(heartbeat_ms=100, heartbeat_timeout_ms=1_000, start_timeout_ms=5_000)
SLOTS = 3
SOURCE_ONLY = 2
"""A slot that has a source's subtask and nothing else: it ends by itself, before the others."""
index = st.integers(0, SLOTS - 1)


@dataclass
class Process:
    """An instance of a slot, as it is in the world."""

    name: str
    slot: int
    alive: bool = True
    connected: bool = True
    said_hello: bool = False
    deployed: bool = False
    owes_epochs: list[int] = field(default_factory=list)
    probes: list[int] = field(default_factory=list)
    may_end: bool = False
    ended: bool = False
    cancelled: bool = False
    work: int = 0  # records it still has
    activity: int = 0
    sources_over: bool = False
    paused: bool = False
    allowed: AllowReplays | None = None
    known_down: set[int] = field(default_factory=set)

    @property
    def quiet(self) -> bool:
        return (self.sources_over or self.paused) and not self.work and self.allowed is None


class World(RuleBasedStateMachine):
    """Spark, the slots' processes and the vertex, played by hand. Each root is in one slot, or due in the vertex."""

    tracked = True

    @initialize()
    def begin(self) -> None:
        self.now = 0
        crew = Crew(SLOTS, OPTIONS.start_timeout_ms)
        restart = ExponentialDelay("50ms", "1s", "1m", attempts=None)
        mode: JobMode = UntrackedJob(crew, run="run", restart=restart)
        if self.tracked:
            mode = AckerJob(crew, run="run", restart=restart, replays=[ReplayInput("in", 0)])
        self.core = JobCore(crew, OPTIONS, mode)
        self.jobs: dict[int, int | None] = dict.fromkeys(range(SLOTS))  # the attempt that runs
        self.processes: list[Process] = []
        self.current: dict[int, Process | None] = dict.fromkeys(range(SLOTS))
        self.recalls: list[int] = []
        self.valid_recalls: set[int] = set()
        self.questions: list[int] = []
        self.condemned: list[int] = []
        self.recalled_since_loss = not self.tracked
        self.epoch = 0
        self.over: Over | None = None
        self.held: dict[int, int] = {}  # roots that the vertex gave to no slot: due
        self.due = 0
        self.pending_lost = 0  # roots whose holder is gone
        self.apply(self.core.start(self.now))

    # ------------------------------------------------------------ carrying decisions out

    def tell(self, event: Event) -> None:
        instructions = self.core.handle(event, self.now)
        self.core.validate()
        self.apply(instructions)

    def apply(self, decisions: list[JobInstruction]) -> None:
        for decision in decisions:
            assert self.over is None, f"{decision} after the end"
            self.apply_one(decision)

    def apply_one(self, decision: JobInstruction) -> None:
        match decision:
            case SubmitSlot(slot, attempt):
                self.jobs[slot] = attempt
            case CancelSlot(slot, attempt):
                assert attempt <= (self.jobs[slot] or attempt)
            case RecallStreams(number):
                self.recalls.append(number)
                processes = list(self.current.values())
                all_know = not any(p.owes_epochs for p in processes if p and p.deployed)
                if not self.core.epoch or (all(processes) and all_know):
                    self.valid_recalls.add(number)
            case AskVertexStatus(number):
                self.questions.append(number)
            case Condemn(failure):
                self.condemned.append(failure.root)
            case SendTo(slot, instance, message):
                self.receive(slot, instance, message)
            case SlotUp(slot):
                process = self.current[slot]
                assert process is not None
                assert process.deployed
            case SlotDown(slot):
                self.valid_recalls.clear()
                self.recalled_since_loss = not self.tracked
                ended = self.current[slot]
                if ended is not None and ended.ended:
                    self.current[slot] = None  # starts again
            case Over():
                self.over = decision
                assert decision.state.is_final

    def receive(self, slot: int, instance: str, message: object) -> None:
        process = next(p for p in self.processes if p.name == instance)
        assert process.slot == slot
        if isinstance(message, Cancel):
            process.cancelled = True
            if self.current[slot] is process and self.core.state is not JobState.STOPPING:
                self.current[slot] = None
            return
        assert process is self.current[slot], f"{message} to an instance that is lost"
        match message:
            case Deploy(epoch, run, peers, paused):
                assert not process.deployed
                assert self.recalled_since_loss or self.epoch == 0
                assert run.endswith(f"/{epoch}")
                assert [peer.slot for peer in peers] == list(range(SLOTS))
                for peer in peers:
                    now = self.current[peer.slot]
                    assert now is not None
                    assert now.name == peer.instance
                self.epoch = max(self.epoch, epoch)
                assert epoch == self.epoch
                process.deployed, process.paused = True, paused
            case DropPeers(epoch, slots):
                assert process.deployed
                assert epoch > max(process.owes_epochs, default=0)
                assert epoch >= self.epoch
                assert slot not in slots
                self.epoch = epoch
                process.owes_epochs.append(epoch)
                process.known_down |= set(slots)
            case PeersUp(epoch, peers):
                assert epoch == self.epoch
                assert not any(p.owes_epochs for p in self.current.values() if p and p.deployed)
                assert self.recalled_since_loss
                assert {peer.slot for peer in peers} == process.known_down
                process.known_down.clear()
            case Probe(number):
                process.probes.append(number)
            case EndReplays():
                assert self.due == 0
                assert self.pending_lost == 0
                for other in self.current.values():
                    assert other is not None
                    assert other.ended or other.quiet
                process.may_end = True
            case StopSources():
                assert process.deployed
                process.sources_over = True
            case ReplayNow():
                assert process.deployed
                assert not process.known_down
                assert not process.paused
            case PauseIntake():
                assert process.deployed
                process.paused = True
            case ResumeIntake():
                assert process.paused
                process.paused = False
            case AllowReplays():
                assert process.paused
                assert process.allowed is None
                assert not any(p.work for p in self.current.values() if p)
                process.allowed = message
            case LetOut():
                assert process.paused

    # ------------------------------------------------------------ what happens

    def alive(self, slot: int) -> Process | None:
        process = self.current[slot]
        return process if process and process.alive and process.connected else None

    def lose(self, process: Process) -> None:
        """The world's side of a loss: its roots have no holder any more."""
        self.pending_lost += process.work
        process.work, process.connected = 0, False
        if self.current[process.slot] is process:
            self.current[process.slot] = None
        process.alive = False

    @rule(slot=index)
    def hello(self, slot: int) -> None:
        """A process comes up, also where one is connected (Spark tried again by itself)."""
        if self.jobs[slot] is None or self.core.slots[slot].ended:
            return
        old = self.current[slot]
        process = Process(f"i{len(self.processes)}", slot)
        self.processes.append(process)
        if old is not None:
            if old.deployed:
                self.recalled_since_loss = not self.tracked
            self.lose(old)
        self.current[slot] = process
        self.tell(Said(slot, process.name, Hello(slot, process.name, f"grpc://{process.name}", "host", 1)))

    @rule(slot=index, killed=st.booleans())
    def breaks(self, slot: int, killed: bool) -> None:
        process = self.alive(slot)
        if process is None or process.ended:
            return
        self.lose(process)
        self.tell(Broke(slot, process.name, "stream broke"))
        if killed:
            self.spark_job_ends(slot, True)

    @rule(slot=index, failed=st.booleans())
    def spark_job_ends(self, slot: int, failed: bool) -> None:
        attempt = self.jobs[slot]
        if attempt is None or self.core.slots[slot].failed_starts == 1:
            return
        self.jobs[slot] = None
        self.tell(SparkJobEnded(slot, attempt, "it was killed" if failed else None))

    @rule(slot=index)
    def drops(self, slot: int) -> None:
        process = self.alive(slot)
        if process and process.owes_epochs:
            self.tell(Said(slot, process.name, PeersDropped(process.owes_epochs.pop(0))))

    @rule(slot=index, epoch=st.integers(0, 20))
    def an_old_instance_speaks(self, slot: int, epoch: int) -> None:
        for process in self.processes:
            if process.slot == slot and process is not self.current[slot]:
                before = self.core.state
                self.tell(Said(slot, process.name, PeersDropped(epoch)))
                self.tell(Said(slot, process.name, Heartbeat(epoch, 0, True)))
                self.tell(Broke(slot, process.name, "late"))
                assert before is JobState.STOPPING or self.core.state is before
                return

    @rule(slot=index, answers=st.booleans())
    def heartbeat(self, slot: int, answers: bool) -> None:
        process = self.alive(slot)
        if process is None or not process.deployed or process.ended:
            return
        probe = process.probes.pop(0) if answers and process.probes else 0
        self.tell(Said(slot, process.name, Heartbeat(probe, process.activity, process.quiet)))

    @rule(slot=index)
    def reads(self, slot: int) -> None:
        """A source reads a record, or takes a replay."""
        process = self.alive(slot)
        if process and process.deployed and not process.may_end and not process.ended:
            if process.paused:
                return
            if self.due and slot != SOURCE_ONLY and not process.known_down:
                self.due -= 1
            elif process.sources_over:
                return
            process.work += 1
            process.activity += 1

    @rule()
    def takes_what_is_allowed(self) -> None:
        process = self.alive(0)
        if process and process.allowed:
            allowed, process.allowed = process.allowed, None
            rows = min(allowed.limit, self.due)
            self.due -= rows
            process.work += rows
            process.activity += 1
            root = rows if allowed.limit == 1 else 0
            self.tell(Said(0, process.name, ReplaysOut("in", allowed.group, rows, root, root)))

    @rule(slot=index, other=index)
    def hands_on(self, slot: int, other: int) -> None:
        """A record goes to another slot: neither has it for a moment (its root is pending in the vertex)."""
        sender, receiver = self.alive(slot), self.alive(other)
        if sender and receiver and sender.work and receiver.deployed:
            if other in sender.known_down or other == SOURCE_ONLY:
                return
            sender.work -= 1
            receiver.work += 1
            sender.activity += 1
            receiver.activity += 1

    @rule(slot=index)
    def finishes(self, slot: int) -> None:
        process = self.alive(slot)
        if process and process.work:
            process.work -= 1
            process.activity += 1

    @rule(slot=index)
    def sources_end(self, slot: int) -> None:
        process = self.alive(slot)
        if process and process.deployed and not process.sources_over:
            process.sources_over = True
            process.activity += 1

    @rule(slot=index)
    def ends(self, slot: int) -> None:
        process = self.alive(slot)
        alone = process and slot == SOURCE_ONLY and process.deployed and process.quiet
        if process and (process.may_end or alone) and not process.ended:
            process.ended = True
            self.tell(Said(slot, process.name, SlotEnded()))

    @rule(up=st.sets(index), dropped=st.sets(index), recalled=st.booleans())
    def goes_well(self, up: set[int], dropped: set[int], recalled: bool) -> None:
        """Several steps of a repair at once, so that the later ones are reached often."""
        for slot in sorted(up):
            if self.alive(slot) is None:
                self.hello(slot)
        for slot in sorted(dropped):
            while (process := self.alive(slot)) and process.owes_epochs:
                self.drops(slot)
        if recalled:
            self.recall_answers(1)

    @rule(fails=st.integers(0, 5))
    def recall_answers(self, fails: int) -> None:
        if self.recalls and fails:
            number = self.recalls.pop(0)
            rows, self.pending_lost = self.pending_lost, 0
            self.due += rows
            # Of what comes up late, and is lost on its way to a lost slot, only a recall begun when all know knows.
            self.recalled_since_loss |= number in self.valid_recalls
            self.tell(RecallDone(number, rows))

    @rule()
    def a_record_is_dead(self) -> None:
        if self.condemned:
            self.pending_lost = max(0, self.pending_lost - 1)
            self.tell(Condemned(self.condemned.pop(0)))

    @rule()
    def vertex_answers(self) -> None:
        if self.questions:
            number = self.questions.pop(0)
            held = sum(p.work for p in self.processes)
            self.tell(StatusKnown(number, StreamStatus(held + self.pending_lost, self.due, 0, 0, -1)))

    @rule(ms=st.sampled_from([1, 10, 60, 300]))
    def time_passes(self, ms: int) -> None:
        self.now += ms
        before = dict(self.current)
        self.tell(Tick())
        for slot, process in before.items():
            if (
                process
                and process.deployed
                and not process.ended
                and not self.core.slots[slot].is_instance(process.name)
            ):
                self.lose(process)

    @precondition(lambda self: self.core.epoch)
    @rule(really=st.integers(0, 9))
    def cancel(self, really: int) -> None:
        if not really:
            self.tell(CancelRequested("the user wants it"))

    @rule(really=st.integers(0, 4))
    def drain(self, really: int) -> None:
        if not really:
            self.tell(DrainRequested())

    # ------------------------------------------------------------ what always holds

    @invariant()
    def agree(self) -> None:
        if self.core.is_stopping:
            return
        for slot in self.core.slots:
            process = self.current[slot.number]
            if slot.hello is not None and process is not None:
                assert slot.hello.instance == process.name
                assert slot.deployed == process.deployed
        assert self.core.epoch >= self.epoch

    def teardown(self) -> None:
        """Let everything go well from here on: the job has to come to its end."""
        for _ in range(3_000):
            if self.over is not None:
                break
            self.tell(DrainRequested())
            for slot in range(SLOTS):
                if self.core.is_stopping:
                    self.spark_job_ends(slot, False)
                    continue
                if self.alive(slot) is None:
                    self.hello(slot)
                self.drops(slot)
                self.sources_end(slot)
                if self.due:
                    self.reads(slot)
                while (process := self.alive(slot)) and process.work:
                    self.finishes(slot)
                self.heartbeat(slot, True)
                self.ends(slot)
            self.takes_what_is_allowed()
            self.a_record_is_dead()
            self.recall_answers(1)
            self.vertex_answers()
            self.time_passes(10)
        assert self.over is not None, self.core.state
        assert self.core.state is self.over.state
        assert self.over.state is not JobState.FAILED or self.over.error is not None


class TestTracked(World.TestCase):
    settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


class Untracked(World):
    """With FTStatus.OFF the first loss of a slot that runs ends the job."""

    tracked = False

    @rule(slot=index)
    def ends(self, slot: int) -> None:
        process = self.alive(slot)
        if process and process.deployed and not process.ended and process.quiet:
            process.ended = True
            self.tell(Said(slot, process.name, SlotEnded()))

    @invariant()
    def no_repair(self) -> None:
        assert self.core.epoch <= 1
        assert self.core.state is not JobState.RECOVERING
        assert not self.recalls
        assert not self.questions


class TestUntracked(Untracked.TestCase):
    settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
