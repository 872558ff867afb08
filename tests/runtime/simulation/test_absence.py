"""A slot that stays away for much longer than the timeout: coordinator, slots' loops and vertex on one manual clock.

`Cluster` plays what is between them: processes, streams that carry what they are given in a step of time, and Spark,
which brings a slot back when the test says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.common.clock import Now
from ftlayer.common.rules.restart import FixedDelay
from ftlayer.config import TopologyOptions
from ftlayer.runtime.acker_mode.driver.rules.driver_half import AckerJob
from ftlayer.runtime.acker_mode.driver.rules.isolation import ReplayInput
from ftlayer.runtime.acker_mode.slot.rules import AckerSlot, FailCall, PersistCall, TakeReplaysCall, XorCall
from ftlayer.runtime.acker_mode.task.mode import AckerTaskMode
from ftlayer.runtime.connectors.lane import BatchLimits
from ftlayer.runtime.connectors.sinks import open_sink
from ftlayer.runtime.driver.rules.events import (
    AskVertexStatus,
    Broke,
    Crew,
    Event,
    JobInstruction,
    RecallDone,
    RecallStreams,
    Said,
    SendTo,
    SparkJobEnded,
    StatusKnown,
    Tick,
)
from ftlayer.runtime.driver.rules.job_core import JobCore
from ftlayer.runtime.handler import FTHandler
from ftlayer.runtime.protocol.messages import Deploy, FromSlot, Hello, PeersUp
from ftlayer.runtime.slot import main as loop_module
from ftlayer.runtime.slot.links import Roster
from ftlayer.runtime.slot.main import SlotLoop, roots_in_mail
from ftlayer.runtime.slot.pulse import Pulse
from ftlayer.runtime.slot.rules.core import SlotCore
from ftlayer.runtime.slot.rules.events import (
    CoordinatorSaid,
    CreditCame,
    FrameCame,
    LinkBroke,
    Mailbox,
    ModeInstruction,
    ReplaysCame,
    RootsAccepted,
)
from ftlayer.runtime.slot.sources import Signal, Sources
from ftlayer.runtime.task.actions import SourceRows
from ftlayer.runtime.task.build import build_task
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.connectors import partitions
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.vertex import calls
from ftlayer.vertex.calls import StreamOptions
from ftlayer.vertex.rules.layer import FTLayerCore
from ftlayer.vertex.rules.state import LayerOptions
from ftlayer.vertex.store import MemoryStore

STEP_MS = 50
TIMEOUT_MS = 1_000
NUMBER = pa.schema([("n", pa.int64())])
# An attempt that is used up is a dead letter.
RETRY = StreamOptions(timeout_ms=TIMEOUT_MS, max_attempts=1, backoff_ms=(), jitter=0.0)
OPTIONS = TopologyOptions(heartbeat_timeout_ms=600_000, start_timeout_ms=600_000)


class StillMailbox(Mailbox[Any]):
    """No thread waits: time passes between the turns of a loop."""

    def wait(self, timeout_s: float | None) -> None:
        """Return at once."""


@dataclass
class Numbers:
    """A source's subtask: every ``parts``-th number below ``count``, some a step."""

    cluster: Cluster
    part: int
    parts: int
    position: int = 0
    ended: bool = False
    credit: int = 0

    def start(self) -> None:
        opened = self.cluster.apply(calls.OpenStream("job/numbers", RETRY))
        self.position = int(opened.positions.get(f"p{self.part}", b"0"))

    def take(self, mono_ms: int) -> SourceRows | None:
        count = self.cluster.rows
        end = min(self.position + self.credit, count)
        self.credit = 0
        if self.position >= count:
            self.ended = True
        if end == self.position or self.cluster.sources_pause:
            return None
        values = [number * self.parts + self.part for number in range(self.position, end)]
        before = str(self.position).encode() if self.position else None
        position = calls.SourcePosition(f"p{self.part}", before, str(end).encode())
        rows = SourceRows(
            f"p{self.part}", self.part, self.position, pa.record_batch([values], schema=NUMBER), position
        )
        self.position = end
        return rows

    @property
    def due_ms(self) -> int | None:
        return self.cluster.mono

    def accepted(self, rows: SourceRows) -> None:
        return None

    def finish(self) -> None:
        self.ended = True


@dataclass(eq=False)
class Wires:
    """What a slot's loop sees of the others and of the vertex: `SlotLinks` and `VertexCalls`."""

    cluster: Cluster
    slot: int
    instance: str
    roster: Roster
    peers: dict[int, str] = field(default_factory=dict)
    owed: int = 0  # calls without an answer

    @property
    def reached(self) -> tuple[int, ...]:
        return tuple(self.peers)

    def deploy(self, deploy: Deploy) -> None:
        self.roster.deploy(deploy.epoch, deploy.peers)
        self.peers = {peer.slot: peer.instance for peer in deploy.peers if peer.slot != self.slot}

    def up(self, message: PeersUp) -> list[int]:
        self.roster.up(message.epoch, message.peers)
        self.peers |= {peer.slot: peer.instance for peer in message.peers}
        return [peer.slot for peer in message.peers]

    def drop(self, epoch: int, slots: Any) -> None:
        self.roster.drop(epoch, slots)
        for slot in slots:
            self.peers.pop(slot, None)

    def counts(self, slot: int, instance: str) -> bool:
        return self.roster.is_current(slot, instance)

    def transmit(self, slot: int, frame: bytes) -> None:
        event = FrameCame(self.slot, self.instance, pa.py_buffer(frame))
        self.cluster.mail.append((self.peers[slot], event))

    def grant(self, slot: int, grants: bytes) -> None:
        if slot in self.peers:
            self.cluster.mail.append((self.peers[slot], CreditCame(self.slot, self.instance, grants)))

    @property
    def may_persist(self) -> bool:
        return True

    @property
    def is_quiet(self) -> bool:
        return not self.owed

    def carry_out(self, instruction: ModeInstruction) -> None:
        incarnation = self.cluster.vertex.incarnation
        match instruction:
            case PersistCall(key, ticket, call):
                self._call(call, lambda _: RootsAccepted(key, ticket))
            case XorCall(event):
                self._call(calls.Xor(event.roots, event.values, incarnation), None)
            case FailCall(failures):
                self._call(calls.Fail(failures, incarnation), None)
            case TakeReplaysCall(key, ask):
                self._call(
                    calls.TakeReplays(ask.stream, ask.limit),
                    lambda reply: ReplaysCame(key, reply.batches, reply.held),
                )
            case _:
                raise AssertionError(instruction)

    def _call(self, call: Any, answer: Callable[[Any], Any] | None) -> None:
        self.owed += 1
        self.cluster.calls.append((self, call, answer))


@dataclass(eq=False)
class Process:
    """One instance of a slot."""

    name: str
    slot: int
    mailbox: StillMailbox
    wires: Wires
    pulse: Pulse
    core: SlotCore | None = None
    loop: SlotLoop | None = None
    numbers: Numbers | None = None
    busy_until: int = 0


class Cluster:
    """See the module."""

    def __init__(self, graph: JobGraph, rows: int) -> None:
        self.graph = graph
        self.rows = rows
        self.sources_pause = False
        self.mono, self.wall = 1_000_000, 1_700_000_000_000
        self.store = MemoryStore()
        self.vertex = FTLayerCore(self.store, LayerOptions(), self.now)
        for stream, options in graph.options:
            self.apply(calls.OpenStream(stream, options))
        self.mail: deque[tuple[str, Any]] = deque()
        self.calls: deque[tuple[Wires, Any, Any]] = deque()
        self.late_calls: list[Any] = []
        self.recalls: deque[int] = deque()
        self.questions: deque[int] = deque()
        self.events: deque[Event] = deque()
        self.processes: dict[int, Process] = {}
        self.away: set[int] = set()
        self.names = 0
        crew = Crew(graph.slots, OPTIONS.start_timeout_ms)
        mode = AckerJob(
            crew,
            run="run",
            restart=FixedDelay(attempts=1_000, delay="10ms"),
            replays=[ReplayInput(uid, graph.slot_of(uid, 0)) for uid in graph.replays],
            timeout_ms=TIMEOUT_MS,
        )
        self.core = JobCore(crew, OPTIONS, mode)
        self.obey(self.core.start(self.mono))

    @property
    def now(self) -> Now:
        return Now(self.mono, self.wall)

    def apply(self, call: Any) -> Any:
        if isinstance(call, calls.StreamStatusCall | calls.ListRecords | calls.Stats):
            with self.store.read() as txn:
                return self.vertex.read(txn, call, self.now)
        with self.store.write(intake=isinstance(call, calls.Persist)) as txn:
            outcome = self.vertex.apply(txn, call, None, self.now)
        outcome.after()
        return outcome.reply

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(stream for stream, _ in self.graph.options)

    def status(self) -> calls.StreamStatus:
        found = self.apply(calls.StreamStatusCall(self.streams))
        assert isinstance(found, calls.StreamStatus)
        return found

    def stat(self, name: str) -> int:
        return int(self.apply(calls.Stats()).values[name])

    # ------------------------------------------------------------ processes

    def bring_up(self, slot: int) -> None:
        self.names += 1
        name, mailbox = f"i{self.names}", StillMailbox()
        wires = Wires(self, slot, name, Roster("job", name))
        # Not started: the steps of this test are its beats.
        pulse = Pulse(
            lambda message: self.events.append(Said(slot, name, message)),
            60_000,
            timeout_ms=TIMEOUT_MS,
            held=lambda: [*roots_in_mail(mailbox)],
            on_error=pytest.fail,
        )
        self.processes[slot] = Process(name, slot, mailbox, wires, pulse)
        self.events.append(Said(slot, name, Hello(slot, name, f"grpc://{name}", "host", 1)))

    def deploy(self, process: Process, deploy: Deploy) -> None:
        handler = partial(FTHandler, job=self.graph.name, run=f"{deploy.run}/{process.name}")
        mode = AckerTaskMode(handler, OPTIONS, partial(open_sink, run=process.name))
        tasks: dict[Any, Any] = {
            key: build_task(self.graph, *key, mode) for key in self.graph.subtasks_in(process.slot)
        }
        say = partial(self.say, process)
        core = SlotCore(self.graph, process.slot, tasks, OPTIONS, partial(AckerSlot, process.wires))
        process.core = core
        sources = Sources(core, lambda done: None)
        if ("numbers", process.slot) in tasks:
            process.numbers = Numbers(self, process.slot, self.graph.vertex("numbers").parallelism)
            sources.add(("numbers", process.slot), process.numbers, Signal(lambda: None), BatchLimits(100, 5))  # type: ignore[arg-type]
        process.pulse.watch(core)
        process.loop = SlotLoop(
            core,
            sources,
            process.mailbox,
            process.wires,  # type: ignore[arg-type]
            process.pulse,
            say,
            600_000,
            process.wires.carry_out,
        )
        process.loop.begin(deploy)

    def say(self, process: Process, message: FromSlot) -> None:
        self.events.append(Said(process.slot, process.name, message))

    def lose(self, slot: int, *, late_calls: bool = False) -> None:
        """Kill a slot, and keep it away until `come_back`. Its calls on their way are lost, or come later."""
        gone = self.processes.pop(slot)
        self.away.add(slot)
        if late_calls:
            self.late_calls += [call for wires, call, _ in self.calls if wires is gone.wires]
        self.calls = deque(entry for entry in self.calls if entry[0] is not gone.wires)
        self.mail = deque(entry for entry in self.mail if entry[0] != gone.name)
        for other in self.processes.values():
            other.mailbox.put(LinkBroke(slot, gone.name, "gone"))
        self.events.append(Broke(slot, gone.name, "killed"))
        self.events.append(SparkJobEnded(slot, self.core.slots[slot].attempt, "killed"))

    def come_back(self, slot: int) -> None:
        self.away.discard(slot)

    # ------------------------------------------------------------ time

    def run(self, ms: int) -> None:
        with patch.object(loop_module, "system_now", lambda: self.now):
            for _ in range(ms // STEP_MS):
                self._step()

    def run_until_done(self) -> None:
        for _ in range(100):
            self.run(500)
            ended = all(p.numbers is None or p.numbers.ended for p in self.processes.values())
            if ended and self.status().drained and not self.away:
                return
        raise AssertionError(f"not done: {self.status()}, {self.core.state}")

    def _step(self) -> None:
        self.mono += STEP_MS
        self.wall += STEP_MS
        for _ in range(2):
            for process in self.processes.values():
                if process.numbers is not None:
                    process.numbers.credit = 3
            self._exchange()
        with self.store.write(intake=False) as txn:
            self.vertex.tick(txn, self.now)
        if self.mono % (TIMEOUT_MS // 4) < STEP_MS:
            for process in self.processes.values():
                held = process.pulse.held_roots()
                if held:
                    self.apply(calls.Touch(np.unique(np.concatenate(held)), self.vertex.incarnation))
        self.tell(Tick())

    def _exchange(self) -> None:
        for slot in range(self.graph.slots):
            if slot not in self.processes and slot not in self.away:
                self.bring_up(slot)
        while self.events:
            self.tell(self.events.popleft())
        while self.recalls:
            number = self.recalls.popleft()
            recalled = self.apply(calls.Recall(self.streams, self.vertex.incarnation))
            self.tell(RecallDone(number, recalled.rows))
        while self.questions:
            self.tell(StatusKnown(self.questions.popleft(), self.status()))
        by_name = {process.name: process for process in self.processes.values()}
        for _ in range(len(self.calls)):
            wires, call, answer = self.calls.popleft()
            reply = self.apply(call)
            wires.owed -= 1
            if answer is not None:
                by_name[wires.instance].mailbox.put(answer(reply))
        for _ in range(len(self.mail)):
            name, event = self.mail.popleft()
            if name in by_name:
                by_name[name].mailbox.put(event)
        for process in list(self.processes.values()):
            if process.loop is not None and process.busy_until <= self.mono:
                for _ in range(5):
                    process.loop.turn()
                assert process.core is not None
                process.core.validate()

    # ------------------------------------------------------------ the coordinator

    def tell(self, event: Event) -> None:
        instructions = self.core.handle(event, self.mono)
        self.core.validate()
        self.obey(instructions)

    def obey(self, decisions: list[JobInstruction]) -> None:
        for decision in decisions:
            match decision:
                case RecallStreams(number):
                    self.recalls.append(number)
                case AskVertexStatus(number):
                    self.questions.append(number)
                case SendTo(slot, instance, message):
                    process = self.processes.get(slot)
                    if process is None or process.name != instance:
                        continue
                    if isinstance(message, Deploy):
                        self.deploy(process, message)
                    else:
                        process.mailbox.put(CoordinatorSaid(message))


def cluster_of(rows: int) -> tuple[Cluster, set[int]]:
    """numbers → map → by key → map → sink, in two slots; and what is at the sink."""
    done: set[int] = set()
    env = GraphBuilder("job", parallelism=2)
    numbers = env.source(partitions([0], [0]), "n bigint", uid="numbers", parallelism=2)
    numbers.rebalance().map(lambda n: n).key_by("n").map(lambda n: n).sink(
        lambda batch: done.update(batch.column(0).to_pylist())
    )
    return Cluster(job_graph(env.build(), retry=RETRY), rows), done


@settings(max_examples=10, deadline=None)
@given(
    slot=st.integers(0, 1),
    before_ms=st.integers(3, 16).map(lambda steps: steps * STEP_MS),
    away_ms=st.sampled_from([300, 2_000, 10_000]),
    sources_pause=st.booleans(),
    survivor_busy_ms=st.sampled_from([0, 900]),
    late_calls=st.sampled_from([None, 50, 1_500]),
)
def test_a_slot_that_is_away_for_long_uses_up_no_attempt(
    slot: int,
    before_ms: int,
    away_ms: int,
    sources_pause: bool,
    survivor_busy_ms: int,
    late_calls: int | None,
) -> None:
    cluster, done = cluster_of(rows=200)
    cluster.run(before_ms)
    assert len(cluster.processes) == 2
    cluster.sources_pause = sources_pause
    cluster.lose(slot, late_calls=late_calls is not None)
    # A function that takes long keeps its slot from hearing of the loss.
    cluster.processes[1 - slot].busy_until = cluster.mono + survivor_busy_ms
    if late_calls is not None and late_calls < away_ms:
        cluster.run(late_calls)
        for call in cluster.late_calls:
            cluster.apply(call)
    cluster.run(away_ms - (late_calls or 0))
    cluster.sources_pause = False
    cluster.come_back(slot)
    cluster.run_until_done()
    assert cluster.stat("timed_out") == 0
    assert cluster.stat("dead") == 0
    assert done == set(range(400))


def test_nothing_is_replayed_into_a_plan_that_lacks_a_slot() -> None:
    """Or a record that ends processes would end the next one before the first is back."""
    cluster, done = cluster_of(rows=200)
    cluster.run(600)
    cluster.lose(0 if cluster.graph.slot_of(cluster.graph.replays[0], 0) else 1)
    cluster.run(5_000)
    assert cluster.stat("recalled")
    assert not cluster.stat("replayed")
    cluster.come_back(next(iter(cluster.away)))
    cluster.run_until_done()
    assert done == set(range(400))
